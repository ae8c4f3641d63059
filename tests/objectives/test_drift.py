"""Drifting regression: its closed forms against a simulation, the operator against them, what is learnt."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from titans_core.config import MemoryConfig
from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.objectives import build_objective
from titans_platform.objectives.drift import (
    DriftData,
    DriftModel,
    DriftOptions,
    steady_risk,
    with_decay,
    without_decay,
)
from titans_platform.runs.check import spec_for
from titans_platform.runs.execute import execute
from titans_platform.study.grid import expand, load_study

MEMORY = {
    "depth": 1, "heads": 1, "chunk_size": 1, "rule": "gated_delta", "momentum": False, "surprise_bound": None,
    "max_theta": 1.0,
}  # fmt: skip


def simulated(
    A: float, B: float, d: int, q: float, noise: float, steps: int = 4000, rows: int = 200
) -> float:
    """E|u - w|^2 of the recurrence as the module's docstring has it, in numpy."""
    steps, rows, draw, a = 4000, 200, np.random.default_rng(0), math.sqrt(1 - q)
    w, u, total = draw.standard_normal((rows, d)) / d**0.5, np.zeros((rows, d)), 0.0
    for t in range(steps):
        x = draw.standard_normal((rows, d))
        x *= d**0.5 / np.linalg.norm(x, axis=1, keepdims=True)
        u = A * u
        total += ((u - w) ** 2).sum(1).mean() * (t >= steps // 4)
        y = (w * x).sum(1) + noise**0.5 * draw.standard_normal(rows)
        u = u + B * (y - (u * x).sum(1))[:, None] * x / d
        w = a * w + (q / d) ** 0.5 * draw.standard_normal((rows, d))
    return total / (steps - steps // 4)


@pytest.mark.parametrize(
    ("A", "B", "d", "q", "noise"),
    [(0.95, 0.8, 8, 0.125, 0.0), (1.0, 0.6, 8, 0.125, 0.5), (0.9, 1.3, 4, 0.2, 0.1)],
)
def test_the_risk_is_that_of_a_simulation(A, B, d, q, noise):
    assert steady_risk(A, B, d, q, noise) == pytest.approx(simulated(A, B, d, q, noise), rel=0.01)


@pytest.mark.parametrize(
    ("d", "drift", "noise"), [(8, 1.0, 0.0), (32, 1.0, 0.1), (64, 0.3, 0.1), (64, 1.0, 1.0)]
)
def test_no_other_gates_have_a_lower_risk(d, drift, noise):
    q = drift / d
    best = with_decay(d, q, noise)
    risks = [
        steady_risk(best.kept + da, best.step + db, d, q, noise)
        for da in (-0.01, -0.001, 0, 0.001, 0.004) for db in (-0.1, -0.01, 0, 0.01, 0.1)
    ]  # fmt: skip
    assert min(risks) == best.risk == risks[12]
    kept = without_decay(d, q, noise)
    assert all(steady_risk(1.0, kept.step + db, d, q, noise) > kept.risk for db in (-0.01, 0.01))
    if noise == 0:
        assert best.risk == pytest.approx(drift / (1 + drift - q))
    else:
        assert best.risk == pytest.approx(noise * best.step / (1 - best.step))


def test_no_decay_costs_between_126_and_128_percent():
    ratios = [without_decay(d, 1 / d, 0.0).risk / with_decay(d, 1 / d, 0.0).risk for d in (8, 16, 32)]
    assert ratios == pytest.approx([1.2718, 1.2760, 1.2780], abs=1e-4)


def model(d: int, A: float, B: float) -> DriftModel:
    """The memory of the objective with these gates."""
    made = DriftModel(MemoryConfig.model_validate(MEMORY | {"decay": A < 1}), d, 8)
    with torch.no_grad():
        made.theta_logit.fill_(math.log(B / 2 / (1 - B / 2)))
        if made.alpha_logit is not None:
            made.alpha_logit.fill_(math.log((1 - A) / A))
    return made


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_operator_with_the_best_gates_has_the_best_risk(noise):
    options = DriftOptions(width=8, noise=noise, burn_in=64)
    steps = DriftData(options, 512, seed=0).rows(np.arange(24), "test")
    q = options.drift / 8
    for gates in (with_decay(8, q, noise), without_decay(8, q, noise)):
        step = min(gates.step, 1 - 1e-6) if gates.kept < 1 else gates.step
        with torch.no_grad():
            error = model(8, gates.kept, step)(steps.x, steps.y) - steps.clean
        assert error[:, 64:].square().mean().item() == pytest.approx(gates.risk, rel=0.02)


def test_a_prediction_sees_no_later_step():
    steps = DriftData(DriftOptions(width=8, burn_in=4), 16, seed=0).rows(np.arange(2), "test")
    x, y = steps.x.requires_grad_(), steps.y.requires_grad_()
    predicted = model(8, 0.9, 0.8)(x, y)[:, 9].sum()
    by_x, by_y = torch.autograd.grad(predicted, (x, y))
    seen = [g.abs().sum((0, 2)).nonzero().flatten().tolist() for g in (by_x, by_y)]
    assert seen == [list(range(10)), list(range(9))]


def config(**fields) -> RunConfig:
    given = {
        "model": {"memory": MEMORY},
        "data": {"sequence_length": 96},
        "objective": {"kind": "drift", "options": {"width": 8, "burn_in": 48}},
        "optim": {"steps": 4, "global_batch_size": 2},
        "eval": {"items": 2, "columns": {"ratio": [{"task": "drift", "options": {"kind": "ratio"}}]}},
    }
    for key, value in fields.items():
        at = given
        *path, last = key.split("__")
        for name in path:
            at = at[name]
        at[last] = value
    return RunConfig.model_validate_json(json.dumps(given))


def test_rows_are_a_function_of_their_number():
    objective = build_objective(config())
    data = objective.open(None)
    whole = data.rows(np.arange(4), "train")
    again = data.rows(np.array([3, 1]), "train")
    assert all(torch.equal(a[[3, 1]], b) for a, b in zip(whole, again, strict=True))
    (held,) = data.held_out(96, 4, 4, 0)
    assert not torch.equal(held.x, whole.x)
    torch.testing.assert_close(whole.x.norm(dim=-1), torch.full((4, 96), 8**0.5))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data__sequence_length": 48}, "data.sequence_length: 48 steps end within burn_in 48"),
        ({"objective__options": {"width": 2, "drift": 2.0, "burn_in": 8}}, "drift: 2 must be below width 2"),
        ({"model": {"memory": MEMORY | {"depth": 2}}}, "model.memory.depth: .* set it to 1"),
        ({"model": {"memory": MEMORY | {"momentum": True}}}, "model.memory.momentum: .* set it to false"),
        ({"data__tokenizer": "dna"}, "data.tokenizer: objective drift generates its rows"),
        ({"eval__columns": {"a": [{"task": "drift", "lengths": [0.5]}]}}, "lengths: 0.5 rows end within"),
    ],
)
def test_what_has_no_closed_form_is_refused(change, says):
    objective = build_objective(config(**change))
    with pytest.raises(UsageError, match=says):
        objective.check()


@pytest.mark.slow
def test_training_finds_the_best_gates(tmp_path):
    study = load_study("drift")
    ratios = {}
    for row in ("With decay on d=8", "Without decay on d=8"):
        (cell,) = (cell for cell in expand(study, "laptop") if cell.row == row and cell.seed == 0)
        cfg = cell.config.model_copy(update={"seed": 100})
        spec = spec_for(cfg, tmp_path)
        columns = execute(spec).columns
        ratios[row] = columns["ratio_8"]
        if row.startswith("With "):
            assert columns["alpha_8"] == pytest.approx(1, abs=0.2)
            assert columns["ratio_8"] == pytest.approx(1, abs=0.02)
    assert 1.25 < ratios["Without decay on d=8"] / ratios["With decay on d=8"] < 1.29
