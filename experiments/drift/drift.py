"""Drifting linear regression: a task of decay and momentum whose best gates and risk are known in advance.

A vector w moves, ``w_{t+1} = a R w_t + sqrt(q / d) n_t`` with ``a^2 = 1 - q``, and is seen through
``y_t = w_t . x_t + sigma m_t``; n and m are standard normal, x_t is uniform on the sphere of radius sqrt(d),
E|w|^2 = 1, and R turns each two coordinates by an angle. A linear memory predicts y_t from the past by
u_t . x_t, then writes the pair (eqs. 13 and 14 of the paper at depth 1 with chunks of one token):

    S_{t+1} = eta S_t + B (y_t - u_t . x_t) x_t / d,    u_{t+1} = A u_t + S_{t+1},    risk R = E|u_t - w_t|^2.

Keys are x / sqrt(d), values y / sqrt(d), A = 1 - alpha and B = 2 theta. alpha, eta and theta are three
numbers that training learns from the squared error; `best_gates` says what it should find, and the tests hold
that to a simulation.

Shapes: B rows, T steps, d inputs, F outputs, each with a drifting vector of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from titans_core import Model
from titans_core.config import Frozen, MemoryConfig, PositiveInt
from titans_kernels import Extension, Rule, find_rule, neural_memory
from titans_platform.config import RunConfig, digest
from titans_platform.errors import UsageError, within
from titans_platform.evals.scoring import measure_distributed
from titans_platform.objectives.base import Objective, PrepareProgress, reject_data
from titans_platform.objectives.files import ItemStream
from titans_platform.tasks import Context, Measurement, Task

ROWS = 100_000
"""Training rows before they repeat."""


class DriftOptions(Frozen):
    """The generator of the rows."""

    width: Annotated[int, Field(ge=2, le=1024)] = 32
    """d, the inputs of a step."""
    drift: Annotated[float, Field(gt=0)] = 1.0
    """q d: the share of w that a step replaces, times d. A memory of d x 1 floats can follow about 1."""
    turn: Annotated[float, Field(ge=0, le=math.pi * 1024)] = 0.0
    """The angle in radians by which w turns in d steps; 0: it does not turn."""
    noise: Annotated[float, Field(ge=0)] = 0.0
    """sigma^2, the variance of the observation noise; the variance of w . x is 1."""
    outliers: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of observations with more noise, each on its own."""
    outlier_noise: Annotated[float, Field(ge=0)] = 0.0
    """Variance of their noise, in place of ``noise``."""
    outputs: PositiveInt = 8
    """F independent vectors with the same inputs: more samples from one row."""
    burn_in: PositiveInt = 192
    """First steps of a row, not trained on or measured: the known risk holds in the long run."""


class DriftGates(NamedTuple):
    """Constant gates, and the risk that they have in the long run."""

    kept: float
    """A = 1 - alpha"""
    step: float
    """B = 2 theta"""
    eta: float
    risk: float


def steady_risk(kept: float, step: float, eta: float, options: DriftOptions) -> float:
    """R in the long run for constant A, B and eta; inf where the recurrence is unstable.

    With z = (w, u, S) and K = k k^T of a unit key, a step is ``z' = (M + N K) z + noise``. K is a projection
    with E K = 1 / d, so the covariance P = E z z^* has a linear recurrence, which is solved for its fixed
    point. Two coordinates that R turns are one complex number; a K on both sides leaves the real part.
    """
    d, q = options.width, options.drift / options.width
    turned = math.sqrt(1 - q) * np.exp(1j * options.turn / d)
    M = np.array([[turned, 0, 0], [0, kept, eta], [0, 0, eta]])
    N = step * np.array([[0, 0, 0], [1, -1, 0], [1, -1, 0]])
    variance = (1 - options.outliers) * options.noise + options.outliers * options.outlier_noise
    noise = np.diag([q, 0, 0]) + step**2 * variance / d * np.array([[0, 0, 0], [0, 1, 1], [0, 1, 1]])

    def after(P: NDArray[Any]) -> NDArray[Any]:
        return M @ P @ M.conj().T + (M @ P @ N.T + N @ P @ M.conj().T + (N @ P @ N.T).real) / d

    basis = [unit.reshape(3, 3) * part for part in (1, 1j) for unit in np.eye(9)]
    pairs = lambda P: np.concatenate([P.real.ravel(), P.imag.ravel()])  # noqa: E731
    moved = np.stack([pairs(after(P)) for P in basis], 1)
    if np.abs(np.linalg.eigvals(moved)).max() >= 1 - 1e-9:
        return math.inf
    P = np.linalg.solve(np.eye(18) - moved, pairs(noise))[:9].reshape(3, 3)
    return float(P[0, 0] + P[1, 1] - 2 * P[0, 1])


