"""Preparing data: once, atomically, by any number of processes; and errors on corruption."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import small
from tests.data.small import PREPARE, config, drawing
from titans_platform.data import open_prepared, prepare
from titans_platform.data.shards import write_table
from titans_platform.errors import TitansError, UsageError
from titans_platform.tasks import TASKS, Item


def folders(root: Path) -> dict[str, int]:
    """Prepared folders by name, with the time of their manifests."""
    return {path.parent.name: path.stat().st_mtime_ns for path in root.glob("data/*/manifest.json")}


def first_batch(prepared) -> list:
    return prepared.train_stream(drawing(4)).batch(3).tokens.tolist()


@pytest.fixture
def texts(tmp_path) -> dict:
    contents = (f"document number {i}, with its own text\n" * (i + 1) for i in range(20))
    return small.texts(tmp_path / "texts", *contents, validation_fraction=0.2)


@pytest.fixture
def sum_task(sums) -> dict:
    return {"kind": "task", "rows": 30, "tasks": [{"task": sums, "options": {"largest": 4}}]}


def test_only_changed_sources_are_prepared_again(texts, tmp_path):
    calls = []
    first = prepare(config(texts), tmp_path, progress=lambda *args: calls.append(args))
    before, made = folders(tmp_path), first.sources[0].manifest
    total = made.train.tokens + made.validation.tokens
    assert calls[-1][:3] == (f"files:{Path(texts['path']).name}", 20, total)
    calls.clear()
    second = prepare(config(texts), tmp_path, progress=lambda *args: calls.append(args))
    assert not calls
    assert (folders(tmp_path), first.fingerprint) == (before, second.fingerprint)
    assert first_batch(first) == first_batch(second)
    other = tmp_path / "other.txt"
    other.write_text("another text, and a long enough one")
    second = {"kind": "files", "path": str(other), "validation_fraction": 0.0}
    both, before = prepare(config(texts, second), tmp_path), folders(tmp_path)
    other.write_text("now with another content of some length")
    again, after = prepare(config(texts, second), tmp_path), folders(tmp_path)
    assert (len(before), len(after)) == (2, 3)
    assert all(after[name] == time for name, time in before.items())
    assert both.fingerprint != again.fingerprint
    second = prepare(config(texts | {"weight": 2.0}, length=16), tmp_path)
    assert folders(tmp_path) == after
    assert first.fingerprint != second.fingerprint


def test_fingerprint_is_of_content_and_open_needs_neither_sources_nor_tokenizer(texts, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(texts["path"], moved)
    here = prepare(config(texts), tmp_path / "a").fingerprint
    assert prepare(config(texts | {"path": str(moved)}), tmp_path / "b").fingerprint == here
    (moved / "00.txt").write_text("something else")
    assert prepare(config(texts | {"path": str(moved)}), tmp_path / "b").fingerprint != here
    spec = tmp_path / "words.json"
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<unk>": 0, "document": 1}, unk_token="<unk>")).save(str(spec))
    data = config(texts, length=1, tokenizer=str(spec))
    made = prepare(data, tmp_path / "root")
    shutil.rmtree(texts["path"])
    spec.unlink()
    opened = open_prepared(data, tmp_path / "root")
    assert (opened.fingerprint, first_batch(opened)) == (made.fingerprint, first_batch(made))


def test_half_written_folder_is_ignored_and_failure_leaves_nothing(texts, tmp_path):
    first = prepare(config(texts), tmp_path / "a")
    (name,) = folders(tmp_path / "a")
    for left in (name, f"{name}.partial"):
        half = tmp_path / "b" / "data" / left
        half.mkdir(parents=True)
        (half / "train-00000.arrow").write_bytes(b"half")
    assert first_batch(prepare(config(texts), tmp_path / "b")) == first_batch(first)
    assert not (tmp_path / "b" / "data" / f"{name}.partial").exists()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(UsageError, match=r"^data\.sources\.0: .*bad\.jsonl cannot be read"):
        prepare(config({"kind": "files", "path": str(bad)}), tmp_path / "root")
    left = [path.name for path in (tmp_path / "root" / "data").iterdir()]
    assert set(left) <= {"index", "huggingface"}
    assert not list((tmp_path / "root" / "data" / "index").glob("*.json"))


def shard_of(prepared) -> Path:
    source = prepared.sources[0]
    return source.files / source.manifest.train.shards[0].file


@pytest.mark.parametrize(("damage", "says"), [
    (lambda path: os.truncate(path, path.stat().st_size - 100), "truncated shard"),
    (lambda path: path.unlink(), "missing shard"),
    (lambda path: path.write_bytes(bytes(255 - b for b in path.read_bytes())), "corrupted shard"),
])  # fmt: skip
def test_damaged_shard(texts, tmp_path, damage, says):
    made = prepare(config(texts), tmp_path)
    shard = shard_of(made)
    damage(shard)
    for opening in (open_prepared, prepare):
        with pytest.raises(UsageError, match=f"^{shard}: {says}.*run titans data prepare again$"):
            opening(config(texts), tmp_path)
    repaired = prepare(config(texts), tmp_path, repair=True)
    assert first_batch(repaired) == first_batch(open_prepared(config(texts), tmp_path))
    assert repaired.fingerprint == made.fingerprint


@pytest.mark.parametrize("change", [
    lambda text: text[: len(text) // 2], lambda text: text.replace('"documents": ', '"documents": 1'),
    lambda text: "[]", lambda text: "",
])  # fmt: skip
def test_corrupted_manifest(texts, tmp_path, change):
    path = shard_of(prepare(config(texts), tmp_path)).with_name("manifest.json")
    path.write_text(change(path.read_text()))
    with pytest.raises(UsageError, match=r"manifest\.json: .*run titans data prepare again"):
        open_prepared(config(texts), tmp_path)
    prepare(config(texts), tmp_path, repair=True)
    open_prepared(config(texts), tmp_path)


def test_root_that_cannot_be_written_and_too_little_text_are_one_line(texts, tmp_path):
    """`/dev/full` is a disk without room."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--root: .*file"):
        prepare(config(texts), tmp_path / "file")
    error = r"^/dev/full: cannot be written: No space left on device; free space"
    with pytest.raises(TitansError, match=error):
        write_table(Path("/dev/full"), {"token": np.arange(100_000)})
    path = tmp_path / "short.txt"
    path.write_text("short")
    with pytest.raises(UsageError, match=r"data\.sources\.0: 6 training tokens .*data\.sequence_length"):
        prepare(config({"kind": "files", "path": str(path)}), tmp_path)


