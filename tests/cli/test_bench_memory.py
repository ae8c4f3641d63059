"""`titans bench memory`: it runs, says what it says, and refuses what it should."""

from __future__ import annotations

import importlib.metadata
import io
import json

import pytest
import torch

from titans_kernels.memory import chunked
from titans_platform.benchmarks import memory as benchmark
from titans_platform.benchmarks.check import operator_error, require_right
from titans_platform.benchmarks.render import print_memory
from titans_platform.benchmarks.subjects import PEER, Shape, Subject, build
from titans_platform.benchmarks.worker import Worker
from titans_platform.cli import run
from titans_platform.errors import TitansError, UsageError


def test_the_command_prints_json_of_every_length(capsys):
    assert run(["bench", "memory", "--quick", "--pairs", "2", "--threads", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["length"] for row in result["rows"]] == [32, 64]
    for row in result["rows"]:
        assert len(row["ours"]["samples"]) == 2
        assert 0 < row["operator"]["share_of_matmul"] < 1
        # a process with torch in it, and no more than that
        assert 100 < row["ours"]["peak_mb"] < 1000
    assert result["operator_error"] < 1e-9
    assert result["peer"] is None


def test_a_wrong_operator_is_not_timed(monkeypatch, capsys):
    right = chunked.coefficients

    def wrong(*gates):
        found = right(*gates)
        return found._replace(C=found.C * 1.001)

    monkeypatch.setattr(chunked, "coefficients", wrong)
    monkeypatch.setattr(benchmark, "Worker", None)  # nothing may be started
    assert run(["bench", "memory", "--quick"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: the operator is")
    assert "not timed" in error


def test_the_operator_is_right():
    assert operator_error(chunk_size=16, length=35) < 1e-12
    assert require_right(16) < 1e-12


def test_a_peer_that_is_not_installed_is_named_with_its_fix(monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UsageError, match=r"pip install titans-lab\[peers\]"):
        benchmark.run([32], 1, 1, against=PEER)
    monkeypatch.undo()
    assert run(["bench", "memory", "--quick", "--against", "nobody"]) == 2
    assert "'nobody' is not known" in capsys.readouterr().err


@pytest.mark.parametrize("lengths", ["", "64,x", "0"])
def test_lengths_that_cannot_be_are_refused(lengths, capsys):
    assert run(["bench", "memory", "--quick", "--lengths", lengths]) == 2
    assert capsys.readouterr().err.startswith("error: ")


class FakeWorker:
    """Answers as a process would: ours 1 s a step, an operator with its rate; the peer 2 s, then it dies."""

    dies = False

    def __init__(self, subject: Subject):
        self.subject, self.steps = subject, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def step(self):
        self.steps += 1
        if self.subject.kind == PEER and self.dies and self.steps == 2:
            raise TitansError("titans-pytorch at T = 1024: killed")
        seconds = {PEER: 2.0 * self.steps, "layer": self.subject.length / 1024, "operator": 0.5}
        return {"seconds": seconds[self.subject.kind], "peak_bytes": 2**30, "matmul_rate": 1e12}


def table(result) -> str:
    from rich.console import Console

    console = Console(width=80, record=True, file=io.StringIO())
    print_memory(result, console)
    return console.export_text()


def test_ratios_are_of_neighbours_and_long_rows_are_compared_with_our_own(monkeypatch):
    monkeypatch.setattr(benchmark, "Worker", FakeWorker)
    monkeypatch.setattr(benchmark, "peer_version", lambda: "0.5.5")
    result = benchmark.run([256, 1024, 16384], 3, 2, against=PEER)
    exact, base, long = result["rows"]
    assert exact["peer"]["chunk_size"] == 1
    assert base["peer"]["chunk_size"] == 64
    assert base["times_peer"] == {"median": 4, "least": 2, "most": 6}
    assert "peer" not in long
    assert long["times_base"]["median"] == 1
    assert base["ours"]["tokens_per_second"] == 2048
    share = 4096 * Shape().operator_flops() / 1e12
    assert base["operator"]["share_of_matmul"] == pytest.approx(share)
    text = table(result)
    assert max(map(len, text.splitlines())) <= 80
    assert "4.00x (2.00-6.00)" in text
    assert "1.00x*" in text


def test_a_peer_that_dies_is_a_result(monkeypatch):
    monkeypatch.setattr(benchmark, "Worker", FakeWorker)
    monkeypatch.setattr(benchmark, "peer_version", lambda: "0.5.5")
    monkeypatch.setattr(FakeWorker, "dies", True)
    result = benchmark.run([1024], 3, 2, against=PEER)
    (row,) = result["rows"]
    assert "peer" not in row
    assert row["peer_failed"] == "titans-pytorch at T = 1024: killed"
    assert len(row["ours"]["samples"]) == 3
    assert "failed" in table(result)


def test_a_process_that_fails_says_why():
    wrong = Subject("nobody", 16, Shape(), threads=1)
    with Worker(wrong) as worker, pytest.raises(TitansError, match="nobody at T = 16: KeyError: 'nobody'"):
        worker.step()


def test_the_share_counts_the_products_of_the_parallel_form():
    # by hand, depth 2: 33 products with a weight matrix, and 3 with keys and 3 with errors a layer
    shape = Shape(heads=1, head_dim=64, expansion=4, depth=2, chunk_size=64)
    assert shape.operator_flops() == 2 * (33 * 64 * 256 + 2 * 3 * 64 * (64 + 256))


@pytest.mark.parametrize("kind", ["layer", "operator"])
def test_a_subject_steps_forward_and_backward(kind):
    step = build(Subject(kind, 24, benchmark.QUICK_SHAPE, threads=1))
    assert torch.isfinite(step())
    assert torch.equal(step(), step())
