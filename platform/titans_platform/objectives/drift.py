"""Drifting linear regression: a task of forgetting whose best decay, step and risk have closed forms.

A vector w moves, ``w_{t+1} = a w_t + sqrt(q / d) n_t`` with ``a^2 = 1 - q``, and is seen through
``y_t = w_t . x_t + sigma m_t``; n and m are standard normal, x_t is uniform on the sphere of radius sqrt(d),
E|w|^2 = 1. A linear memory predicts y_t from what it kept of the past, then writes the pair:

    u_t = A w'_{t-1},    w'_t = u_t + B (y_t - u_t . x_t) x_t / d,    risk R = E|u_t - w_t|^2.

That is the operator at depth 1 with chunks of one token, keys x / sqrt(d), values y / sqrt(d), A = 1 - alpha
and B = 2 theta, with two tokens a step: a query, which forgets and reads, and a write. alpha and theta are
two numbers that training learns from the squared error; the closed forms say what it should find. They are
derived here, and held to a simulation in the tests.

Shapes: B rows, T steps, d inputs, F outputs, each with a drifting vector of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
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
from titans_kernels import Rule, find_rule, neural_memory
from titans_platform.config import DataConfig, digest
from titans_platform.errors import UsageError
from titans_platform.evals import Measurement, Task
from titans_platform.evals import register as register_task
from titans_platform.evals.registry import Context
from titans_platform.evals.scoring import measure_distributed
from titans_platform.objectives.base import Objective, Report, register
from titans_platform.objectives.files import ItemStream

ROWS = 100_000
"""Training rows before they repeat."""


class Gates(NamedTuple):
    """A constant kept part A, a step B, and the risk that they have in the long run."""

    kept: float
    step: float
    risk: float


def steady_risk(kept: float, step: float, d: int, q: float, noise: float) -> float:
    """R in the long run for constant A and B; ``noise`` is sigma^2. inf where the recurrence is unstable."""
    A, B, a, g = kept, step, math.sqrt(1 - q), 1 - step / d
    contraction = A**2 * (1 - (2 * B - B**2) / d)
    if contraction >= 1 or abs(a * A * g) >= 1:
        return math.inf
    # E (u - w) . w, which the drift of w and the forgetting of u both move
    c = (a * (A - a) - q) / (1 - a * A * g)
    moved = (A - a) ** 2 + 2 * A * (A - a) * g * c + q
    return (moved + A**2 * B**2 * noise / d) / (1 - contraction)


def with_decay(d: int, q: float, noise: float) -> Gates:
    """The best A and B: A = a, B the root of the stationary condition of R at A = a."""
    a, s = math.sqrt(1 - q), noise / d
    if noise == 0:
        return Gates(a, 1.0, steady_risk(a, 1.0, d, q, noise))
    b = q * (1 + s * d)
    step = (math.sqrt(b**2 + 4 * a**2 * s * q) - b) / (2 * a**2 * s)
    return Gates(a, step, steady_risk(a, step, d, q, noise))


def without_decay(d: int, q: float, noise: float) -> Gates:
    """The best B where nothing is forgotten, A = 1, by a line search."""
    from scipy.optimize import minimize_scalar  # takes a second to import

    found = minimize_scalar(
        lambda B: steady_risk(1.0, B, d, q, noise), bounds=(1e-6, 2 - 1e-6), method="bounded"
    )
    return Gates(1.0, float(found.x), float(found.fun))


class DriftOptions(Frozen):
    """The generator of the rows."""

    width: Annotated[int, Field(ge=2, le=1024)] = 32
    """d, the inputs of a step."""
    drift: Annotated[float, Field(gt=0)] = 1.0
    """q d: the share of w that a step replaces, times d. A memory of d x 1 floats can follow about 1."""
    noise: Annotated[float, Field(ge=0)] = 0.0
    """sigma^2, the variance of the observation noise; that of w . x is 1."""
    outputs: PositiveInt = 8
    """F independent vectors with the same inputs: more samples from one row."""
    burn_in: PositiveInt = 192
    """First steps of a row, not trained on or measured: the closed forms are of the long run."""


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

    def train_stream(self, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> ItemStream:
        """Training batches; ``batch_size`` is global, over all workers. Raises UsageError."""
        return ItemStream(
            ROWS, batch_size, seed, rank, world_size, lambda step, which: self.rows(which, "train")
        )

    def held_out(self, length: int, items: int, rows: int, seed: int) -> Iterator[Steps]:
        """``items`` rows of ``length`` steps that no training row equals, in batches of ``rows``."""
        for i in range(0, items, rows):
            yield self.rows(np.arange(i, min(i + rows, items)), f"held out {seed}", length)

    def rows(self, which: NDArray[np.int64], part: str, length: int | None = None) -> Steps:
        """The rows with these numbers, of a part's own random numbers."""
        T, d, F = length or self.length, self.options.width, self.options.outputs
        q, B = self.options.drift / d, len(which)
        a, moves, x, m = math.sqrt(1 - q), torch.empty(B, T, F, d), torch.empty(B, T, d), torch.empty(B, T, F)
        for row, number in enumerate(which.tolist()):
            own = torch.Generator().manual_seed(int(digest([self.seed, part, number]), 16) % 2**63)
            moves[row].normal_(generator=own)
            x[row].normal_(generator=own)
            m[row].normal_(generator=own)
        x = x * (d**0.5 / x.norm(dim=-1, keepdim=True))
        moves *= d**-0.5
        w = moves[:, 0].clone()
        clean = torch.empty(B, T, F)
        for t in range(T):
            if t:
                w = a * w + math.sqrt(q) * moves[:, t]
            clean[:, t] = (w @ x[:, t, :, None])[..., 0]
        return Steps(x, clean + math.sqrt(self.options.noise) * m, clean)


