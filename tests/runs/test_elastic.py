"""Elastic resources (min_workers, max_workers): validation, placement, and the MIN:MAX syntax."""

import json

import click
import pytest
from pydantic import ValidationError

from tests.runs.test_execute import changed
from titans_platform.cli.train import Workers
from titans_platform.errors import ClusterError, UsageError
from titans_platform.runs.check import check_batch
from titans_platform.runs.spec import Machine, Resources, concurrency


def resources(workers) -> Resources:
    return Resources.model_validate_json(json.dumps({"workers": workers}))


def test_elastic_range_is_a_least_and_a_most_that_share_the_batch_and_fit(tiny_run):
    both = resources([2, 8])
    assert (both.min_workers, both.max_workers, both.cpus) == (2, 8, 8.01)
    assert resources([3, 3]) == resources(3)
    with pytest.raises(ValidationError, match="the least, 4, is more than the most, 2"):
        resources([4, 2])
    check_batch(changed(tiny_run, optim={"global_batch_size": 12}), resources([1, 4]))
    with pytest.raises(UsageError, match="8 rows do not divide among 3 workers"):
        check_batch(changed(tiny_run, optim={"global_batch_size": 8, "parallel": "fsdp"}), resources([1, 4]))
    with pytest.raises(UsageError, match="8 rows cannot be shared by 9 workers"):
        check_batch(changed(tiny_run, optim={"global_batch_size": 8}), resources([1, 9]))
    cluster = [{"CPU": 2}, {"CPU": 2}]
    assert concurrency(resources([2, 8]), Machine.of([{"CPU": 0.5}, *cluster])) == 1
    assert concurrency(resources([1, 2]), Machine.of([{"CPU": 1}, *cluster])) == 2
    with pytest.raises(ClusterError, match="a run takes 6 CPU on 6 workers"):
        concurrency(resources([6, 8]), Machine.of(cluster))


def test_elastic_range_is_written_with_a_colon():
    for text, workers in {"1": 1, "4": 4, "2:8": (2, 8), "4:4": 4}.items():
        assert Workers().convert(text, None, None) == workers
    for text in ("x", "4:2", "-1", "0", "0:2", "2:x"):
        with pytest.raises(click.BadParameter, match=r"as 2:8"):
            Workers().convert(text, None, None)
