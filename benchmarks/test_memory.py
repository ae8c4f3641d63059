"""`titans bench memory`: it runs, reports its measurements, and rejects invalid options."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import memory
from benchmarks.memory import PEER, QUICK, SHAPE, lines_of
from titans_kernels.bench.process import TimingProcess
from titans_kernels.bench.shapes import flops
from titans_kernels.bench.timing import Failed, Samples
from titans_kernels.memory.forms import chunked, native
from titans_platform.cli import run
from titans_platform.errors import TitansError, UsageError

pytestmark = pytest.mark.slow


def test_memory_command_prints_json_for_every_length(answer):
    result = answer("bench", "memory", "--quick", "--pairs", "2", "--threads", "1")
    assert [row["length"] for row in result["rows"]] == [32, 64]
    for row in result["rows"]:
        assert len(row["ours"]["samples"]) == 2
        assert 0 < row["operator"]["share_of_matmul"] < 1
        # a process with torch in it, and no more than that
        assert 100 < row["ours"]["peak_mb"] < 1000
    assert result["operator_error"] < 1e-5
    assert result["machine"]["torch"] == torch.__version__
    assert result["peer"] is None


def test_wrong_operator_is_refused_before_timing(monkeypatch, capsys):
    right = chunked.coefficients
    wrong = lambda *gates: (gates_ := right(*gates))._replace(C=gates_.C * 1.001)  # noqa: E731
    monkeypatch.setattr(chunked, "coefficients", wrong)
    monkeypatch.setattr(native, "library", lambda dtype: None)
    monkeypatch.setattr(memory, "TimingProcess", None)  # nothing may be started
    assert run(["bench", "memory", "--quick"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: the operator is not right")
    assert "not timed" in error


def test_missing_peer_error_names_the_install_command(monkeypatch, refused):
    monkeypatch.setattr(memory, "versions", dict)
    with pytest.raises(UsageError, match=f"pip install {memory.PEER_REQUIREMENT}$"):
        memory.run([32], 1, 1, against=PEER)
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"]["peers"] == [memory.PEER_REQUIREMENT]
    assert "'nobody' is not known" in refused("bench", "memory", "--quick", "--against", "nobody")


@pytest.mark.parametrize("lengths", ["", "64,x", "0"])
def test_invalid_lengths_raise_usage_error(lengths, refused):
    assert "lengths" in refused("bench", "memory", "--quick", "--lengths", lengths)


class FakeWorker:
    """Answers as a process would: ours 1 s a step at 1024 tokens; the peer 2, 4, ... s, and it may die."""

    dies = False
    done = False

    def __init__(self, builder, arguments, threads, label):
        self.kind, self.length = builder.partition(":")[2], arguments["length"]
        self.samples, self.peak_bytes = Samples(), 2**30

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def turn(self):
        rounds = 1 + len(self.samples.forward)
        if self.kind == "peer" and self.dies and rounds == 2:
            raise Failed("titans-pytorch at T = 1024: killed")
        seconds = {"peer": 2.0 * rounds, "layer": self.length / 1024, "operator": 0.5}[self.kind]
        self.samples.forward.append(seconds / 4)
        self.samples.backward.append(seconds * 3 / 4)


@pytest.fixture
def fake_workers(monkeypatch):
    rates = {"matmul": 1e12, "matmul_of": "a product", "copy": 1e11, "copy_of": 1}
    monkeypatch.setattr(memory, "TimingProcess", FakeWorker)
    monkeypatch.setattr(memory, "ceilings", lambda *_: rates)
    monkeypatch.setattr(memory, "versions", lambda: {PEER: "0.5.5"})


@pytest.mark.usefixtures("fake_workers")
def test_ratios_use_one_round_and_long_rows_our_own_base():
    result = memory.run([256, 1024, 16384], 3, 1, against=PEER)
    exact, base, long = result["rows"]
    assert exact["peer"]["chunk_size"] == 1
    assert base["peer"]["chunk_size"] == 64
    assert base["times_peer"] == {"median": 4, "least": 2, "most": 6}
    assert "peer" not in long
    assert long["times_base"]["median"] == 1
    assert base["ours"]["tokens_per_second"] == 2048
    # by hand, depth 2: 33 products with a weight matrix, and 3 with keys and 3 with errors a layer
    work = 4 * 2 * (33 * 64 * 256 + 2 * 3 * 64 * (64 + 256))
    counted = flops(SHAPE.pairs, SHAPE.chunk_size)
    assert 4 * (counted["forward"] + counted["backward"] - counted["again"]) == work
    assert base["operator"]["share_of_matmul"] == pytest.approx(4096 * work / 1e12)
    lines = lines_of(result)
    assert max(map(len, lines)) <= 80
    assert "4.00x (2.00-6.00)" in "\n".join(lines)
    assert "1.00x*" in "\n".join(lines)


@pytest.mark.usefixtures("fake_workers")
def test_crash_of_a_peer_is_recorded_as_its_result(monkeypatch):
    monkeypatch.setattr(FakeWorker, "dies", True)
    result = memory.run([1024], 3, 1, against=PEER)
    (row,) = result["rows"]
    assert "peer" not in row
    assert row["peer_failed"] == "titans-pytorch at T = 1024: killed"
    assert len(row["ours"]["samples"]) == 3
    assert any("failed" in line for line in lines_of(result))


@pytest.mark.usefixtures("fake_workers")
def test_failure_of_our_form_fails_the_command(monkeypatch):
    def fails(worker):
        raise Failed("layer at T = 1024: killed")

    monkeypatch.setattr(FakeWorker, "turn", fails)
    with pytest.raises(TitansError, match="layer at T = 1024: killed"):
        memory.run([1024], 3, 1)


def test_failed_process_reports_its_error():
    missing = TimingProcess("benchmarks.memory:nobody", {}, 1, "nobody at T = 16")
    with missing, pytest.raises(Failed, match=r"nobody at T = 16: AttributeError: .*nobody"):
        missing.turn()


@pytest.mark.parametrize("kind", ["layer", "operator"])
def test_case_runs_forward_and_backward(kind):
    shape = replace(QUICK, length=24)
    op = getattr(memory, kind)(**memory._sizes(shape))
    y = op.forward()
    assert y.shape[:2] == (1, 24)
    assert torch.isfinite(y).all()
    assert all(g is None or torch.isfinite(g).all() for g in op.backward(y, torch.ones_like(y)))
