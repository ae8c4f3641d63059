"""Precision, long inputs, and how the state and the work grow with the length."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from titans_core.audit.report import Example, NotApplicable, Outcome, check
from titans_core.audit.subject import SeenPrecisions, Subject, bytes_kept, cast, tensors_in, worst

LONG = 16
"""Length of long inputs, as a multiple of the audit's length."""
STATE_LENGTHS = (256, 1024)
"""Tokens up to which the state's size is measured; they differ by a multiple of usual chunks."""
WINDOW = 128
"""Tokens before each of them in which it is, after every piece."""
GROWTH = ((128, 256, 512), (250, 500, 1000))
"""Lengths at which the growth of work is measured; the others where a long chunk may disturb the first."""
EXPONENT = {"constant": 0.0, "linear": 1.0, "quadratic": 2.0}


def _rounded(s: Subject, dtype: torch.dtype, tolerance: float) -> Outcome:
    """Measure the error of a precision against float64 with parameters and inputs rounded to it."""
    if s.precision is not torch.float64 and dtype is torch.float32:
        if s.dtype is torch.float32 and s.precision is torch.float32:
            raise NotApplicable("the layer does not run in float64, to compare with")
        note = f"computes in {str(s.precision).removeprefix('torch.')} whatever its precision"
        return Outcome(torch.inf, tolerance, Example(s.length, torch.inf, note=note))
    low, exact, seen = s.build(dtype), s.build(dtype), SeenPrecisions()
    x = s.inputs(low)
    x = x.to(dtype) if x.is_floating_point() else x
    cast(exact.module, s.dtype)
    try:
        with seen:
            y = s.forward(low, x)
    except (RuntimeError, TypeError) as error:
        if dtype is torch.float32:
            raise
        raise NotApplicable(f"does not run: {' '.join(str(error).split())[:160]}") from None
    true = s.forward(exact, x).double()
    gap = (y.double() - true).square().mean((0, 2)).sqrt() / true.square().mean().sqrt().clamp(min=1e-12)
    gap = gap.nan_to_num(torch.inf)
    size, at = float(gap.max()), int(gap.argmax())
    name = str(dtype).removeprefix("torch.")
    example = Example(s.length, size, at, note=f"{name} against float64") if size > tolerance else None
    return Outcome(size, tolerance, example, "root mean square of a token")


@check("root mean square error of each token's output in float32 against float64")
def float32(s: Subject) -> Outcome:
    """Check that float32 is enough."""
    return _rounded(s, torch.float32, 1e-3)


@check("root mean square error of each token's output in bfloat16 against float64")
def bfloat16(s: Subject) -> Outcome:
    """Check that bfloat16 is enough."""
    return _rounded(s, torch.bfloat16, 0.2)


@check(f"{LONG} times the length in float32, random tokens and one token repeated; gradients at 4 times")
def long_inputs(s: Subject) -> Outcome:
    """Check that long inputs give finite outputs that do not grow."""
    bound = 1e3

    def runs() -> Iterator[tuple[float, Example]]:
        adapter = s.build(torch.float32)
        usual = s.forward(adapter, s.inputs(adapter)).abs().max().clamp(min=1e-6)
        for repeated in (False, True):
            x = s.inputs(adapter, LONG * s.length, 1)
            x = x[:, :1].expand_as(x).clone() if repeated else x
            y = s.forward(s.build(torch.float32), x)
            kind = "one token repeated" if repeated else "random tokens"
            size_T = (y[0].abs().amax(-1) / usual).nan_to_num(torch.inf)
            yield (
                float(size_T.max()),
                Example(len(size_T), float(size_T.max()), _first(size_T > bound), note=kind),
            )
        x = s.inputs(adapter, 4 * s.length, 1)
        y = s.forward(adapter, x, grad=True)
        if y.requires_grad:
            y.square().mean().backward()
            for name, p in adapter.module.named_parameters():
                if p.grad is not None and not bool(p.grad.isfinite().all()):
                    yield torch.inf, Example(x.shape[1], torch.inf, note=f"gradient of {name} is not finite")

    return worst(runs(), bound, "largest output over that at the usual length")


def _first(over: Tensor) -> int | None:
    positions = over.nonzero().flatten()
    return int(positions[0]) if len(positions) else None


