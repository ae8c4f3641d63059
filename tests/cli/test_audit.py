"""`titans audit` and the tests that somebody's own repository makes of the checks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from titans_core.audit import Adapter, AuditError, Outcome, audit, report, variant_factory
from titans_platform.cli import run

LAYERS = "experiments.audit.layers"
CHECKS = ("causal_gradient", "repeatable", "pieces")
QUICK = ["--dim", "8", "--length", "40", *(f"--only={name}" for name in CHECKS)]

TESTS = """
from experiments.audit.layers import TWINS
from experiments.audit.planted import ConvolutionOneAhead
from titans_core.audit import checks

layer, adapt = TWINS["delta"]
causal = {"width": 8, "length": 24, "only": ["causal_gradient"]}
test_layer = checks(lambda: adapt(layer()), width=8, length=24, skip=["impossible_retrieval"])
test_leak = checks(ConvolutionOneAhead, **causal, known=causal["only"])
test_found = checks(ConvolutionOneAhead, **causal)
"""


def test_report_is_a_table_and_json_and_a_finding_exit_code_1(capsys, answer):
    assert run(["audit", f"{LAYERS}:Blocks", *QUICK]) == 0
    out, _ = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    assert "causal_gradient" in out
    assert "2 of 2 checks pass, 1 do not apply" in out
    result = answer("audit", f"{LAYERS}:Blocks", *QUICK)
    assert [r["check"] for r in result["results"]] == ["causal_gradient", "repeatable", "pieces"]
    assert result["passed"]
    assert result["precision"] == "float64"
    assert run(["audit", "experiments.audit.planted:ConvolutionOneAhead", *QUICK]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "fail 2 tokens, output 0, input 1" in out
    delta = answer("audit", f"{LAYERS}:Delta", *QUICK, "--adapter", f"{LAYERS}:delta")
    assert {r["verdict"] for r in delta["results"]} == {"pass"}


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "audit: give either TARGET, package.module:Class, or --variant NAME"),
    (["no_module:Layer"], "TARGET: no_module:Layer: ModuleNotFoundError: No module named 'no_module'"),
    ([f"{LAYERS}:Block"], "has no attribute 'Block'"),
    (["torch.nn:Linear"], "torch.nn:Linear: cannot be built: TypeError"),
    ([f"{LAYERS}:Blocks", "--kwargs", "{"], "--kwargs: not JSON"),
    ([f"{LAYERS}:Blocks", "--kwargs", "[1]"], "--kwargs: [1] is not an object of names and values"),
    ([f"{LAYERS}:Blocks", "--dim", "8", "--only", "causal"], "'causal' is not one of causal_gradient, "),
    ([f"{LAYERS}:Blocks", "--dim", "5"], "cannot be called without an adapter"),
    (["--variant", "mca"], "did you mean mac?"),
    (["--variant", "mac", "--adapter", "os:path"], "--adapter: works only with TARGET"),
    (["--variant", "mac", "--dim", "7"], "--variant mac: memory.heads: 2 does not divide d_model 7"),
    (["--variant", "mac", "--kwargs", '{"nope": 1}'], "--variant mac: nope: Extra inputs are not permitted"),
    (["--variant", "mac", "--kwargs", '{"memory": {"rule": "gated_delt"}}'], "did you mean gated_delta?"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, refused):
    assert message in refused("audit", *arguments)


def test_checks_are_tests_in_a_repository_of_its_own(tmp_path):
    (tmp_path / "test_layers.py").write_text(TESTS)
    root = Path(__file__).parents[2]
    paths = f"import sys; sys.path[:0] = {[str(root), str(root / 'kernels')]}; import pytest; "
    code = f"{paths}sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '--tb=long']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    # test_found holds a planted fault, so that one of its checks fails
    assert f"1 failed, {len(report.CHECKS) - 1} passed, 1 xfailed" in done.stdout, done.stdout[-3000:]
    assert "test_found[causal_gradient]" in done.stdout
    assert "causal_gradient: 2 tokens, output 0, input 1" in done.stdout


def test_new_check_is_one_function(monkeypatch):
    monkeypatch.setattr(report, "CHECKS", kept := list(report.CHECKS))
    monkeypatch.setattr("titans_core.audit.CHECKS", kept)

    @report.check("the number of parameters")
    def small(s):
        """The layer is small."""
        return Outcome(sum(p.numel() for p in s.build().module.parameters()), 100)

    result = audit(lambda: nn.Linear(8, 8), width=8, length=8, only=["small"])["small"]
    assert (result.verdict, result.value, result.proves) == ("pass", 72, "The layer is small")


def test_layers_that_cannot_be_called_or_cast_are_handled():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("only on Tuesdays")

    for factory in (Broken, lambda: Adapter(Broken(), Broken(), width=4)):
        with pytest.raises(AuditError, match="only on Tuesdays"):
            audit(factory, width=4, length=16)
    with pytest.raises(AuditError, match="batch_first=True"):
        audit(lambda: nn.GRU(4, 4), width=4)
    with pytest.raises(AuditError, match="either width"):
        Adapter(nn.Identity(), torch.relu)

    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).float().cumsum(1).to(x.dtype)

    report = audit(Casts, width=8, length=24, only=["finite_differences"])
    assert (report.precision, report["finite_differences"].verdict) == ("float64", "pass")


@pytest.mark.parametrize("name", ["lmm", "mac", "mamba2"])
def test_variant_passes_what_is_quick(name):
    skip = ["impossible_retrieval", "time_growth", "state_growth", "finite_differences", "long_inputs"]
    report = audit(variant_factory(name, 16), length=40, skip=skip)
    assert [f"{r.check}: {r.finding}" for r in report.of("fail")] == []
    assert len(report.of("not applicable")) <= 1
