"""Faults that a program plants at any period and residue are seen by the check that is meant to."""

import pytest

from experiments.audit.mutations import D, Ema, adapt, mutants
from titans_core.audit import audit

MUTANTS = mutants()


def test_mutants_cover_enough_kinds_and_periods():
    assert len(MUTANTS) >= 80
    assert {20, 40, 100} <= {int(name.split("period ")[1].split(",")[0]) for name in MUTANTS}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails_its_intended_check(name):
    check, layer = MUTANTS[name]
    assert audit(lambda: adapt(layer()), width=D, only=[check])[check].verdict == "fail"


def test_layer_without_fault_passes_every_check():
    report = audit(lambda: adapt(Ema()), width=D)
    assert [f"{r.check}: {r.finding}" for r in report.of("fail")] == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 6))
def test_mutants_of_other_periods_and_residues_are_caught(seed):
    unseen = []
    for name, (check, layer) in mutants(seed).items():
        if audit(lambda layer=layer: adapt(layer()), width=D, only=[check])[check].verdict != "fail":
            unseen.append(name)
    assert unseen == []
