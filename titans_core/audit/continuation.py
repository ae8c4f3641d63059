"""A sequence in pieces, token by token, and packed with others equals the sequence at once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from titans_core.audit.adapter import Adapter
from titans_core.audit.report import Example, NotApplicable, Outcome, check
from titans_core.audit.subject import Subject, compare, one_line, tensors_in, worst

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def _step(adapter: Adapter) -> Step:
    if adapter.step is None:
        raise NotApplicable("the adapter has no `step`")
    return adapter.step


def _in_pieces(
    s: Subject, adapter: Adapter, x: Tensor, pieces: Iterable[tuple[Step, int]], state: Any = None
) -> Tensor:
    """Read x in pieces, given as (function, number of tokens), and return the outputs concatenated."""
    outputs, start = [], 0
    for function, size in pieces:
        y, state = s.call(function, adapter, x[:, start : start + size], state)
        outputs.append(y)
        start += size
    return torch.cat(outputs, 1)


@check("cut in two around usual chunk borders, and in seeded pieces of any sizes that cut at every token")
def pieces(s: Subject) -> Outcome:
    """Check that a sequence in pieces, the state carried, equals the whole."""
    _step(s.build())

    def cuts(length: int) -> Iterator[tuple[float, Example]]:
        adapter = s.build()
        x = s.inputs(adapter, length)
        y = s.forward(adapter, x)
        for sizes in [[p, length - p] for p in s.positions(length)] + s.partitions(length):

            def pieced(layer: Adapter, sizes: list[int] = sizes) -> tuple[float, Example]:
                outputs = _in_pieces(s, layer, x, ((_step(layer), size) for size in sizes))
                return compare(outputs, y, s.tolerance, f"pieces {' + '.join(map(str, sizes))}", sizes[0])

            try:
                yield s.measured(pieced, adapter)
            except Exception as error:  # a cut that it refuses
                yield math.inf, Example(length, math.inf, source=sizes[0], note=one_line(error))

    return s.smallest(lambda length: worst(cuts(length), s.tolerance))


@check("from the start, and a token after each of seeded pieces that end at every token")
def decoding(s: Subject) -> Outcome:
    """Check that decoding token by token equals the parallel form."""
    if (built := s.build()).decode is None:
        raise NotApplicable("the adapter has neither `decode` nor `step`")
    prefill = built.step is not None

    def decoded(length: int) -> Iterator[tuple[float, Example]]:
        adapter = s.build()
        x = s.inputs(adapter, length)
        y = s.forward(adapter, x)
        splits = [[0] + [1] * length, *(s.partitions(length) if prefill else ())]
        for sizes in splits:

            def decoded_after(layer: Adapter, sizes: list[int] = sizes) -> tuple[float, Example]:
                assert layer.decode is not None
                parts = [(_step(layer), sizes[0])] if sizes[0] else []
                for size in sizes[1:]:
                    parts += [(layer.decode, 1)] + [(_step(layer), size - 1)] * (size > 1)
                note = f"a token alone after each of pieces {' + '.join(map(str, sizes))}"
                outputs = _in_pieces(s, layer, x, parts)
                return compare(
                    outputs, y, s.tolerance, note if sizes[0] else "token by token", sizes[0] or None
                )

            yield s.measured(decoded_after, adapter)

    return s.smallest(lambda length: worst(decoded(length), s.tolerance))


@check("the state's tensors before and after a call, at every token; one state continued twice")
def state_kept(s: Subject) -> Outcome:
    """Check that a state can be kept: going on from it changes neither it nor another continuation."""
    if (built := s.build()).changes_state:
        _step(built)
        raise NotApplicable("the state is changed in place by design (adapter.changes_state)")

    def continued(length: int) -> Iterator[tuple[float, Example]]:
        for sizes in ([max(1, length // 2)], [length], [1] * length):
            adapter, state, first = s.build(), None, 0
            step, x = _step(adapter), s.inputs(adapter, length + 8)
            for size in sizes:
                _, state = s.call(step, adapter, x[:, first : first + size], state)
                first += size
                before = [t.clone() for t in tensors_in(state)]
                held, ahead = copy.copy(state), x[:, first : first + 4]
                once = s.call(step, adapter, ahead, state)[0].clone()
                if len(sizes) == 1:
                    s.call(step, adapter, s.other(adapter, ahead), state)
                    again, _ = s.call(step, adapter, ahead, state)
                    note = f"the same continuation of {first} tokens twice"
                    yield compare(again, once, s.tolerance, note, first)
                after = list(tensors_in(state))
                if len(before) != len(after) or not all(map(torch.equal, before, after)):
                    note = f"the state after {first} tokens was changed in place"
                    yield torch.inf, Example(length, torch.inf, source=first, note=note)
                del held

    return s.smallest(lambda length: worst(continued(length), s.tolerance))


@check("documents of all lengths in one row with cu_seqlens, in seeded ways that begin one at every token")
def packed(s: Subject) -> Outcome:
    """Check that documents packed in one row equal the same documents alone."""
    if s.build().packed is None:
        raise NotApplicable("the adapter has no `packed`")

    def rows(length: int) -> Iterator[tuple[float, Example]]:
        adapter = s.build()
        x = s.inputs(adapter, length, 1)
        usual = [n for n in (5, 1, 16, 17, 2, 64, 3, 8, 65) if n < length]
        while sum(usual) >= length and len(usual) > 1:
            usual.pop()
        if sum(usual) < length:
            usual.append(length - sum(usual))
        for sizes in (usual, usual[::-1], *s.partitions(length)):

            def packed(layer: Adapter, sizes: list[int] = sizes) -> tuple[float, Example]:
                assert layer.packed is not None
                alone = torch.cat([s.forward(layer, document) for document in x.split(sizes, 1)], 1)
                borders = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
                y = s.call(layer.packed, layer, x, borders)
                return compare(y, alone, s.tolerance, f"documents of {', '.join(map(str, sizes))}")

            yield s.measured(packed, adapter)

    return s.smallest(lambda length: worst(rows(length), s.tolerance))
