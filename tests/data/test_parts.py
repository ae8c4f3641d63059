"""Large sources in parts: the same shards for any runner, and finished parts are kept."""

import os
import pickle
import sys
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace

import pytest

import titans_platform.config
from tests.data import small
from titans_platform.config import DataConfig, SourceConfig
from titans_platform.data import PreparedData, by_processes, open_prepared, parts, prepare, shards, sources
from titans_platform.errors import StorageError, UsageError
from titans_platform.provenance import cores

FILES, DOCUMENTS = 6, 30


def config(source: dict) -> DataConfig:
    return small.config({"validation_fraction": 0.1} | source, length=16)


@pytest.fixture
def texts(tmp_path, monkeypatch) -> dict:
    """Six files, each a part."""
    (tmp_path / "texts").mkdir()
    for i in range(FILES):
        texts = (f"document {j} of file {i}" for j in range(DOCUMENTS))
        small.documents(tmp_path / "texts" / f"{i}.jsonl", *texts)
    monkeypatch.setattr(sources, "PART_BYTES", 500)
    monkeypatch.setattr(sources, "PART_TOKENS", 1)
    return {"kind": "files", "path": str(tmp_path / "texts")}


def files(prepared: PreparedData) -> list[tuple[str, str]]:
    return [(file.file, file.sha256) for file in prepared.sources[0].manifest.files]


def tokens(prepared: PreparedData) -> int:
    source = prepared.sources[0]
    return source.manifest.train.tokens + source.manifest.validation.tokens


@pytest.mark.slow
def test_any_number_of_processes_makes_the_same_shards(texts, tmp_path):
    alone = prepare(config(texts), tmp_path / "a", run=by_processes(1))
    assert alone.sources[0].manifest.train.documents > 100
    assert {name.partition("/")[0] for name, _ in files(alone)} == {f"{i:05d}" for i in range(FILES)}
    both = prepare(config(texts), tmp_path / "b", run=by_processes(2))
    assert (files(both), both.fingerprint) == (files(alone), alone.fingerprint)
    assert open_prepared(config(texts), tmp_path / "b", verify=True).fingerprint == alone.fingerprint


def test_what_is_done_is_not_done_again(texts, tmp_path):
    made: list[int] = []

    def counted(jobs: Iterator[parts.PartJob]) -> Iterator:
        for job in jobs:
            made.append(job.number or 0)
            yield from by_processes(1)(iter([job]))

    def killed(jobs: Iterator[parts.PartJob]) -> Iterator:
        yield from counted(islice(jobs, 2))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(texts), tmp_path / "a", run=killed)
    prepared = prepare(config(texts), tmp_path / "a", run=counted)
    assert made == list(range(FILES))
    # one damaged part is made anew
    (prepared.sources[0].files / "00003" / "train-00000.arrow").write_bytes(b"")
    assert files(prepare(config(texts), tmp_path / "a", run=counted, repair=True)) == files(prepared)
    assert made[FILES:] == [3]


@pytest.mark.parametrize("connected", [True, False])
def test_parts_are_ray_tasks_in_a_process_connected_to_ray(texts, tmp_path, monkeypatch, connected):
    ran: list[str] = []

    def runner(name: str) -> parts.Runner:
        return lambda jobs: (ran.append(name), by_processes(1)(jobs))[1]

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: connected))
    monkeypatch.setattr(parts, "by_ray", runner("ray"))
    monkeypatch.setattr(parts, "by_processes", lambda processes: runner("processes"))
    prepare(config(texts), tmp_path / "a")
    assert ran == ["ray" if connected else "processes"]


@pytest.mark.parametrize(("files", "quota"), [
    ({"cpu.max": "250000 100000\n"}, 2), ({"cpu.max": "50000 100000\n"}, 1),
    ({"cpu.max": "max 100000\n"}, 64),
    ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64), ({}, 64),
])  # fmt: skip
def test_cpus_are_at_most_the_quota_of_the_container(tmp_path, monkeypatch, files, quota):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cores(tmp_path) == quota


