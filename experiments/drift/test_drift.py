"""Drifting regression: the known risk against a simulation, the operator against it, what is learnt."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.drift.drift import DriftData, DriftModel, DriftOptions, best_gates, steady_risk
from titans_core.config import MemoryConfig
from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.objectives import build_objective
from titans_platform.runs.execute import execute
from titans_platform.runs.load import spec_for
from titans_platform.study.grid import expand, load_study

TASK = "experiments.drift.drift:DriftTask"
MEMORY = dict.fromkeys(("depth", "heads", "chunk_size", "max_theta"), 1)
MEMORY |= {"momentum": False, "surprise_bound": None}


def options_of(d: int, drift: float = 1.0, turn: float = 0.0, noise: float = 0.0) -> DriftOptions:
    return DriftOptions(width=d, drift=drift, turn=turn, noise=noise, burn_in=8 * d)


def simulated(A: float, B: float, eta: float, options: DriftOptions) -> float:
    """E|u - w|^2 of the recurrence as the module's docstring has it, in numpy."""
    d, q = options.width, options.drift / options.width
    steps, rows, draw, a = 4000, 200, np.random.default_rng(0), math.sqrt(1 - q)
    c, s = math.cos(options.turn / d), math.sin(options.turn / d)
    R = np.kron(np.eye(d // 2), [[c, -s], [s, c]])
    w, total = draw.standard_normal((rows, d)) / d**0.5, 0.0
    u, S = np.zeros((rows, d)), np.zeros((rows, d))
    for t in range(steps):
        x = draw.standard_normal((rows, d))
        x *= d**0.5 / np.linalg.norm(x, axis=1, keepdims=True)
        total += ((u - w) ** 2).sum(1).mean() * (t >= steps // 4)
        variance = np.where(draw.random(rows) < options.outliers, options.outlier_noise, options.noise)
        y = (w * x).sum(1) + variance**0.5 * draw.standard_normal(rows)
        S = eta * S + B * (y - (u * x).sum(1))[:, None] * x / d
        u = A * u + S
        w = a * w @ R.T + (q / d) ** 0.5 * draw.standard_normal((rows, d))
    return total / (steps - steps // 4)


@pytest.mark.parametrize(("A", "B", "eta", "options"), [
    (0.95, 0.8, 0.0, options_of(8)),
    (1.0, 0.6, 0.0, options_of(8, noise=0.5)),
    (0.9, 1.3, 0.0, options_of(4, drift=0.8, noise=0.1)),
    (0.9, 0.3, 0.9, options_of(8, drift=0.1, turn=0.5)),
    (0.8, 0.5, 0.5, options_of(4, drift=0.4, turn=2.0, noise=0.2)),
    (0.9, 0.5, 0.0, options_of(8).model_copy(update={"outliers": 0.05, "outlier_noise": 20.0})),
])  # fmt: skip
def test_steady_risk_equals_simulation(A, B, eta, options):
    assert steady_risk(A, B, eta, options) == pytest.approx(simulated(A, B, eta, options), rel=0.015)


CASES = [(8, 1.0, 0.0), (32, 1.0, 0.1), (64, 0.3, 0.1), (64, 1.0, 1.0)]


@pytest.mark.parametrize(("d", "drift", "noise"), CASES)
def test_best_gates_equal_closed_form(d, drift, noise):
    """A = a and R* as derived without a turn or momentum (`best_gates` searches)."""
    q, options = drift / d, options_of(d, drift, noise=noise)
    best = best_gates(options)
    a, s, b = math.sqrt(1 - q), noise / d, q * (1 + noise)
    step = (math.sqrt(b**2 + 4 * a**2 * s * q) - b) / (2 * a**2 * s) if noise else 1.0  # before the decay
    assert (best.kept, best.step) == pytest.approx((a, a * step), abs=1e-5)
    risk = noise * step / (1 - step) if noise else drift / (1 + drift - q)
    assert best.risk == pytest.approx(risk, rel=1e-9)


@pytest.mark.parametrize("turn", [0.5, 2.0])
def test_random_gates_have_no_lower_risk_than_the_best(turn):
    options = options_of(8, drift=0.01, turn=turn)
    best = best_gates(options, momentum=True)
    others = np.random.default_rng(0).uniform([0, 0, 0], [1, 2, 1], (2000, 3))
    near = np.array(best[:3]) + np.random.default_rng(1).normal(0, 0.01, (500, 3))
    every = [*others, *np.clip(near, 0, [1, 2, 1])]
    assert all(steady_risk(*gates, options) >= best.risk - 1e-9 for gates in every)


def test_momentum_lowers_risk_only_for_an_oscillating_vector():
    ratio = lambda options: best_gates(options).risk / best_gates(options, momentum=True).risk  # noqa: E731
    turning = [options_of(d, drift=0.01, turn=0.5) for d in (8, 16, 32)]
    assert [ratio(options) for options in turning] == pytest.approx([1.2088, 1.1427, 1.1102], abs=1e-4)
    etas = [best_gates(options, momentum=True).eta for options in turning]
    assert etas == pytest.approx([0.9045, 0.9498, 0.9743], abs=1e-3)
    assert ratio(options_of(8, drift=0.01)) == pytest.approx(1, abs=1e-6)


def test_risk_without_decay_is_126_to_128_percent():
    every = [options_of(d) for d in (8, 16, 32)]
    ratios = [best_gates(options, decay=False).risk / best_gates(options).risk for options in every]
    assert ratios == pytest.approx([1.2718, 1.2760, 1.2780], abs=1e-4)


def model(d: int, A: float, B: float, eta: float = 0.0) -> DriftModel:
    """Build the memory of the objective with these gates."""
    memory = MEMORY | {"decay": A < 1, "momentum": eta > 0}
    drift = DriftModel(MemoryConfig.model_validate(memory), d, 8)
    with torch.no_grad():
        for logit, gate in ((drift.theta_logit, B / 2), (drift.alpha_logit, 1 - A), (drift.eta_logit, eta)):
            if logit is not None:
                logit.fill_(math.log(gate / (1 - gate)))
    return drift


@pytest.mark.parametrize("options", [
    options_of(8),
    options_of(8, noise=0.5),
    options_of(8, drift=0.01, turn=0.5),
    options_of(8).model_copy(update={"outliers": 0.05, "outlier_noise": 20.0}),
])  # fmt: skip
def test_operator_with_best_gates_reaches_best_risk(options):
    steps = DriftData(options, 512, seed=0).rows(np.arange(24), "test")
    for decay, momentum in ((True, False), (False, False), (True, True)):
        if momentum and not options.turn:
            continue  # the best eta is 0
        gates = best_gates(options, decay, momentum)
        with torch.no_grad():
            error = model(8, gates.kept, gates.step, gates.eta)(steps.x, steps.y) - steps.clean
        assert error[:, 64:].square().mean().item() == pytest.approx(gates.risk, rel=0.03)


def test_drift_prediction_does_not_depend_on_later_steps():
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
        "objective": {"kind": "experiments.drift.drift:Drift", "options": {"width": 8, "burn_in": 48}},
        "optim": {"steps": 4, "global_batch_size": 2},
        "eval": {
            "items": 2,
            "columns": {"ratio": [{"task": TASK, "options": {"kind": "ratio"}}]},
        },
    }
    for key, value in fields.items():
        at = given
        *path, last = key.split("__")
        for name in path:
            at = at[name]
        at[last] = value
    return RunConfig.model_validate_json(json.dumps(given))


def test_drift_rows_depend_on_their_number_only():
    objective = build_objective(config())
    data = objective.open(Path())
    whole = data.rows(np.arange(4), "train")
    again = data.rows(np.array([3, 1]), "train")
    assert all(torch.equal(a[[3, 1]], b) for a, b in zip(whole, again, strict=True))
    (held,) = data.held_out(96, 4, 4, 0)
    assert not torch.equal(held.x, whole.x)
    torch.testing.assert_close(whole.x.norm(dim=-1), torch.full((4, 96), 8**0.5))


@pytest.mark.parametrize(("change", "says"), [
    ({"data__sequence_length": 48}, "data.sequence_length: 48 steps end within burn_in 48"),
    ({"objective__options": {"width": 2, "drift": 2.0, "burn_in": 8}}, "drift: 2 must be below width 2"),
    ({"model": {"memory": MEMORY | {"depth": 2}}}, "model.memory.depth: .* set it to 1"),
    ({"model": {"memory": MEMORY | {"rule": "experiments.rules.mdn:MomentumDelta"}}}, "has gates of its own"),
    ({"objective__options": {"width": 5, "turn": 0.5, "burn_in": 8}}, "width: 5 is odd"),
    ({"data__tokenizer": "dna"}, "data.tokenizer: objective .*Drift generates its rows"),
    ({"eval__columns": {"a": [{"task": TASK, "lengths": [0.5]}]}}, "lengths: 48 steps end within"),
])  # fmt: skip
def test_config_without_known_risk_raises_usage_error(change, says):
    objective = build_objective(config(**change))
    with pytest.raises(UsageError, match=says):
        objective.build_model() if "has gates" in says else objective.check()


@pytest.mark.slow
@pytest.mark.parametrize(("study", "rows", "between"), [
    ("drift", ("Without decay on d=8", "With decay on d=8"), (1.25, 1.29)),
    ("oscillation", ("Without momentum on d=8", "With momentum on d=8"), (1.17, 1.24)),
])  # fmt: skip
def test_training_converges_to_best_gates(study, rows, between, tmp_path):
    """Tuning seed 100 of the studies: the ratio of two risks is the predicted one."""
    ratios = {}
    for row in rows:
        (cell,) = (c for c in expand(load_study(study), "laptop") if c.row == row and c.seed == 0)
        columns = execute(spec_for(cell.config.model_copy(update={"seed": 100}), tmp_path)).columns
        ratios[row] = columns["ratio_8"]
        if row == "With decay on d=8":
            assert columns["alpha_8"] == pytest.approx(1, abs=0.2)
        if row == "With momentum on d=8":
            assert columns["eta_8"] == pytest.approx(1, abs=0.1)
    assert ratios[rows[1]] == pytest.approx(1, abs=0.02)
    assert between[0] < ratios[rows[0]] / ratios[rows[1]] < between[1]
