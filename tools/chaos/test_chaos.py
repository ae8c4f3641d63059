"""A short `make chaos`: each kind of fault once, with the numbers of an undisturbed run."""

import random

import pytest

from tools.chaos.local import FAULTS, series

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chaos")


# each fault has a shorter test of its own in tests/runs
@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_no_number_and_costs_no_sample(folder, fault):
    line = series(folder, fault, random.Random(fault), hits=1, a_run=1)
    # a run that had come to its end is not struck; another one is
    assert (line.hits, line.equal, line.lost, line.repeated) == (1, line.runs, 0, 0), line
    assert line.notes in ([], ["points whole, each once"])
