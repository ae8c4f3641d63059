"""In-context regression: examples of a random map, then inputs that were not shown.

An input is a few letters, an output a digit: `AH2CB0...`. The map is a random net of two layers, tanh between
them, that makes one number of the numbers its letters stand for. The output says in which of `classes` equal
parts of all inputs, ordered by that number, the input is. So every output is as frequent as another, and near
inputs have near outputs.

With the map in hand every answer is certain. From the examples alone none is: at the defaults the floor is
0.33, the nearest example's output is right 0.60 of the time, the best linear map 0.63, and the average over
random nets by how well they fit the examples 0.72.
"""

from __future__ import annotations

import math
import random
import string
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from titans_core.config import PositiveInt
from titans_platform.evals.registry import Heuristic
from titans_platform.evals.tasks.recall import Associative, Block, QueryOptions, key_and_pairs

BEND = 2.0
"""Scale of the input of tanh; at 1 a linear map does nearly as well, at 3 nearby inputs differ."""


class FunctionOptions(QueryOptions):
    """The distribution of maps, and the number of examples."""

    inputs: Annotated[int, Field(ge=1, le=4)] = 2
    """Symbols of an input."""
    levels: Annotated[int, Field(ge=2, le=26)] = 8
    """Values of a symbol, A to Z: evenly spaced numbers from -1 to 1."""
    classes: Annotated[int, Field(ge=2, le=10)] = 4
    """Number of outputs: quantiles of the map's value over all inputs."""
    hidden: Annotated[int, Field(ge=0, le=256)] = 8
    """Hidden units of the map, a random two-layer network; 0: a linear map, the control."""
    examples: PositiveInt = 13
    """Inputs shown with their outputs."""
    queries: PositiveInt | None = 8
    """Inputs that are asked for, none of them shown before; None: as many as examples."""

    @model_validator(mode="after")
    def _unseen_are_left(self) -> FunctionOptions:
        inputs, used = self.levels**self.inputs, self.examples + (self.queries or self.examples)
        if inputs > 4096:
            raise ValueError(f"levels: {self.levels} to the power {self.inputs} are more than 4096 inputs")
        if used > inputs:
            raise ValueError(f"examples: with the queries {used}, of {inputs} inputs")
        if self.classes > inputs:
            raise ValueError(f"classes: {self.classes} exceed the {inputs} inputs")
        return self


class Functions(Associative):
    """The output of a map for inputs that were not shown, after examples.

    Each row has a map of its own: a random net of two layers, or with `hidden: 0` a linear one, the control.
    """

    name = "functions"
    Options = FunctionOptions

    def __init__(self, options: FunctionOptions | None = None) -> None:
        super().__init__(options)
        levels, inputs = self.options.levels, self.options.inputs
        self._names = ["".join(name) for name in product(string.ascii_uppercase[:levels], repeat=inputs)]
        self._points = np.array([*product(np.linspace(-1, 1, levels), repeat=inputs)])

    @property
    def bound(self) -> int:
        """Number of examples."""
        return self.options.examples

    @property
    def chance(self) -> float:
        """One over the number of classes."""
        return 1 / self.options.classes

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Guesses from the outputs alone or from one letter of the input."""
        first, last = partial(_sharing_letter, 0), partial(_sharing_letter, -1)
        return {
            "the output seen least": self._seen_least,
            "the newest example with the same first letter": first,
            "the newest example with the same last letter": last,
        }

    def _seen_least(self, before: str) -> list[str]:
        """Outputs are equally frequent over all inputs, so the one seen least has the most inputs left."""
        counts = Counter(map(str, range(self.options.classes)))
        counts.update(key_and_pairs(before)[1].values())
        return [output for output, count in counts.items() if count == min(counts.values())]

    def ask(self, rng: random.Random, keys: list[str]) -> list[str]:
        """Inputs that occur once in the row."""
        return keys

    def blocks(self, rng: random.Random, length: int) -> list[Block]:
        """Examples of a new map."""
        # the class of each input, by the rank of its value
        ranks = self._map(rng).argsort(kind="stable").argsort()
        outputs = ranks * self.options.classes // len(ranks)
        shown, queries = self.options.examples, self.options.queries or self.options.examples
        drawn = rng.sample(range(len(outputs)), shown + queries)
        pairs = [(self._names[i], str(outputs[i])) for i in drawn]
        return [("".join(name + output for name, output in pairs[:shown]), dict(pairs[shown:]))]

    def _map(self, rng: random.Random) -> NDArray[np.float64]:
        """Value of a random map at each input."""
        inputs, hidden = self.options.inputs, self.options.hidden
        if not hidden:
            return self._points @ _gauss(rng, inputs)
        bent = np.tanh(BEND * (self._points @ _gauss(rng, inputs, hidden) + _gauss(rng, hidden)))
        return bent @ _gauss(rng, hidden)


def _gauss(rng: random.Random, *shape: int) -> NDArray[np.float64]:
    """Standard normal numbers from Python's generator, whose stream is the same in every version."""
    return np.array([rng.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)


def _sharing_letter(place: int, before: str) -> list[str]:
    key, bound = key_and_pairs(before)
    return [output for name, output in bound.items() if name[place] == key[place]][-1:]
