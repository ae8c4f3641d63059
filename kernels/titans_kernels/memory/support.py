"""The form that a memory takes on a GPU, found without the GPU: for checks before a run, and for tables."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from titans_kernels.memory.forms.triton.shapes import padded, path
from titans_kernels.memory.op import choose, triton_refusal
from titans_kernels.memory.options import Inputs, Options
from titans_kernels.memory.residual import Residual
from titans_kernels.memory.rules import find_rule


class Fields(Protocol):
    """The fields of `titans_core.config.MemoryConfig` on which the form depends."""

    @property
    def depth(self) -> int: ...
    @property
    def expansion(self) -> int: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def residual(self) -> str: ...
    @property
    def decay(self) -> bool: ...
    @property
    def channel_gates(self) -> str: ...
    @property
    def surprise_bound(self) -> float | None: ...
    @property
    def write_budget(self) -> float | None: ...
    @property
    def backend(self) -> str: ...
    @property
    def rule(self) -> str: ...


class Support(NamedTuple):
    """The form that computes a memory on a GPU."""

    form: str
    """A name of `op.FORMS`."""
    kernels: str
    """Triton kernels of the writes: columns, resident, streamed, stepped or delta; empty without kernels."""
    reason: str
    """Why there are none: one sentence that begins with the field to change; empty with kernels, and if the
    backend was requested by name."""


def supports(memory: Fields, head_dim: int, dtype: torch.dtype, arch: int) -> Support:
    """Return the form that computes a memory on a GPU, and why no kernel does; nothing is launched.

    Args:
        memory: a `MemoryConfig`.
        head_dim: width of a head, d_model / heads.
        dtype: of the operands of matrix products: torch.bfloat16 with ``optim.precision: bf16``.
        arch: architecture of the GPU: 80 for an A100, 90 for an H100, 100 for a B200.

    Raises:
        ValueError: the rule or the backend is unknown, or the backend does not support the memory.
    """
    hidden = [memory.expansion * head_dim] * (memory.depth - 1)
    widths = (head_dim, *hidden, head_dim)
    # shapes alone: one row of one token
    q, gate = torch.empty(1, 1, 1, head_dim, dtype=dtype, device="meta"), torch.empty(1, 1, 1, device="meta")
    weights = tuple(torch.empty(1, 1, *pair, device="meta") for pair in pairwise(widths))
    norm = [torch.empty(1, head_dim, device="meta")] * 2 if memory.residual == "norm" else []
    alpha = q if memory.decay and memory.channel_gates != "none" else gate
    eta = theta = q if memory.channel_gates == "all" else gate
    inputs = Inputs.of(q, q, q, alpha, eta, theta)
    options = Options(
        memory.chunk_size, memory.activation, memory.surprise_bound, None, find_rule(memory.rule),
        None if memory.residual == "none" else Residual(*norm), operands=dtype, arch=arch,
    )  # fmt: skip
    form = choose(memory.backend, inputs, weights, options).name
    if form == "triton":
        sizes = [padded(w) for w in widths], memory.chunk_size, memory.surprise_bound
        kernels = path(*sizes, arch, dtype == torch.float32)
        return Support(form, kernels, "")
    if form == "online":
        return Support(form, "delta", "")
    if memory.backend != "auto":
        return Support(form, "", "")
    return Support(form, "", triton_refusal(inputs, weights, options) or "")
