"""The layer under audit, as checks see it: fresh copies, inputs, precision, small examples."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titans_core.audit.adapter import Adapter, as_adapter
from titans_core.audit.report import AuditError, Example, Outcome

TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference between two ways to compute the same, over the largest output."""
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 80, 96, 128, 129)
"""Lengths at which a failing example is sought, smallest first."""
BORDERS = (1, 2, 3, 4, 5, 8, 16, 32, 48, 64, 96, 128, 256)
"""Usual sizes of chunks, segments and windows: positions around them are tried."""
LOW = (torch.float32, torch.bfloat16, torch.float16)


class SeenPrecisions(TorchDispatchMode):
    """Collects the floating-point precisions of what a layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the output's precision; single numbers do not count."""
        out = func(*args, **(kwargs or {}))
        dtypes = {t.dtype for t in tree_leaves(out) if isinstance(t, Tensor) and t.numel() > 1}
        self.seen |= dtypes | ({torch.float32} if torch.complex64 in dtypes else set())
        return out


class KeepDouble(TorchDispatchMode):
    """Turns a layer's own casts to these precisions into float64, so that small differences can be seen."""

    def __init__(self, undone: Sequence[torch.dtype] = (torch.float32,)) -> None:
        super().__init__()
        self.undone = undone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a requested precision by float64."""
        kwargs = kwargs or {}
        if kwargs.get("dtype") in self.undone:
            kwargs = {**kwargs, "dtype": torch.float64}
        elif kwargs.get("dtype") is torch.complex64:
            kwargs = {**kwargs, "dtype": torch.complex128}
        return func(*args, **kwargs)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors that the layer creates without a precision have this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype in (torch.float32, torch.float64) else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast all parameters and buffers to ``dtype``, complex ones to the complex type of its width."""
    complex_dtype = torch.complex128 if dtype is torch.float64 else torch.complex64

    def one(t: Tensor) -> Tensor:
        if t.is_complex():
            return t.to(complex_dtype)
        return t.to(dtype) if t.is_floating_point() else t

    return module._apply(one)


@torch.no_grad()
def wake(module: nn.Module) -> None:
    """Add noise to parameters that are constant: a branch that starts at zero would hide what it does."""
    generator = torch.Generator().manual_seed(7)
    for p in module.parameters():
        if p.numel() > 1 and p.is_floating_point() and bool((p == p.flatten()[0]).all()):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            p.add_(noise.to(p) * (0.5 * p.shape[-1] ** -0.5 if p.ndim > 1 else 0.1))


def difference(a: Tensor, b: Tensor) -> Tensor:
    """[T] largest difference at each token of a, b [B, T, E], over the largest of b; nan is infinite."""
    if a.shape != b.shape:
        raise ValueError(f"outputs have shapes {list(a.shape)} and {list(b.shape)}")
    a, b = a.detach().double(), b.detach().double()
    gap = ((a - b).abs().amax((0, 2)) / b.abs().max().clamp(min=1e-12)).nan_to_num(torch.inf)
    return gap