def best_gates(options: DriftOptions, decay: bool = True, momentum: bool = False) -> DriftGates:
    """Search for the gates of the lowest risk with the paper's rule.

    A = 1 without decay, eta = 0 without momentum.
    """
    from scipy.optimize import minimize  # takes a second to import
    from scipy.special import expit

    def gates(logits: NDArray[Any]) -> tuple[float, float, float]:
        A, B, eta = expit(logits).tolist()
        return A if decay else 1.0, 2 * B, eta if momentum else 0.0

    def risk(logits: NDArray[Any]) -> float:
        return min(steady_risk(*gates(logits), options), 1e6)

    settings = {"xatol": 1e-7, "fatol": 1e-13, "maxiter": 4000}
    starts = [(3.0, 0.0, -2.0), (2.0, -3.0, 4.0)] if momentum else [(3.0, 0.0, 0.0)]
    minima = [minimize(risk, start, method="Nelder-Mead", options=settings) for start in starts]
    at = min(minima, key=lambda result: result.fun)
    return DriftGates(*gates(at.x), float(at.fun))


class Steps(NamedTuple):
    """Rows of observations."""

    x: Tensor
    """[B, T, d], each of norm sqrt(d)"""
    y: Tensor
    """[B, T, F], noisy"""
    clean: Tensor
    """[B, T, F], w_t . x_t without noise"""


class DriftData:
    """Rows generated from their number."""

    def __init__(self, options: DriftOptions, length: int, seed: int):
        self.options, self.length, self.seed = options, length, seed
        self.fingerprint = digest([options.model_dump(mode="json"), length, seed], 16)

    def train_stream(self, cfg: RunConfig, rank: int = 0, world_size: int = 1) -> ItemStream:
        """Training batches of a worker."""
        make = lambda step, indices: self.rows(indices, "train")  # noqa: E731
        return ItemStream(ROWS, cfg, rank, world_size, make)

    def held_out(self, length: int, items: int, rows: int, seed: int) -> Iterator[Steps]:
        """``items`` rows of ``length`` steps that no training row equals, in batches of ``rows``."""
        for i in range(0, items, rows):
            yield self.rows(np.arange(i, min(i + rows, items)), f"held out {seed}", length)

    def rows(self, indices: NDArray[np.int64], part: str, length: int | None = None) -> Steps:
        """Generate the rows with these numbers, from a part's own random numbers."""
        T, d, F = length or self.length, self.options.width, self.options.outputs
        q, B = self.options.drift / d, len(indices)
        a, moves, x, m = math.sqrt(1 - q), torch.empty(B, T, F, d), torch.empty(B, T, d), torch.empty(B, T, F)
        outlier = torch.zeros(B, T, F, dtype=torch.bool)
        for row, number in enumerate(indices.tolist()):
            generator = torch.Generator().manual_seed(int(digest([self.seed, part, number]), 16) % 2**63)
            for drawn in (moves, x, m):
                drawn[row].normal_(generator=generator)
            if self.options.outliers:
                outlier[row] = torch.rand(T, F, generator=generator) < self.options.outliers
        x = x * (d**0.5 / x.norm(dim=-1, keepdim=True))
        moves *= d**-0.5
        w, clean, angle = moves[:, 0].clone(), torch.empty(B, T, F), self.options.turn / d
        for t in range(T):
            if t:
                if angle:
                    even, odd, cos, sin = w[..., ::2], w[..., 1::2], math.cos(angle), math.sin(angle)
                    w = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
                w = a * w + math.sqrt(q) * moves[:, t]
            clean[:, t] = (w @ x[:, t, :, None])[..., 0]
        sigma = torch.where(outlier, math.sqrt(self.options.outlier_noise), math.sqrt(self.options.noise))
        return Steps(x, clean + sigma * m, clean)