class DriftModel(Model):
    """A linear memory that starts at 0, with one learned alpha and one learned theta.

    Of the memory's config it takes decay, chunk_size, rule, max_alpha, max_theta, and the gates' biases as
    their start.
    """

    def __init__(self, memory: MemoryConfig, width: int, outputs: int):
        super().__init__()
        self.memory, self.width, self.outputs = memory, width, outputs
        self.rule: Rule = find_rule(memory.rule, **memory.rule_options)
        self.alpha_logit = nn.Parameter(torch.tensor(memory.alpha_bias)) if memory.decay else None
        self.theta_logit = nn.Parameter(torch.tensor(memory.theta_bias))

    @property
    def alpha(self) -> Tensor:
        """Forgotten a step, 1 - A; [] ."""
        if self.alpha_logit is None:
            return torch.zeros_like(self.theta_logit)
        return self.memory.max_alpha * torch.sigmoid(self.alpha_logit)

    @property
    def theta(self) -> Tensor:
        """Step size, B / 2; []."""
        return self.memory.max_theta * torch.sigmoid(self.theta_logit)

    def forward(self, x_BTd: Tensor, y_BTF: Tensor) -> Tensor:
        """[B, T, F] prediction of each y from the steps before it."""
        B, T, d = x_BTd.shape
        pair = lambda query, write: torch.stack([query, write], 2).flatten(1, 2)[:, :, None]  # noqa: E731
        k, values = x_BTd * d**-0.5, y_BTF * d**-0.5
        k, v = pair(k, k), pair(torch.zeros_like(values), values)
        ones, zeros = k.new_ones(B, T), k.new_zeros(B, T)
        alpha, theta = pair(self.alpha * ones, zeros), pair(zeros, self.theta * ones)
        start = (k.new_zeros(1, d, self.outputs),)
        read, _ = neural_memory(
            k, k, v, alpha, pair(zeros, zeros), theta, start, chunk_size=self.memory.chunk_size,
            rule=self.rule, output_final_state=False,
        )  # fmt: skip
        return read[:, ::2, 0] * d**0.5

    def state_bytes(self, length: int) -> int:
        """The matrix of weights."""
        return 4 * self.width * self.outputs