@check(
    "most bytes kept in the 128 tokens up to 256 and up to 1,024, read in the same pieces, and in one call"
)
def state_growth(s: Subject) -> Outcome:
    """Check that the state grows no faster than the layer claims: constant or linear."""
    adapter, draw = s.build(torch.float32), random.Random(s.seed)
    pieces = [draw.randint(1, 24) for _ in range(WINDOW)]
    while sum(pieces) > WINDOW:
        pieces.pop()
    state, length, peaks = None, 0, {"in pieces": [0, 0], "in one call": [0, 0]}
    for late, end in enumerate(STATE_LENGTHS):
        first = [64] * ((end - WINDOW - length) // 64)
        for i, size in enumerate(first + pieces):
            x, length = s.inputs(adapter, size, seed=length), length + size
            if adapter.step is None:
                s.forward(adapter, x)
            else:
                _, state = s.call(adapter.step, adapter, x, state)
            if i >= len(first):
                kept = bytes_kept(state) + _kept_inside(adapter.module)
                peaks["in pieces"][late] = max(peaks["in pieces"][late], kept)
        length += (remaining := -length % 64)  # both windows begin at a multiple of 64
        if remaining and adapter.step is not None:
            _, state = s.call(adapter.step, adapter, s.inputs(adapter, remaining, seed=length), state)
        for tokens in (end, end - pieces[0], end - pieces[1]) if adapter.step is not None else ():
            assert adapter.step is not None
            _, alone = s.call(adapter.step, adapter, s.inputs(adapter, tokens), None)
            peaks["in one call"][late] = max(peaks["in one call"][late], bytes_kept(alone))
    if adapter.step is None and peaks["in pieces"][1] <= peaks["in pieces"][0]:
        raise NotApplicable("the adapter has no `step`, and the layer keeps nothing")
    doublings = math.log2(STATE_LENGTHS[1] / STATE_LENGTHS[0])
    grown = {mode: math.log2(max(b, 1) / max(a, 1)) / doublings for mode, (a, b) in peaks.items() if b}
    mode, exponent = max(grown.items(), key=lambda pair: pair[1])
    note = f"{peaks[mode][1] / s.batch:,.0f} bytes a row after {STATE_LENGTHS[1]} tokens {mode}"
    claim = EXPONENT[adapter.state_grows]
    # of a constant state only the buffer of an open chunk may differ
    limit, example = claim + (0.25 if claim else 0.1), None
    if exponent > limit:
        example = Example(STATE_LENGTHS[1], exponent, note=f"{adapter.state_grows} by its claim; {note}")
    return Outcome(exponent, limit, example, note)


def _kept_inside(module: nn.Module) -> int:
    """Bytes of tensors that a layer keeps outside its parameters and buffers."""
    ignored = ("_parameters", "_buffers", "_modules")
    known = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
    values = [value for m in module.modules() for name, value in vars(m).items() if name not in ignored]
    return bytes_kept([t for t in tensors_in(values) if t.untyped_storage().data_ptr() not in known])


class Work(TorchDispatchMode):
    """Counts what a call does: numbers written, and multiplications of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Add this operation's work."""
        out = func(*args, **(kwargs or {}))
        self.count += sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)) + 1
        name = str(func)
        if "scaled_dot_product" in name or "flash_attention" in name:
            q, k = args[0], args[1]
            self.count += 4 * q.numel() * k.shape[-2]
        elif (packet := getattr(func, "_overloadpacket", None)) in flop_registry:
            self.count += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


@check("numbers written and multiplied in a call of 128, 256 and 512 tokens; seconds are shown")
def time_growth(s: Subject) -> Outcome:
    """Check that time grows no faster with the length than the layer claims: linear or quadratic."""
    limit = EXPONENT[s.build(torch.float32).time_grows] + 0.25
    outcome = _work_growth(s, GROWTH[0], limit)
    again = outcome if outcome.example is None else _work_growth(s, GROWTH[1], limit)
    return outcome if again.example else again


def _work_growth(s: Subject, lengths: tuple[int, ...], limit: float) -> Outcome:
    adapter = s.build(torch.float32)
    counts, seconds = [], []
    for length in lengths:
        x = s.inputs(adapter, length, 1)
        began, work = time.perf_counter(), Work()
        s.forward(adapter, x)
        seconds.append(time.perf_counter() - began)
        with work:
            s.forward(adapter, x)
        counts.append(work.count)
    # of the growth itself: without what does not depend on the length
    exponent = math.log2(max(counts[2] - counts[1], 1) / max(counts[1] - counts[0], 1))
    note = f"exponent {exponent:.2f}; {1e3 * seconds[-1]:.0f} ms for {lengths[-1]} tokens"
    example = None
    if exponent > limit:
        example = Example(lengths[-1], exponent, note=f"{adapter.time_grows} by its claim; {note}")
    return Outcome(exponent, limit, example, note)
