"""Loss of long held-out texts with the state carried, and what carrying it gains, as a task of a study."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Literal

from pydantic import model_validator

from titans_core.config import Frozen, PositiveInt
from titans_platform.errors import UsageError
from titans_platform.evals.by_position import (
    CARRIED,
    FRESH,
    WINDOW,
    WINDOWS,
    LongText,
    long_texts,
    read_by_position,
)
from titans_platform.tasks import Context, Measurement, Task


class ByPositionOptions(Frozen):
    """The measure, and the positions that count."""

    measure: Literal["gain", "carried", "fresh", "window"] = "gain"
    """gain: fresh less carried loss, nats a token. The others: perplexity with the state carried, with a new
    one every row, with the best window."""
    from_row: PositiveInt = 2
    """First row whose tokens count, from 1; in row 1 carried and fresh are equal."""
    to_row: PositiveInt | None = None
    """Last row whose tokens count; None: the last row of the text."""
    windows: tuple[PositiveInt, ...] = WINDOWS
    """Rows that are read again before each row, one window each; the best has the lowest loss beyond the
    first row. A window of w takes w + 1 times what fresh does. `carried` and `fresh` read none."""

    @model_validator(mode="after")
    def _possible(self) -> ByPositionOptions:
        if self.to_row is not None and self.to_row < self.from_row:
            raise ValueError(f"to_row: {self.to_row} is below from_row {self.from_row}")
        if self.measure == WINDOW and not self.windows:
            raise ValueError("windows: measure window needs at least one; give e.g. [1, 2, 4, 8]")
        return self


class ByPositionTask(Task):
    """Gain of a state carried through long held-out texts, or the perplexity with and without it.

    The texts are of `lengths` training rows each, as many as `eval.perplexity_tokens` allows, and two where
    there are two.
    """

    name = "by_position"
    Options = ByPositionOptions

    @property
    def label(self) -> str:
        """Name and measure, with the rows if they are not all but the first: `by_position-gain`."""
        first, last = self.options.from_row, self.options.to_row
        name = f"{self.name}-{self.options.measure}"
        if last is None:
            # MLflow takes no plus sign
            return name if first == 2 else f"{name}-from-{first}"
        return f"{name}-{first}-{last}"

    @property
    def chance(self) -> float:
        """0 for a gain: without memory there is none. For a perplexity `measure` gives it."""
        return 0.0 if self.options.measure == "gain" else math.inf

    def measure(self, context: Context) -> Measurement:
        """Measure over rows of texts of `context.length` tokens; buckets hold perplexities.

        A standard error takes texts as independent; of a single text, its 16 parts.

        Raises:
            UsageError: the held-out text is shorter than one text, or a text than `from_row` or `to_row`.
        """
        texts = self.texts(context.prepared, context.length, context.config.perplexity_tokens)
        row, measured = context.prepared.config.sequence_length, self.options.measure
        ways = {"gain": (CARRIED, FRESH), WINDOW: ()}.get(measured, (measured,))
        windows = self.options.windows if measured in ("gain", WINDOW) else ()
        result = read_by_position(context.scorer, texts, row, ways, windows)
        first = row * (self.options.from_row - 1) + 1
        last = self.options.to_row and row * self.options.to_row
        items = result.tokens(first, last)
        buckets = {
            f"{name} {begin}-{end}": math.exp(result.loss(name, begin, end)[0])
            for name, (begin, end) in product(result.shown, result.buckets())
        }
        if measured == "gain":
            return Measurement(*result.gain(first, last), 0.0, items, buckets)
        way = result.best_window if measured == WINDOW else measured
        assert way is not None
        loss, stderr = result.loss(way, first, last)
        chance = float(context.scorer.tokenizer.vocab_size)
        return Measurement(math.exp(loss), math.exp(loss) * stderr, chance, items, buckets)

    def check(self, objective: Any, length: int, data: Any) -> None:
        """Read also a text of that length."""
        if data is not None:
            self.texts(data, length)

    def texts(self, prepared: Any, length: int, budget: int = 1) -> list[LongText]:
        """Texts of ``length`` tokens; called before training, so that errors come early.

        Raises:
            UsageError: as `measure`.
        """
        row, options = prepared.config.sequence_length, self.options
        rows = length // row
        if rows < 2:
            raise UsageError(f"lengths: {length} tokens are less than two training rows of {row}; raise it")
        for field, bound in (("from_row", options.from_row), ("to_row", options.to_row)):
            if bound and bound > rows:
                raise UsageError(f"{field}: {bound} is beyond the {rows} rows of a text; raise lengths")
        if options.measure == WINDOW and (least := min(options.windows)) > rows - 2:
            cause = f"{least} rows before another are all that {rows} rows have"
            raise UsageError(f"windows: {cause}; raise lengths")
        return long_texts(prepared, rows, budget)