@register("drift")
class Drift(Objective[DriftData]):
    """Squared error of each step's prediction after the burn-in: R + sigma^2."""

    Options = DriftOptions
    data_kind = "drift"
    positions = "steps"
    loss_unit = "squared error"
    validation_task = "drift"

    def prepare(self, root: Path, report: Report | None = None) -> DriftData:
        """Rows are generated as they are needed."""
        return self.open(root)

    def open(self, root: Path) -> DriftData:
        """The generator."""
        return DriftData(self.options, self.cfg.data.sequence_length, self.cfg.data.seed)

    def build_model(self) -> DriftModel:
        """The memory with its two gates."""
        try:
            return DriftModel(self.cfg.model.memory, self.options.width, self.options.outputs)
        except ValueError as error:
            raise UsageError(f"model.memory.{error}") from None

    def least_activations(self, rows: int) -> int:
        """Keys and values of two tokens a step."""
        return 2 * rows * self.cfg.row_tokens * (self.options.width + self.options.outputs)

    def losses(self, model: Callable[..., Any], batch: Steps) -> Tensor:
        """[B] mean squared error against the noisy y after the burn-in."""
        error = model(batch.x, batch.y) - batch.y
        return error[:, self.options.burn_in :].square().mean((1, 2))

    def sample_batch(self, rows: int) -> Steps:
        """Rows like those of training."""
        return self.open(Path()).rows(np.arange(rows), "sample")

    def check(self, data: DriftData | None = None) -> None:
        """Also reject what the closed forms do not cover."""
        given, memory, options = self.cfg.data, self.cfg.model.memory, self.options
        for name in ("sources", "tokenizer"):
            if getattr(given, name) != getattr(DataConfig(), name):
                raise UsageError(f"data.{name}: objective drift generates its rows; leave it out")
        if given.sequence_length <= options.burn_in:
            raise UsageError(
                f"data.sequence_length: {given.sequence_length} steps end within burn_in {options.burn_in}; "
                "raise it"
            )
        if options.drift >= options.width:
            raise UsageError(
                f"objective.options.drift: {options.drift:g} must be below width {options.width}, since q < 1"
            )
        needed = {"depth": 1, "chunk_size": 1, "momentum": False, "surprise_bound": None}
        for name, value in needed.items():
            if (given := getattr(memory, name)) != value:
                fix = f"set it to {json.dumps(value)}"
                raise UsageError(
                    f"model.memory.{name}: objective drift has no closed form for {given}; {fix}"
                )
        super().check(data)

    def check_task(self, task: Task, lengths: Sequence[float], data: DriftData | None) -> None:
        """Also check that rows are longer than the burn-in."""
        super().check_task(task, lengths, data)
        if min(lengths) * self.cfg.data.sequence_length <= self.options.burn_in:
            raise UsageError(
                f"lengths: {min(lengths):g} rows end within burn_in {self.options.burn_in} steps"
            )


class DriftTaskOptions(Frozen):
    """What is measured."""

    kind: Literal["risk", "ratio", "alpha", "step"] = "risk"
    """risk: R. ratio: R over the best R. alpha, step: the learnt 1 - A and B over the best."""


@register_task
class DriftTask(Task):
    """Drifting regression on held-out rows, against its closed form."""

    name = "drift"
    Options = DriftTaskOptions
    data_kind = "drift"

    @property
    def chance(self) -> float:
        """The risk of predicting 0; an upper bound of none of the others."""
        return 1.0 if self.options.kind == "risk" else math.inf

    def measure(self, context: Context) -> Measurement:
        """On `config.items` rows; the standard error is over rows."""
        data: DriftData = context.prepared
        options, model = data.options, cast(DriftModel, context.scorer.model)
        best = with_decay(options.width, options.drift / options.width, options.noise)
        if self.options.kind in ("alpha", "step"):
            gates = {"alpha": (model.alpha, 1 - best.kept), "step": (2 * model.theta, best.step)}
            learnt, wanted = gates[self.options.kind]
            return Measurement(learnt.item() / wanted, 0.0, self.chance, 1)
        rows, items = context.scorer.rows(2 * context.length), context.config.items
        batches = data.held_out(context.length, items, rows, context.config.seed)
        parts = measure_distributed(batches, partial(self._risks, context, options.burn_in))
        risks = torch.cat(parts) / (best.risk if self.options.kind == "ratio" else 1.0)
        stderr = risks.std(correction=0).item() / math.sqrt(len(risks))
        return Measurement(risks.mean().item(), stderr, self.chance, len(risks))

    def _risks(self, context: Context, burn_in: int, batch: Steps) -> Tensor:
        """[B] excess risk of each row: its squared error against w . x without noise."""
        x, y = (part.to(context.scorer.device) for part in (batch.x, batch.y))
        error = context.scorer.model(x, y).cpu() - batch.clean
        return error[:, burn_in:].double().square().mean((1, 2))
