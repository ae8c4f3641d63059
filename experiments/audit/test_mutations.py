"""Faults that a program plants at any period and residue are seen by the check that is meant to."""

import pytest

from experiments.audit.mutations import D, Ema, adapt, mutants
from titans_core.audit import audit

MUTANTS = mutants()


def test_there_are_enough_kinds_and_periods():
    assert len(MUTANTS) >= 80
    assert {20, 40, 100} <= {int(name.split("period ")[1].split(",")[0]) for name in MUTANTS}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails_the_check_that_is_meant_to_see_it(name):
    check, layer = MUTANTS[name]
    assert audit(lambda: adapt(layer()), width=D, only=[check])[check].verdict == "fail"


def test_layer_without_a_fault_passes_every_check():
    report = audit(lambda: adapt(Ema()), width=D)
    assert [f"{r.check}: {r.finding}" for r in report.of("fail")] == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 6))
def test_other_periods_and_residues_are_seen_too(seed):
    unseen = []
    for name, (check, layer) in mutants(seed).items():
        if audit(lambda layer=layer: adapt(layer()), width=D, only=[check])[check].verdict != "fail":
            unseen.append(name)
    assert unseen == []
