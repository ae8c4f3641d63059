"""What a search goes through: its parameters, its budget, and which number it makes better."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

from pydantic import Field, model_validator

from titans_core.config import Frozen, PositiveInt

MAX_CORNERS = 512
"""Corners of a space that are checked; of a larger one each parameter's ends, one at a time."""


class Parameter(Frozen):
    """What a field may be: a number between two, or one of several values."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """Drawn evenly in its logarithm."""
    choices: tuple[bool | int | float | str | None, ...] = ()

    @model_validator(mode="after")
    def _one_way(self) -> Parameter:
        if self.choices:
            if self.low is not None or self.high is not None:
                raise ValueError("choices: give either choices, or low and high")
            return self
        if self.low is None or self.high is None:
            raise ValueError("low: a parameter needs low and high, or choices")
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"low: {self.low:g} should be below high: {self.high:g}, and above 0 with log")
        return self

    def ends(self) -> tuple[Any, ...]:
        """The values that a check of the whole space needs to see."""
        return self.choices or (self.low, self.high)


class Search(Frozen):
    """Trials that a sampler proposes, most of them stopped early by how they do at the rungs."""

    metric: str
    """The column that is made better; measured at every rung."""
    trials: PositiveInt = 16
    seed: int = 1000
    """Seed of the sampler and of the trials; none of those that the table's rows are run with."""
    reduction: Annotated[int, Field(ge=2)] = 3
    """Of the trials that reach a rung, one in so many goes on; the next rung has so many times the tokens."""
    rungs: PositiveInt = 3
    """Rungs, the end of the training included."""
    space: Annotated[dict[str, Parameter], Field(min_length=1)]

    @model_validator(mode="after")
    def _trainable(self) -> Search:
        fixed = [key for key in self.space if key.partition(".")[0] in ("data", "eval", "seed", "threads")]
        if fixed or "optim.steps" in self.space or "optim.global_batch_size" in self.space:
            key = fixed[0] if fixed else "optim.steps and optim.global_batch_size"
            raise ValueError(f"space: {key} cannot be searched: trials are compared at equal data and tokens")
        return self

    def milestones(self, steps: int) -> list[int]:
        """The optimiser steps that are rungs, as ASHA counts them, and the end."""
        first = max(1, steps // self.reduction ** (self.rungs - 1))
        rungs = [first * self.reduction**i for i in range(self.rungs - 1)]
        return [rung for rung in rungs if rung < steps] + [steps]

    def corners(self) -> Iterator[dict[str, Any]]:
        """Settings that together see every value at the edge of the space."""
        ends = {key: parameter.ends() for key, parameter in self.space.items()}
        count = 1
        for values in ends.values():
            count *= len(values)
        if count <= MAX_CORNERS:
            yield from (dict(zip(ends, point, strict=True)) for point in product(*ends.values()))
            return
        first = {key: values[0] for key, values in ends.items()}
        yield from (first | {key: value} for key, values in ends.items() for value in values)