class DriftModel(Model):
    """A linear memory that starts at 0, with one learned alpha, eta and theta.

    Of the memory's config it takes decay, momentum, chunk_size, rule, max_alpha, max_theta, and the gates'
    biases as their start.
    """

    def __init__(self, memory: MemoryConfig, width: int, outputs: int):
        super().__init__()
        self.memory, self.width, self.outputs = memory, width, outputs
        self.rule: Rule = find_rule(memory.rule)
        if self.rule.extra_gates:
            raise ValueError(f"rule: {memory.rule} has gates of its own; objective drift learns none")
        gate = lambda bias, learned: nn.Parameter(torch.tensor(bias)) if learned else None  # noqa: E731
        self.alpha_logit = gate(memory.alpha_bias, memory.decay)
        self.eta_logit = gate(memory.eta_bias, memory.momentum)
        self.theta_logit = nn.Parameter(torch.tensor(memory.theta_bias))

    @property
    def alpha(self) -> Tensor:
        """Forgotten a step, 1 - A; [] ."""
        if self.alpha_logit is None:
            return torch.zeros_like(self.theta_logit)
        return self.memory.max_alpha * torch.sigmoid(self.alpha_logit)

    @property
    def eta(self) -> Tensor:
        """Momentum's decay; []."""
        return torch.zeros_like(self.theta_logit) if self.eta_logit is None else torch.sigmoid(self.eta_logit)

    @property
    def theta(self) -> Tensor:
        """Step size, B / 2; []."""
        return self.memory.max_theta * torch.sigmoid(self.theta_logit)

    def forward(self, x_BTd: Tensor, y_BTF: Tensor) -> Tensor:
        """[B, T, F] prediction of each y from the steps before it."""
        B, T, d = x_BTd.shape
        k, v = (x[:, :, None] * d**-0.5 for x in (x_BTd, y_BTF))
        alpha, eta, theta = (gate.expand(B, T, 1) for gate in (self.alpha, self.eta, self.theta))
        # a token reads after its own write, so what it asks for is the step that follows
        q = torch.cat([k[:, 1:], k[:, :1]], 1)
        read, _ = neural_memory(
            q, k, v, alpha, eta, theta, (k.new_zeros(1, d, self.outputs),), chunk_size=self.memory.chunk_size,
            extension=Extension(rule=self.rule),
        )  # fmt: skip
        read = read[:, :-1, 0] * d**0.5
        return torch.cat([torch.zeros_like(read[:, :1]), read], 1)

    def state_bytes(self, length: int) -> int:
        """Return the size of the matrix of weights."""
        return 4 * self.width * self.outputs


