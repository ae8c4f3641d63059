"""Timed subjects: the forms of our operator here, other libraries' in `peers`; each a line of a registry."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch

from titans_kernels.bench.check import Judge, Verdict, interpreting
from titans_kernels.bench.inputs import BenchInputs
from titans_kernels.bench.timing import Op, Within
from titans_kernels.memory.forms import chunked
from titans_kernels.memory.forms.triton.refusal import refusal
from titans_kernels.memory.options import Options


@dataclass(frozen=True)
class TimedForm:
    """A way to run a memory."""

    name: str
    note: str
    build: Callable[[BenchInputs], Op]
    refuse: Callable[[BenchInputs], str | None] = lambda inputs: None
    """Why it cannot take these inputs."""
    verify: Callable[[list[Judge]], list[Verdict]] = lambda judges: []
    required: bool = False
    """True if its failure fails the benchmark."""
    ours: bool = False
    untimed: Callable[[], str | None] = lambda: None
    """Why it is checked only."""


def _ours(backend: str, within: Within, inputs: BenchInputs) -> Op:
    return Op(lambda: inputs.call(backend)[0], inputs.leaves, within)


def _verify(backend: str, within: Within, judges: list[Judge]) -> list[Verdict]:
    with within():
        return [judge.verdict(lambda inputs: inputs.call(backend)) for judge in judges]


def _form(name: str, note: str, backend: str, within: Within = nullcontext, **more) -> TimedForm:
    build, verify = partial(_ours, backend, within), partial(_verify, backend, within)
    return TimedForm(name, note, build, verify=verify, ours=True, **more)


def _no_kernel(inputs: BenchInputs) -> str | None:
    """Return the reason, as the operator would log it, for which no Triton kernel takes these inputs."""
    return refusal(inputs.tokens[0], inputs.weights, Options(inputs.shape.chunk_size, "silu", None, None))


def _one_token(inputs: BenchInputs) -> str | None:
    """Return the reason for which a form for chunks is not for these inputs, or None."""
    return "chunks of one token: online" if inputs.shape.chunk_size == 1 else None


COMPILED = (
    "coefficients", "coefficients_backward", "keys_pass", "advance", "read_pass", "read_backward",
    "step_backward", "held", "curves", "leaving",
)  # fmt: skip
"""The parts of the parallel form that torch.compile supports; it does not support the plan of blocks."""


@cache
def _compiled() -> dict[str, Callable[..., object]]:
    return {name: torch.compile(getattr(chunked, name)) for name in COMPILED}


@contextmanager
def compiled_passes() -> Iterator[None]:
    """Compile the passes of the parallel form within the context."""
    plain = {name: getattr(chunked, name) for name in COMPILED}
    try:
        _replace(_compiled())
        with warnings.catch_warnings():
            # of what the compiler sees and does not mind
            warnings.simplefilter("ignore")
            yield
    finally:
        _replace(plain)


def _replace(functions: dict[str, Callable[..., object]]) -> None:
    for name, function in functions.items():
        setattr(chunked, name, function)


def registered(*more: Sequence[TimedForm]) -> dict[str, TimedForm]:
    """Subjects by name; the first that is timed is what the others' ratios are to."""
    return {subject.name: subject for group in (OURS, *more) for subject in group}


OURS = (
    _form("triton", "our kernels", "triton", refuse=_no_kernel, required=True,
          untimed=lambda: "Triton's interpreter is not timed" if interpreting() else None),
    _form("chunked", "our parallel form in PyTorch, float32 inside", "chunked", required=True,
          refuse=_one_token),
    _form("chunked-compiled", "the same, its passes through torch.compile", "chunked", compiled_passes,
          refuse=_one_token),
    _form("online", "our triangular systems, states by a kernel on a GPU", "online", required=True,
          refuse=lambda inputs: None if inputs.shape.chunk_size == 1 else "chunks of several tokens"),
)  # fmt: skip
