"""`--dry-run` reports the errors of a run at once, in one line that names the field."""

import json
import re
import time
from itertools import product

import pytest
import torch

from tests.small import changed
from titans_platform import cli
from titans_platform.errors import UsageError
from titans_platform.runs import check
from titans_platform.runs.spec import Resources


@pytest.mark.parametrize(("arguments", "line"), [
    (["--set", "data.sources=[{kind: files, path: nowhere/*.txt}]"], "data.sources.0"),
    (["--set", "data.tokenizer=none.model"], "none.model"),
    (["--set", "eval.columns.x=[{task: recal}]"], "eval.columns.x.0.task: "),
    (["--set", "optim.micro_batch_size=3"], "optim.micro_batch_size: 3 does not divide the 4 rows"),
    (["--set", "optim.global_batch_size=1", "--workers", "2"], "optim.global_batch_size: 1 rows"),
    (["--gpus", "1"], "1 GPU missing"),
    (["--workers", "1000", "--set", "optim.global_batch_size=1000"], "workers: "),
    (["--workers", "3", "--set", "optim.parallel=fsdp"], "optim.global_batch_size: 4 rows do not divide"),
    (["--set", "model.memory.depth=10000"], "model.memory.depth"),
    (["--set", "model.memory.backend=triton"], "model.memory.backend: triton does not support this call"),
    (["--set", "model.d_model=1000000", "--set", "model.n_layers=100"], "model: "),
    (["--set", "model.n_layers=1000000000"], "model.n_layers"),
    (["--set", "data.sequence_length=1000000000"], "data.sequence_length: "),
    (["--set", "start_from=nobody"], "start_from: nobody: no such run under"),
])  # fmt: skip
def test_what_cannot_run_is_refused_in_one_line_and_at_once(tiny_yaml, tmp_path, refused, arguments, line):
    root, began = tmp_path / "runs", time.monotonic()
    assert line in refused("train", tiny_yaml, "--root", root, "--dry-run", *arguments)
    assert time.monotonic() - began < 20
    assert not root.exists()


def test_a_worker_is_charged_for_its_own_tokens_only(tiny_run, monkeypatch):
    """Tokens of its rows or, under sequence parallelism, of its part of every row; of one micro-batch."""
    monkeypatch.setattr(check, "machine_memory", lambda: 2**30)
    tokens = {}
    for parallel, micro in product(("ddp", "sequence"), (None, 1)):
        optim = {"parallel": parallel, "micro_batch_size": micro, "global_batch_size": 4}
        config = changed(tiny_run, optim=optim, data={"sequence_length": 2**24, "rows": "streams"})
        with pytest.raises(UsageError) as caught:
            check.check_resources(config, Resources(workers=2), shared=True)
        result = re.search(r"and ([\d,]+) tokens at once take at least ([\d.,]+) GiB", str(caught.value))
        tokens[parallel, micro] = int(result[1].replace(",", "")) / 2**24
    assert tokens == {("ddp", None): 2, ("ddp", 1): 1, ("sequence", None): 2, ("sequence", 1): 0.5}


def test_flops_of_several_rows_and_shards_of_a_node_are_counted(tiny_run):
    one, four = (changed(tiny_run, optim={"bptt_rows": n}, data={"rows": "streams"}) for n in (1, 4))
    assert check.training_flops(four) == pytest.approx(4 * check.training_flops(one), rel=0.05)
    ddp, hsdp = (changed(tiny_run, optim={"parallel": kind}) for kind in ("ddp", "hsdp"))
    needed = [check.needed_memory(run, Resources(workers=4))["model"] for run in (ddp, hsdp)]
    assert needed[0] // 4 == needed[1]


def test_states_of_streams_that_take_turns_need_memory(tiny_run, monkeypatch):
    run = lambda groups: changed(tiny_run, optim={"stream_groups": groups}, data={"rows": "streams"})  # noqa: E731
    one, many = (check.needed_memory(run(groups), Resources()) for groups in (1, 5))
    state = check.sizes(tiny_run)["state_bytes"] * tiny_run.optim.global_batch_size
    assert [needed["optim.stream_groups"] for needed in (one, many)] == [state, 5 * state]
    monkeypatch.setattr(check, "machine_memory", lambda: sum(one.values()) + state)
    check.check_resources(run(2), Resources(), shared=True)
    with pytest.raises(UsageError, match=r"^optim\.stream_groups: .* take at least"):
        check.check_resources(run(5), Resources(), shared=True)


@pytest.mark.parametrize(("words", "rows", "bytes_"), [(1000, 200_000, "11,000"), (0, 64, "0")])
def test_rows_longer_than_their_text_are_refused(words, rows, bytes_, tiny_yaml, tmp_path, refused):
    (tmp_path / "text.txt").write_text("some words " * words)
    source = f"data.sources=[{{kind: files, path: {tmp_path}/text.txt}}]"
    given = ["--dry-run", "--set", source, "--set", f"data.sequence_length={rows}"]
    error = refused("train", tiny_yaml, "--root", tmp_path / "runs", *given)
    limit = f"is more than the at most {bytes_} tokens of data.sources.0"
    assert error.startswith(f"error: data.sequence_length: {rows:,} {limit}")


def test_timing_a_step_is_bounded(tiny_run, monkeypatch):
    """By operations and by memory: fewer rows are timed, or none."""
    assert check.seconds_per_token(tiny_run)
    row = 3 * (check.training_flops(tiny_run) or 0)
    monkeypatch.setattr(check, "TIMED_FLOPS", 2.5 * row)
    assert check.timed_rows(tiny_run) == 2
    assert check.seconds_per_token(tiny_run)
    monkeypatch.setattr(check, "TIMED_FLOPS", 0.5 * row)
    assert check.seconds_per_token(tiny_run) is None
    monkeypatch.setattr(check, "machine_memory", lambda: 2**10)
    monkeypatch.setattr(check, "training_flops", None)  # not counted for rows that do not fit
    assert check.seconds_per_token(tiny_run) is None


@pytest.mark.parametrize("name", ["../../evil", "a/b", "", "..", "two words"])
def test_a_study_s_name_is_a_word(tmp_path, refused, name):
    study = {"name": name, "columns": {"x": {"title": "X"}}, "scales": {"small": {}}, "rows": [{"name": "a"}]}
    (tmp_path / "s.yaml").write_text(json.dumps(study))
    line = "sweep", "run", tmp_path / "s.yaml", "--scale", "small", "--root", tmp_path / "r"
    assert "s.yaml.name: String should match pattern" in refused(*line)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.yaml"]


@pytest.mark.parametrize("there", [0, 1])
def test_what_can_run_and_a_gpu_left_unused_are_shown(tiny_yaml, tmp_path, capsys, monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    for asked in ([], ["--gpus", "0.5"]):
        code = cli.run(["train", str(tiny_yaml), "--root", str(tmp_path / "runs"), "--dry-run", *asked])
        shown = capsys.readouterr().out
        assert ("--gpus 1" in shown) == (there == 1 and not asked)
        assert code == (2 if asked and not there else 0)
        assert code or "tokens to train on               2,560" in shown
        assert "_" not in shown
        assert not (tmp_path / "runs").exists()
