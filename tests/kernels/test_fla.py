"""The recurrences of the baselines against flash-linear-attention's plain ones, which others wrote.

Outputs, last states and every gradient, in float32 as theirs are. Their q is scaled by one over the root of
the key width; ours is scaled by whoever calls.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from titans_kernels import linear_attention, neural_memory
from titans_kernels.linear_attention import scan

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="fla-core is not installed: pip install -e '.[dev]'"
)
B, T, H, E, V = 2, 37, 3, 8, 5


def theirs(module: str, name: str) -> Callable[..., Any]:
    with warnings.catch_warnings():
        # its import warns of what it does without: a GPU, FlashAttention; and torch of its torch.jit
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"fla.ops.{module}.naive"), name)


def leaves(*shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def agree(ours: Sequence[Tensor], other: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Outputs, and the gradients of a sum of them with fixed weights."""
    found = []
    for outputs in (ours, other):
        weights = [torch.linspace(-1, 1, y.numel()).view_as(y) for y in outputs]
        loss = torch.stack([(y * w).sum() for y, w in zip(outputs, weights, strict=True)]).sum()
        found.append([*outputs, *torch.autograd.grad(loss, given, retain_graph=True)])
    assert any(x.abs().max() > 0.1 for x in found[0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def heads_first(*xs: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in xs]


def test_a_decay_of_each_channel_is_gla():
    given = q, k, v, gate, state = leaves(
        (B, T, H, E), (B, T, H, E), (B, T, H, V), (B, T, H, E), (B, H, E, V)
    )
    log_decay = F.logsigmoid(gate) / 4
    ours = linear_attention(q * E**-0.5, k, v, log_decay, state)
    agree(ours, theirs("gla", "naive_recurrent_gla")(q, k, v, log_decay, state, True), given)


def test_a_decay_of_each_head_is_retention():
    given = q, k, v = leaves((B, T, H, E), (B, T, H, E), (B, T, H, V))
    log_decay = torch.log1p(-(2.0 ** (-5 - torch.arange(H))))[:, None].expand(B, T, H, 1)
    ours, _ = linear_attention(q * E**-0.5, k, v, log_decay, torch.zeros(B, H, E, V))
    other = theirs("retention", "naive_retention")(*heads_first(q, k, v))
    agree([ours], heads_first(other), given)


def test_the_scan_is_that_of_hgrn():
    given = x, gate, state = leaves((B, T, E), (B, T, E), (B, E))
    log_decay = F.logsigmoid(gate)
    ours = scan(log_decay.exp(), x, state)
    agree([ours], theirs("hgrn", "naive_recurrent_hgrn")(x, log_decay, state)[:1], given)


@pytest.mark.parametrize("backend", ["reference", "auto", "online"])
@pytest.mark.parametrize("gated", [False, True])
def test_the_linear_memory_in_chunks_of_one_is_the_delta_rule(gated, backend):
    given = q, k, v, write, keep, state = leaves(
        (B, T, H, E), (B, T, H, E), (B, T, H, V), (B, T, H), (B, T, H), (B, H, E, V)
    )
    if not gated:
        given = [x for x in given if x is not keep]
    zeros = torch.zeros(B, T, H)
    k, beta, log_decay = F.normalize(k, dim=-1), write.sigmoid(), F.logsigmoid(keep) if gated else zeros
    # a step of theta changes M by twice theta times the error
    y, after = neural_memory(
        q * E**-0.5, k, v, -torch.expm1(log_decay), zeros, beta / 2, (state,),
        chunk_size=1, rule="gated_delta" if gated else "paper", backend=backend,
    )  # fmt: skip
    if gated:
        name, inputs, also = "naive_recurrent_gated_delta_rule", (q, k, v, beta), {"g": log_decay}
        other, last = theirs("gated_delta_rule", name)(
            *inputs, **also, initial_state=state, output_final_state=True
        )
    else:
        o, last = theirs("delta_rule", "delta_rule_recurrence")(*heads_first(q, k, v, beta), state)
        (other,) = heads_first(o)
    agree([y, *after.weights], [other, last], given)
