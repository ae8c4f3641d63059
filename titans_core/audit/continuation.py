"""A sequence in pieces, token by token, and packed with others equals the sequence at once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from titans_core.audit.adapter import Adapter
from titans_core.audit.report import Example, NotApplicable, Outcome, check
from titans_core.audit.subject import Subject, compare, one_line, tensors_in, worst

DECODED = 80
"""Tokens that are decoded one at a time."""
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def _step(adapter: Adapter) -> Step:
    if adapter.step is None:
        raise NotApplicable("the adapter has no `step`")
    return adapter.step


def _in_pieces(
    s: Subject, adapter: Adapter, x: Tensor, step: Step, sizes: list[int], state: Any = None
) -> Tensor:
    outputs = []
    for piece in x.split(sizes, 1):
        y, state = s.call(step, adapter, piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1)


@check("cut in two around usual chunk borders, and in many pieces of odd sizes")
def pieces(s: Subject) -> Outcome:
    """A sequence in pieces, the state carried, equals the whole."""
    _step(s.build())

    def cuts(length: int) -> Iterator[tuple[float, Example]]:
        adapter = s.build()
        x = s.inputs(adapter, length)
        y = s.forward(adapter, x)
        ways = [[p, length - p] for p in s.positions(length)]
        many = [5, 1, 16, 3, 64, 7, 32, 2]
        ways.append([min(n, length - sum(many[:i])) for i, n in enumerate(many) if sum(many[:i]) < length])
        if (rest := length - sum(ways[-1])) > 0:
            ways[-1].append(rest)
        for sizes in ways if length > 1 else []:
            fresh = s.build()
            try:
                pieced = _in_pieces(s, fresh, x, _step(fresh), sizes)
            except Exception as error:  # a cut that it refuses
                yield math.inf, Example(length, math.inf, source=sizes[0], note=one_line(error))
                continue
            yield compare(pieced, y, s.tolerance, f"pieces {' + '.join(map(str, sizes))}", sizes[0])

    return s.smallest(lambda length: worst(cuts(length), s.tolerance))


@check("from the start, and after a prefix that was read at once")
def decoding(s: Subject) -> Outcome:
    """Decoding token by token equals the parallel form."""
    if (built := s.build()).decode is None:
        raise NotApplicable("the adapter has neither `decode` nor `step`")
    prefill = built.step is not None

    def decoded(length: int) -> Iterator[tuple[float, Example]]:
        adapter = s.build()
        x = s.inputs(adapter, min(length, DECODED))
        T, y = x.shape[1], s.forward(adapter, x)
        assert adapter.decode is not None
        alone = _in_pieces(s, adapter, x, adapter.decode, [1] * T)
        yield compare(alone, y, s.tolerance, "token by token")
        for prefix in {T // 2, T - 3} if prefill and T > 3 else ():
            fresh = s.build()
            assert fresh.decode is not None
            first, state = s.call(_step(fresh), fresh, x[:, :prefix], None)
            rest = _in_pieces(s, fresh, x[:, prefix:], fresh.decode, [1] * (T - prefix), state)
            yield compare(torch.cat([first, rest], 1), y, s.tolerance, f"after {prefix} at once", prefix)

    return s.smallest(lambda length: worst(decoded(length), s.tolerance))


@check("the state's tensors before and after a call; two continuations of one state, the first one again")
def state_kept(s: Subject) -> Outcome:
    """A state can be kept: to go on from it neither changes it nor depends on who else did."""
    if (built := s.build()).changes_state:
        _step(built)
        raise NotApplicable("the state is changed in place by design (adapter.changes_state)")

    def continued(length: int) -> Iterator[tuple[float, Example]]:
        for first in sorted({max(1, length // 2), length}):
            adapter = s.build()
            step, x = _step(adapter), s.inputs(adapter, length + 8)
            _, state = s.call(step, adapter, x[:, :first], None)
            before = [t.clone() for t in tensors_in(state)]
            held = copy.copy(state)
            once, _ = s.call(step, adapter, x[:, first : first + 4], state)
            once = once.clone()
            s.call(step, adapter, s.other(adapter, x)[:, :5], state)
            after = list(tensors_in(state))
            same = len(before) == len(after) and all(map(torch.equal, before, after))
            again, _ = s.call(step, adapter, x[:, first : first + 4], state)
            yield compare(again, once, s.tolerance, f"the same continuation of {first} tokens twice", first)
            if not same:
                note = f"the state after {first} tokens was changed in place"
                yield torch.inf, Example(length, torch.inf, source=first, note=note)
            del held

    return s.smallest(lambda length: worst(continued(length), s.tolerance))


@check("documents of 1 to 65 tokens in one row with cu_seqlens; also the order of documents reversed")
def packed(s: Subject) -> Outcome:
    """Documents packed in one row equal the same documents alone."""
    if s.build().packed is None:
        raise NotApplicable("the adapter has no `packed`")

    def rows(length: int) -> Iterator[tuple[float, Example]]:
        sizes = [n for n in (5, 1, 16, 17, 2, 64, 3, 8, 65) if n < length]
        kept: list[int] = []
        for n in sizes:
            if sum(kept) + n < length:
                kept.append(n)
        if length > sum(kept):
            kept.append(length - sum(kept))
        for order in (kept, kept[::-1]):
            adapter = s.build()
            assert adapter.packed is not None
            x = s.inputs(adapter, length, 1)
            alone = torch.cat([s.forward(s.build(), document) for document in x.split(order, 1)], 1)
            borders = torch.tensor([0, *torch.tensor(order).cumsum(0).tolist()], dtype=torch.int32)
            y = s.call(adapter.packed, adapter, x, borders)
            yield compare(y, alone, s.tolerance, f"documents of {', '.join(map(str, order))}")

    return s.smallest(lambda length: worst(rows(length), s.tolerance))
