"""A short `make chaos`: each kind of fault once, with the numbers of an undisturbed run."""

import random

import pytest

from tools.chaos.local import FAULTS, series

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chaos")


# a killed driver, signals, a full disk and an absent MLflow have shorter tests of their own in tests/runs
SHORT = ("NaN, skip",)
CASES = [pytest.param(fault, marks=[] if fault in SHORT else pytest.mark.nightly) for fault in FAULTS]


@pytest.mark.parametrize("fault", CASES)
def test_a_fault_changes_no_number_and_costs_no_sample(folder, fault):
    line = series(folder, fault, random.Random(fault), hits=1, a_run=1)
    # a run that had come to its end is not struck; another one is
    assert (line.hits, line.equal, line.lost, line.repeated) == (1, line.runs, 0, 0), line
    assert line.notes in ([], ["points whole, each once"])