class Drift(Objective[DriftData]):
    """Squared error of each step's prediction after the burn-in: R + sigma^2."""

    Options = DriftOptions
    data_kind = "drift"
    positions = "steps"
    loss_unit = "squared error"
    validation_task = "drift"

    def prepare(self, root: Path, report: PrepareProgress | None = None) -> DriftData:
        """Rows are generated as they are needed."""
        return self.open(root)

    def open(self, root: Path) -> DriftData:
        """Create the generator."""
        return DriftData(self.options, self.cfg.data.sequence_length, self.cfg.data.seed)

    def build_model(self) -> DriftModel:
        """Build the memory with its two gates."""
        with within("model.memory", ValueError):
            return DriftModel(self.cfg.model.memory, self.options.width, self.options.outputs)

    def least_activations(self, rows: int) -> int:
        """Keys and values of every step."""
        return rows * self.cfg.row_tokens * (self.options.width + self.options.outputs)

    def losses(self, model: Callable[..., Any], batch: Steps) -> Tensor:
        """[B] mean squared error against the noisy y after the burn-in."""
        return (model(batch.x, batch.y) - batch.y)[:, self.options.burn_in :].square().mean((1, 2))

    def sample_batch(self, rows: int) -> Steps:
        """Generate rows like the training rows."""
        return self.open(Path()).rows(np.arange(rows), "sample")

    def check(self, data: DriftData | None = None) -> None:
        """Reject also what `best_gates` does not cover."""
        memory, options = self.cfg.model.memory, self.options
        reject_data(self.cfg, ("sources", "tokenizer"), "generates its rows")
        if (length := self.cfg.data.sequence_length) <= options.burn_in:
            short = f"{length} steps end within burn_in {options.burn_in}"
            raise UsageError(f"data.sequence_length: {short}; raise it")
        if (high := options.drift) >= (d := options.width):
            raise UsageError(f"objective.options.drift: {high:g} must be below width {d}, since q < 1")
        if options.turn and options.width % 2:
            odd = f"{options.width} is odd, and a turn is of two coordinates"
            raise UsageError(f"objective.options.width: {odd}; make it even")
        for name, value in {"depth": 1, "chunk_size": 1, "surprise_bound": None}.items():
            if (setting := getattr(memory, name)) != value:
                cause = f"the best risk of objective drift is not known for {setting}"
                raise UsageError(f"model.memory.{name}: {cause}; set it to {json.dumps(value)}")
        super().check(data)


class DriftTaskOptions(Frozen):
    """Options of the measurement."""

    kind: Literal["risk", "ratio", "alpha", "eta", "step"] = "risk"
    """risk: R. ratio: R over the lowest R of the paper's rule. alpha, eta, step: the learnt 1 - A, eta and B
    over the best ones, with decay, and with momentum if the memory has it."""


class DriftTask(Task):
    """Drifting regression on held-out rows, against its best gates."""

    name = "drift"
    Options = DriftTaskOptions
    data_kind = "drift"

    def check(self, objective: Any, length: int, data: DriftData | None) -> None:
        """Check that rows are longer than the burn-in."""
        if length <= objective.options.burn_in:
            raise UsageError(f"lengths: {length} steps end within burn_in {objective.options.burn_in}")

    @property
    def chance(self) -> float:
        """The risk of predicting 0; an upper bound of none of the others."""
        return 1.0 if self.options.kind == "risk" else math.inf

    def measure(self, context: Context) -> Measurement:
        """Measure on `config.items` rows; the standard error is over rows."""
        data: DriftData = context.prepared
        options, model, kind = data.options, cast(DriftModel, context.scorer.model), self.options.kind
        if kind in ("alpha", "eta", "step"):
            best = best_gates(options, momentum=model.memory.momentum)
            learnt = {"alpha": model.alpha, "eta": model.eta, "step": 2 * model.theta}[kind]
            best_value = {"alpha": 1 - best.kept, "eta": best.eta, "step": best.step}[kind]
            return Measurement(learnt.item() / best_value if best_value else math.nan, 0.0, self.chance, 1)
        rows, items = context.scorer.rows(2 * context.length), context.config.items
        batches = data.held_out(context.length, items, rows, context.config.seed)
        parts = measure_distributed(batches, partial(self._risks, context, options.burn_in))
        lowest = best_gates(options, momentum=True).risk if kind == "ratio" else 1.0
        risks = torch.cat(parts) / lowest
        stderr = risks.std(correction=0).item() / math.sqrt(len(risks))
        return Measurement(risks.mean().item(), stderr, self.chance, len(risks))

    def _risks(self, context: Context, burn_in: int, batch: Steps) -> Tensor:
        """[B] excess risk of each row: its squared error against w . x without noise."""
        x, y = (part.to(context.scorer.device) for part in (batch.x, batch.y))
        error = context.scorer.model(x, y).cpu() - batch.clean
        return error[:, burn_in:].double().square().mean((1, 2))