@pytest.mark.slow
def test_two_processes_at_once(texts, tmp_path):
    data = config(texts)
    command = [sys.executable, "-c", PREPARE, data.model_dump_json(), str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=240)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert printed[0] == printed[1] == open_prepared(data, tmp_path).fingerprint
    assert len(folders(tmp_path)) == 1


def test_task_rows_are_items_made_anew_by_version_and_length(sum_task, tmp_path, monkeypatch):
    prepared = prepare(config(sum_task), tmp_path)
    batch = prepared.train_stream(drawing(30)).batch(0)
    assert batch.tokens.shape == (30, 9)
    for tokens, starts, loss in zip(*batch, strict=True):
        text = prepared.tokenizer.decode(tokens.tolist())
        question, answer = text.strip(".").split("=")
        assert sum(map(int, question.split("+"))) == int(answer)
        assert (tokens[0], tokens[8]) == (prepared.tokenizer.bos, prepared.tokenizer.pad)
        assert starts.tolist() == [True] + [False] * 8
        # tokens 0-7 are the item and its last is the answer, so only the prediction made at 6 counts
        assert loss.tolist() == [False] * 6 + [True, False]
        assert Item(((text, False),)).hash in prepared.item_hashes
    assert "0" * 16 not in prepared.item_hashes
    assert len(prepared.item_hashes.sorted) <= 25
    assert prepare(config(sum_task), tmp_path).fingerprint == prepare(config(sum_task), tmp_path).fingerprint
    prepare(config(sum_task, length=12), tmp_path)
    assert len(folders(tmp_path)) == 2
    monkeypatch.setattr(TASKS.find(sum_task["tasks"][0]["task"]), "version", 2)
    prepare(config(sum_task), tmp_path)
    assert len(folders(tmp_path)) == 3
    prepared = prepare(config(sum_task), tmp_path)
    with pytest.raises(UsageError, match=r"data\.sources: 0 validation tokens, .*validation_fraction"):
        prepared.validation(4)
    with pytest.raises(UsageError, match="did you mean recall"):
        prepare(config(sum_task | {"tasks": [{"task": "recal"}]}), tmp_path)
    silent = sum_task | {"tasks": [sum_task["tasks"][0] | {"weight": 0.0}]}
    with pytest.raises(UsageError, match=r"data\.sources\.0\.tasks: every weight is 0"):
        prepare(config(silent), tmp_path)


def test_tokens_by_source(texts, sum_task, tmp_path):
    prepared = prepare(config(texts, sum_task, texts | {"max_tokens": 500}), tmp_path)
    name = f"files:{Path(texts['path']).name}"
    assert prepared.labels == [f"{name}#0", "task:my_lab.tasks:Sums", f"{name}#2"]
    _, task, cut = (source.manifest for source in prepared.sources)
    assert (task.train.tokens, cut.train.tokens + cut.validation.tokens) == (30 * 8, 500)