def test_a_large_source_holds_out_a_limited_number_of_tokens(texts, tmp_path, monkeypatch):
    large = SourceConfig(kind="hub", dataset="x", max_tokens=15_000_000_000)
    assert large.held_out * 15e9 == pytest.approx(50e6)
    monkeypatch.setattr(titans_platform.config, "MAX_VALIDATION_TOKENS", 300)
    data = config(texts | {"max_tokens": 6000, "validation_fraction": 0.5})
    split = prepare(data, tmp_path / "a", run=by_processes(1)).sources[0].manifest.validation
    assert 0 < split.tokens < 600


@pytest.mark.parametrize("limit", [100, 1500, 10**6])
def test_max_tokens_is_exact_and_takes_the_first_documents(texts, tmp_path, limit):
    taken: list[int] = []

    def run(jobs: Iterator[parts.PartJob]) -> Iterator:
        for number, manifest in by_processes(1)(jobs):
            taken.append(number)
            yield number, manifest

    whole = prepare(config(texts), tmp_path / "a", run=by_processes(1))
    cut = prepare(config(texts | {"max_tokens": limit}), tmp_path / "a", run=run)
    assert tokens(cut) == min(limit, tokens(whole))
    read = cut.sources[0].train
    size = read.info.tokens
    assert (read.read(0, size).tokens == whole.sources[0].train.read(0, size).tokens)[:-30].all()
    assert len(taken) == (FILES if limit == 10**6 else -(-limit // (tokens(whole) // FILES)))
    if limit == 100:
        assert not (cut.sources[0].files / "00001").exists()


def test_hub_dataset_s_files_are_parts_of_one_commit(tmp_path, monkeypatch):
    import datasets

    asked: list[str | None] = []

    class Records(list):
        num_shards = 8

        def shard(self, num_shards: int, index: int) -> "Records":
            return Records(self[index::num_shards])

    def load_dataset(path, revision=None, **options):
        asked.append(revision)
        return Records({"text": f"record {i} of the dataset"} for i in range(80))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources.HubSource, "_files", lambda self, revision: [])
    newest = SimpleNamespace(sha="c0ffee")
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **options: newest)
    source = {"kind": "hub", "dataset": "some/corpus"}
    manifest = prepare(config(source), tmp_path, run=by_processes(1)).sources[0].manifest
    assert (manifest.revision, set(asked)) == ("c0ffee", {"c0ffee"})
    assert manifest.train.documents + manifest.validation.documents == 80
    assert (manifest.source["dataset"], manifest.tokenizer) == ("some/corpus", "byte")
    pinned = prepare(config(source | {"revision": "v1"}), tmp_path, run=by_processes(1))
    assert pinned.sources[0].manifest.revision == "v1"


def test_damage_that_neither_size_nor_time_shows_is_found_by_verify(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 2048)
    data = config({"kind": "corpus", "max_tokens": 5000, "validation_fraction": 0})
    shard = prepare(data, tmp_path).sources[0].files / "train-00002.arrow"
    stat, content = shard.stat(), bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    open_prepared(data, tmp_path)
    with pytest.raises(UsageError, match=r"train-00002\.arrow: corrupted shard"):
        open_prepared(data, tmp_path, verify=True)
    prepare(data, tmp_path, repair=True)
    open_prepared(data, tmp_path, verify=True)


@pytest.mark.parametrize("error", [UsageError("data.sources.0: bad"), StorageError("no space left")])
def test_error_in_a_ray_task_is_raised_unchanged(error, monkeypatch):
    def fails(job):
        raise error

    monkeypatch.setattr(parts, "make_part", fails)
    back = pickle.loads(parts._ray_task({"job": pickle.dumps(SimpleNamespace(number=3))})["result"])
    assert (type(back), str(back)) == (type(error), str(error))
