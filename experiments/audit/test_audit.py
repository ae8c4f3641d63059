"""The audit finds every planted fault by the check that is meant to, and accuses no correct twin."""

import math

import pytest

from experiments.audit import planted  # noqa: F401 (it registers its layers)
from experiments.audit.layers import FAULTS, TWINS
from titans_core.audit import audit

LENGTH = 40


def test_every_planted_fault_is_registered():
    assert len(FAULTS) == 50


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name):
    fault = FAULTS[name]
    report = audit(lambda: fault.adapt(fault.layer()), width=8, length=LENGTH, only=[fault.check])
    result = report[fault.check]
    assert result.verdict == "fail", result.finding
    assert result.example is not None
    assert not math.isnan(result.example.difference)


FIRST, *OTHERS = TWINS


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(x, marks=pytest.mark.nightly) for x in OTHERS)])
def test_no_correct_twin_is_accused(name):
    layer, adapt = TWINS[name]
    report = audit(lambda: adapt(layer()), width=8, length=LENGTH)
    assert [f"{r.check}: {r.finding}" for r in report.of("fail")] == []
    assert report.precision == "float64"