class Subject:
    """A layer under audit.

    Args:
        factory: makes the layer, or an `Adapter` of it; called again for every check, from the same seed.
        length: tokens of the inputs.
        batch: rows of the inputs.
        width: D of the inputs of a plain module, if it cannot be guessed.
        seed: of the parameters and the inputs.

    Raises:
        AuditError: the layer cannot be built or called.
    """

    def __init__(
        self,
        factory: Callable[[], nn.Module | Adapter],
        length: int = 144,
        batch: int = 3,
        width: int | None = None,
        seed: int = 0,
    ):
        self.factory, self.length, self.batch, self.width, self.seed = factory, length, batch, width, seed
        self.keep_double = False
        self.dtype, self.precision = torch.float64, torch.float64
        self._choose_precision()

    def _choose_precision(self) -> None:
        """float64 if the layer runs in it, with its casts to float32 undone if that works; else float32."""
        failure = None
        for dtype, keep in ((torch.float64, False), (torch.float64, True), (torch.float32, False)):
            self.dtype, self.keep_double = dtype, keep
            try:
                adapter, seen = self.build(), SeenPrecisions()
                x = self.inputs(adapter)
                with seen:
                    y = self.forward(adapter, x)
            except AuditError:
                raise
            except Exception as error:
                failure = failure or error
                continue
            if y.ndim != 3 or y.shape[:2] != x.shape[:2]:
                raise AuditError(f"forward: {list(x.shape)} gave {list(y.shape)}, not [B, T, E]")
            lowest = [low for low in LOW if low in seen.seen]
            if not lowest or (dtype is torch.float64 and self._unaffected(x, y)):
                self.precision = dtype
                return
            if dtype is torch.float64 and lowest == [torch.float32]:
                continue  # try again with its casts undone
            self.precision = lowest[-1]
            return
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())
        raise AuditError(f"forward: fails at {self.length} tokens: {reason[:300]}")

    def _unaffected(self, x: Tensor, y: Tensor) -> bool:
        """Return True if the outputs are the same without any cast to a lower precision."""
        try:
            with KeepDouble(LOW):
                return float(difference(self.forward(self.build(), x), y).max()) <= 1e-9
        except Exception:  # what it casts it needs so
            return False

    @property
    def tolerance(self) -> float:
        """Of two ways to compute the same outputs."""
        return TOLERANCE[self.precision]

    def build(self, dtype: torch.dtype | None = None, training: bool = False, woken: bool = True) -> Adapter:
        """Build a fresh copy of the layer, the same every time, in ``dtype``."""
        torch.manual_seed(self.seed)
        adapter = as_adapter(self.factory(), self.width)
        if woken:
            wake(adapter.module)
        cast(adapter.module, dtype or self.dtype)
        adapter.module.train(training)
        return adapter

    def inputs(
        self, adapter: Adapter, length: int | None = None, batch: int | None = None, seed: int = 1
    ) -> Tensor:
        """Random inputs [B, T, D] or tokens [B, T]."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        shape = (batch or self.batch, self.length if length is None else length)
        if adapter.vocab is not None:
            return torch.randint(0, adapter.vocab, shape, generator=generator)
        return torch.randn(*shape, adapter.width or 1, generator=generator, dtype=torch.float64)

    def other(self, adapter: Adapter, x: Tensor, seed: int = 2, scale: float = 1.0) -> Tensor:
        """Return other inputs of the same shape, different at every token."""
        new = self.inputs(adapter, x.shape[1], x.shape[0], seed)
        if adapter.vocab is None:
            return new * scale
        return (x + 1 + new % max(1, adapter.vocab - 1)) % adapter.vocab

    @contextmanager
    def running(self, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Set the precision of the audit around calls of the layer."""
        with ExitStack() as stack:
            stack.enter_context(default_dtype(dtype or self.dtype))
            if self.keep_double and dtype in (None, torch.float64):
                stack.enter_context(KeepDouble())
            yield

    def forward(self, adapter: Adapter, x: Tensor, *, seed: int | None = 5, grad: bool = False) -> Tensor:
        """Return outputs of x in the module's precision; ``seed`` fixes dropout, None leaves it random."""
        return self.call(adapter.forward, adapter, x, seed=seed, grad=grad)

    def call(
        self, function: Callable[..., Any], adapter: Adapter, x: Tensor, *rest: Any,
        seed: int | None = 5, grad: bool = False,
    ) -> Any:  # fmt: skip
        """``function(x, *rest)`` in the module's precision."""
        dtype = self.dtype_of(adapter)
        if x.is_floating_point():
            x = x.to(dtype)
        if seed is not None:
            torch.manual_seed(seed)
        with torch.set_grad_enabled(grad), self.running(dtype):
            return function(x, *rest)

    def dtype_of(self, adapter: Adapter) -> torch.dtype:
        """Return the precision of the module's parameters."""
        return next((p.dtype for p in adapter.module.parameters() if p.is_floating_point()), self.dtype)

    def tokens(self, length: int, some: bool = False) -> Tensor:
        """Return all positions, or a seeded third of them with the last."""
        if not some:
            return torch.arange(length)
        chosen = random.Random(f"{self.seed} {length}").sample(range(length), length // 3)
        return torch.tensor(sorted({*chosen, length - 1}))

    def positions(self, length: int) -> list[int]:
        """Tokens 1 .. length - 1 around the usual borders, and the last."""
        near = {b + d for b in BORDERS for d in (-1, 0, 1)} | {length - 1, length - 2}
        return sorted(p for p in near if 1 <= p < length)

    def measured(
        self, attempt: Callable[[Adapter], tuple[float, Example]], used: Adapter
    ) -> tuple[float, Example]:
        """``attempt`` with a layer that was called before, and where it fails with a fresh one.

        Building a layer may cost more than calling it; `repeatable` finds what a call leaves behind.
        """
        with suppress(Exception):
            if (first := attempt(used))[0] <= self.tolerance:
                return first
        return attempt(self.build())

    def partitions(self, length: int) -> list[list[int]]:
        """Seeded ways to split ``length`` tokens into pieces of any sizes, cut at every token in all."""
        draw, ways = random.Random(f"{self.seed} {length}"), []
        left = draw.sample(range(1, length), max(0, length - 1))
        while left:
            count = draw.randint(1, 24)
            cuts, left = [0, *sorted(left[:count]), length], left[count:]
            ways.append([end - start for start, end in pairwise(cuts)])
        return ways

    def smallest(self, attempt: Callable[[int], Outcome], lengths: Sequence[int] = LENGTHS) -> Outcome:
        """Return the outcome at the full length; on failure, at the smallest length that fails too."""
        outcome = attempt(self.length)
        if outcome.example is None:
            return outcome
        for length in lengths:
            if length >= self.length:
                break
            try:
                smaller = attempt(length)
            except Exception:  # too short for the layer: `short_inputs` reports that
                continue
            if smaller.example is not None:
                return smaller
        return outcome


def one_line(error: Exception) -> str:
    """Return the exception's type and message in one line of at most 160 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def worst(pairs: Iterable[tuple[float, Example]], tolerance: float, note: str = "") -> Outcome:
    """Return the outcome of several differences: the largest, and the first beyond the tolerance."""
    largest, example = 0.0, None
    for value, candidate in pairs:
        value = math.inf if math.isnan(value) else value
        largest = max(largest, value)
        if value > tolerance and example is None:
            example = candidate
    return Outcome(largest, tolerance, example, note)


def compare(
    a: Tensor, b: Tensor, tolerance: float, note: str = "", source: int | None = None
) -> tuple[float, Example]:
    """Return the largest difference of outputs [B, T, E], and the first token beyond the tolerance."""
    gap = difference(a, b)
    over = (gap > tolerance).nonzero().flatten()
    if not len(gap):
        return 0.0, Example(a.shape[1], 0.0, None, source, note)
    size = float(gap.max())
    token = int(over[0]) if len(over) else int(gap.argmax())
    return size, Example(a.shape[1], size, token, source, note)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield all tensors that a state holds: in containers, dataclasses and objects."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type | str | int | float | bool | nn.Module | torch.dtype):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in list(value.values()):
            yield from tensors_in(inner, seen)
    elif isinstance(value, tuple | list | set):
        for inner in value:
            yield from tensors_in(inner, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), seen)


def bytes_kept(value: Any) -> int:
    """Bytes that a state keeps alive: a view counts as the whole storage behind it."""
    gc.collect(0)
    storages = [t.untyped_storage() for t in tensors_in(value)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
