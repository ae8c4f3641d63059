"""The kernel benchmark: its counts, its errors, its requirements."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch
from click.testing import CliRunner

from titans_kernels.bench import check, predict, subjects, timing
from titans_kernels.bench.__main__ import WIDTH, kernels, lines_of, main
from titans_kernels.bench.run import Bench, failures
from titans_kernels.bench.shapes import SHAPES, BenchShape, Target, chosen, flops, traffic
from titans_kernels.bench.subjects import OURS, Op, TimedForm
from titans_kernels.memory.forms import chunked
from titans_kernels.memory.forms.online import BLOCK

CPU = torch.device("cpu")
TINY = BenchShape("tiny", 2, 8, 16, 1, 50, chunk_size=24, heads=2, small=(1, 50))


@pytest.fixture
def tiny(monkeypatch) -> BenchShape:
    """The registry with one small shape in it, and rates that cost nothing to measure."""
    monkeypatch.setitem(SHAPES, TINY.name, TINY)
    monkeypatch.setattr("titans_kernels.bench.shapes._ALL", (TINY,))
    rates = {"matmul": 1e12, "matmul_of": "a product", "copy": 1e11, "copy_of": 1}
    monkeypatch.setattr("titans_kernels.bench.run.ceilings", lambda *_: rates)
    return TINY


def run(*line: str):
    return CliRunner().invoke(kernels, list(line), standalone_mode=False)


# what was worked out by hand when the kernels were planned, in thousands a token and head
PLANNED = {
    "l1-d64-bound": (57, 156), "l1-d128": (197, 541), "l2-d64-h64": (123, 344),
    "l2-d64-h256": (442, 1253), "l2-d128-h128": (426, 1196),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_operations_of_a_shape_equal_the_plan(name):
    counted = flops(SHAPES[name].pairs, 64)
    assert (counted["forward"] / 1e3, counted["backward"] / 1e3) == pytest.approx(PLANNED[name], rel=0.015)


def test_traffic_is_the_operands_and_shapes_are_judged_beside_another():
    counted = traffic(replace(TINY, length=10**9), torch.bfloat16)
    assert counted["forward"] == pytest.approx(4 * 8 * 2 + 12, rel=1e-6)
    assert counted["backward"] == pytest.approx(7 * 8 * 2 + 24, rel=1e-6)
    assert [shape.name for shape in chosen(["l1-d128-long"])] == ["l1-d128-short", "l1-d128-long"]
    assert len(chosen([])) == len(SHAPES)
    here, beside = (SHAPES[name] for name in ("l1-d128-long", "l1-d128-short"))
    assert here.token_heads == beside.token_heads
    assert here.reduced().token_heads == beside.reduced().token_heads
    assert {shape.depth for shape in SHAPES.values()} == {1, 2, 3, 4}
    speed, share = Target("forward", "ns", 1.6, 0.75), Target("forward", "share", 0.15)
    assert str(speed) == "forward at most 1.6 ns, then 0.75 ns"
    assert [speed.verdict(x).split()[-1] for x in (2.0, 1.0, 0.5)] == ["MISSED", "met", "met"]
    assert speed.verdict(0.5).endswith("both met")
    assert (share.verdict(0.2), share.verdict(0.1)) == ("20.0% of matmul, met", "10.0% of matmul, MISSED")
    assert share.verdict(None) == "not measured"


@pytest.mark.parametrize("name", SHAPES)
def test_checks_keep_what_a_kernel_is_chosen_by(name):
    shape = SHAPES[name]
    for reduced in (shape.short(), shape.checked()):
        assert (reduced.widths, reduced.chunk_size) == (shape.widths, shape.chunk_size)
        b = shape.chunk_size if shape.chunk_size > 1 else BLOCK
        assert reduced.length % b
        assert reduced.length > 2 * b
    assert (shape.checked().batch, shape.checked().heads) == (shape.batch, shape.heads)


def test_it_prints_a_table_and_writes_everything(tiny, tmp_path):
    path = tmp_path / "out.json"
    result = run("--shape", "tiny", "--json", str(path), "--repeats", "3", "--commit", "abc")
    assert (result.exit_code, result.return_value) == (0, 0)
    assert max(map(len, result.output.splitlines())) <= WIDTH
    written = json.loads(path.read_text())
    assert written["machine"]["commit"] == "abc"
    assert {"date", "device", "torch", "triton", "cuda"} <= written["machine"].keys()
    ((shape,),) = [one["shapes"] for one in written["runs"]]
    triton, ours, online = shape["rows"]
    assert triton["state"] == online["state"] == "refused"
    assert triton["why"][:20] in result.output
    assert ours["state"] == "timed"
    for phase in ("forward", "backward"):
        measured = ours[phase]
        assert len(measured["samples"]) == 3
        assert measured["least"] <= measured["ns"] <= measured["most"]
        rate = shape["flops"][phase] / measured["ns"] * 1e9
        assert measured["share_of_matmul"] == pytest.approx(rate / 1e12)
    tokens = {"y", "dq", "dk", "dv", "dalpha", "deta", "dtheta"}
    layers = {f"{d}{kind}[{l}]" for d in ("", "d") for kind in ("weights", "momentum") for l in (0, 1)}
    assert all(row["errors"].keys() == tokens | layers for row in ours["checks"])


def test_checks_alone_time_nothing(tiny, monkeypatch):
    monkeypatch.setattr("titans_kernels.bench.run.Interleaved", None)
    result = run("--check", "--dtype", "float32", "--dtype", "bfloat16", "--dtype", "float16")
    assert (result.return_value, result.output.count("chunked           right:")) == (0, 3)


def test_wrong_op_is_reported_and_not_timed(tiny, monkeypatch):
    right = chunked.coefficients
    wrong = lambda *gates: (result := right(*gates))._replace(C=result.C * 1.001)  # noqa: E731
    monkeypatch.setattr(chunked, "coefficients", wrong)
    monkeypatch.setattr(timing.Runner, "turn", None)
    result = run("--shape", "tiny", "--backend", "chunked")
    assert result.return_value == 1
    assert "RED, not timed:" in result.output
    assert "error: tiny: chunked: red, " in result.stderr


def test_every_output_and_gradient_and_a_nan_can_turn_a_check_red():
    judge = check.judges(TINY, torch.float32, CPU)[0]
    for name in judge.expected:
        wrong = judge.expected | {name: judge.expected[name] * 1.001}
        verdict = judge._replace(expected=wrong).verdict(lambda inputs: inputs.call("chunked"))
        assert verdict.worst == name
        assert not verdict.green
    judge = check.judges(TINY, torch.float32, CPU)[0]

    def spoilt(inputs):
        y, *state = inputs.call("chunked")
        return [torch.where(torch.arange(y.numel()).view(y.shape) == 3, math.nan, y), *state]

    verdict = judge.verdict(spoilt)
    assert not verdict.green
    assert math.isinf(verdict.errors["y"])


def raising(what: str):
    def refuse(*_):
        raise RuntimeError(f"{what}\nand much more")

    return refuse


def test_what_cannot_run_is_a_row_and_of_ours_an_error(tiny):
    ours = next(s for s in OURS if s.name == "chunked")
    broken = replace(ours, name="broken", verify=raising("no such kernel"))
    peer = TimedForm("peer", "another's", raising("out of memory"))
    result = next(Bench([broken, ours, peer], torch.float32, CPU, repeats=2).run([tiny]))
    rows = {row["name"]: row for row in result["rows"]}
    assert [rows[name]["state"] for name in ("broken", "chunked", "peer")] == ["failed", "timed", "failed"]
    assert rows["peer"]["why"] == "RuntimeError: out of memory"
    assert failures(result) == ["tiny: broken: failed, RuntimeError: no such kernel"]
    assert rows["chunked"]["times_first"]["step"] == 1
    text = "\n".join(lines_of(result, timed=True, judged=True))
    assert "broken            failed: RuntimeError: no such kernel" in text


def test_op_that_fails_midway_drops_out(tiny):
    calls = count(1)

    def forward():
        if next(calls) > timing.WARM_UP + 3:
            raise RuntimeError("gone")
        return leaf * 2

    leaf, clock = torch.ones(3, requires_grad=True), timing.Clock(CPU)
    ops = {"bad": Op(forward, [leaf]), "good": Op(lambda: leaf * 2, [leaf])}
    turns = timing.Interleaved({name: partial(timing.Runner, op, clock) for name, op in ops.items()})
    turns.run(5)
    assert (turns.failed, len(turns.runners["good"].samples.steps)) == ({"bad": "RuntimeError: gone"}, 5)
    infinite = timing.Interleaved({"bad": lambda: timing.Runner(Op(lambda: leaf / 0, [leaf]), clock)})
    assert infinite.failed == {"bad": "ValueError: its output is not finite"}


def test_kernels_not_served_or_interpreted_are_not_timed(tiny, monkeypatch):
    monkeypatch.setattr(subjects, "refusal", lambda q, weights, options: f"width {q.shape[-1]}")
    result = next(Bench([OURS[0]], torch.float32, CPU, repeats=2).run([tiny]))
    assert lines_of(result, timed=True, judged=False)[-1] == "triton            other form (width 8)"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # in the place of kernels: what is asked here is what the benchmark does with them
    stand_in = replace(OURS[0], refuse=lambda inputs: None, verify=OURS[1].verify)
    result = next(Bench([stand_in, OURS[1]], torch.float32, CPU, repeats=2).run([tiny]))
    triton, ours = result["rows"]
    assert (triton["state"], triton["why"]) == ("green", "Triton's interpreter is not timed")
    assert (len(triton["checks"]), ours["times_first"]["forward"]) == (1, 1)


@pytest.mark.parametrize("line", [["--shape", "l9"], ["--backend", "cuda"], ["--json", "none/x.json"],
                                  ["--repeats", "0"], ["--dtype", "int8"]])  # fmt: skip
def test_bad_usage_is_exit_2_and_one_line(line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *line])
    assert main() == 2
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert message.startswith("error: ")
    assert line[0] in message


def test_instructions_of_a_loop_count_as_often_as_it_runs():
    lines = ["MOV R1, R2", ".L_x_0:", "HMMA R1, R2", "@P0 BRA `(.L_x_0)", "EXIT", ".L_x_1:", "BRA `(.L_x_1)"]
    sass = "\n".join(x if x.startswith(".") else f"        /*0010*/  {x} ;" for x in lines)
    assert predict.issued(sass, "resident.write") == 3 + 2 * predict.LENGTH / predict.CHUNK
    assert predict.issued(sass, "reads.forward") == 5


ABOVE = ["titans_core", "titans_platform", "pydantic", "rich", "ray", "yaml"]


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "code", "says"), [
    (ABOVE, 0, ""), (["click"], 1, "error: the benchmark needs the package click: pip install click\n"),
])  # fmt: skip
def test_operator_imports_without_models_and_platform_and_lists_its_packages(hidden, code, says):
    line = f"import sys; sys.modules.update(dict.fromkeys({hidden})); import titans_kernels.bench.__main__"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, says)
