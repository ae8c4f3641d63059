"""Estimates: how long a plan takes, and how many cells fit into memory."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from tests.report.small import save, study_of
from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.runs import check
from titans_platform.runs.spec import Machine
from titans_platform.study import plan as module
from titans_platform.study.grid import Cell
from titans_platform.study.plan import CELL_OVERHEAD, STARTUP, estimate, eval_tokens, place

ROWS = ("fast", "slow", "slower")
GIB = 2**30


@pytest.fixture
def study(tmp_path):
    """Three rows of two seeds each, told apart by their width."""
    cells = (
        Cell(row, seed, RunConfig.model_validate({"seed": seed, "model": {"d_model": width}}), f"{row}{seed}")
        for seed in (0, 1)
        for row, width in zip(ROWS, (16, 32, 64), strict=True)
    )
    return study_of(tmp_path, *cells)


def test_each_row_is_timed_with_its_own_model(study, monkeypatch):
    per_token, timed = {16: 1e-5, 32: 3e-5, 64: 9e-5}, []

    def seconds_per_token(config: RunConfig) -> float:
        timed.append(config.model.d_model)
        return per_token[config.model.d_model]

    monkeypatch.setattr(module, "seconds_per_token", seconds_per_token)
    config = study.cells[0].config
    tokens = config.tokens + eval_tokens(config) / 3
    seconds, basis = estimate(replace(study, concurrency=2))
    assert sorted(timed) == [16, 32, 64]
    each = sum(2 * time * tokens for time in per_token.values())
    assert seconds == pytest.approx(STARTUP + (each + 6 * CELL_OVERHEAD) / 2)
    assert basis == "optimiser steps of 3 of 3 rows timed now"


def test_a_row_that_was_not_timed_gets_the_mean(study, monkeypatch):
    monkeypatch.setattr(module, "TIMING_SECONDS", -1.0)
    monkeypatch.setattr(module, "seconds_per_token", lambda config: 1e-5)
    config = study.cells[0].config
    each = 1e-5 * (config.tokens + eval_tokens(config) / 3) + CELL_OVERHEAD
    seconds, basis = estimate(replace(study, concurrency=6))
    assert (seconds, basis) == (pytest.approx(STARTUP + each), "optimiser steps of fast timed now")
    monkeypatch.setattr(module, "seconds_per_token", Mock(side_effect=[module.Diverged("loss nan"), 1e-5]))
    assert estimate(replace(study, concurrency=6))[1].endswith(" timed now; fast diverged in them")
    monkeypatch.setattr(module, "seconds_per_token", Mock(side_effect=module.Diverged("loss nan")))
    assert estimate(study)[1].startswith("no cell is finished yet, and fast, ")


def test_finished_cells_replace_timed_steps(study):
    save(study.root, study.cells[0], train_seconds=30.0, eval_seconds=10.0)
    seconds, basis = estimate(replace(study, concurrency=1))
    # five cells are left, and rows without a finished cell get the mean of those with one
    assert (seconds, basis) == (pytest.approx(STARTUP + 5 * (40 + CELL_OVERHEAD)), "1 finished cells")


@pytest.mark.parametrize("threads", [1, 2])
def test_the_fastest_step_counts(tiny_run, monkeypatch, threads):
    """Other processes that slow single steps do not reach the estimate."""
    clock = iter([0.0, 9.0, 9.0, 9.5, 9.5, 12.5])
    monkeypatch.setattr(check.time, "process_time" if threads == 1 else "perf_counter", lambda: next(clock))
    monkeypatch.setattr(check.Trainer, "step", lambda self: None)
    rows, timed = tiny_run.optim.global_batch_size, tiny_run.model_copy(update={"threads": threads})
    assert check.seconds_per_token(timed) == pytest.approx(0.5 / (rows * tiny_run.row_tokens))


def test_cells_that_exceed_the_memory_run_fewer_at_once(study, monkeypatch):
    save(study.root, study.cells[0], peak_rss_bytes=3 * GIB)
    monkeypatch.setattr(module, "machine_memory", lambda: 8 * GIB)
    study = replace(study, machine=Machine(cpus=4))
    placed, warning = place(study)
    assert placed.concurrency == 2
    memory = "4 cells at once need 12.0 GiB of memory (3.0 GiB each, measured)"
    assert warning == f"{memory}, this machine has 8.0; 2 at a time"
    with pytest.raises(UsageError, match=r"--concurrency 3: 3 cells at once need 9.0 GiB .* give 2$"):
        place(study, requested=3)
    assert place(study, requested=2)[1] == ""
    monkeypatch.setattr(module, "machine_memory", lambda: 64 * GIB)
    assert place(study)[0].concurrency == 4
