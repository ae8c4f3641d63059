"""The minimum work of a pass: floating-point operations and bytes per token and head.

Counted are the matrix products of the parallel form. With P = D F for a layer of D to F and chunks of b
tokens, each weight-sized product costs 2 P a token, each chunk-sized one 2 b D or 2 b F:

forward, a layer:
    z = X W                                              2 P
    reads: x W and x S                                   4 P
    reads: x X^T, then (C * that) d                      2 b D + 2 b F
    state: (c X)^T d and (n X)^T d                       4 P
    below the top layer, the error: d W^T                2 P
backward, a layer, states of the chunks found again from a few kept ones:
    z and the state's two products, again                6 P
    z and x X^T, again, in the chunk itself              2 P + 2 b D
    reads: dz W^T, dz S^T, and x^T dz for W and S        8 P
    reads: dz d^T, P^T dz, and (dP * C) with x and X     4 b F + 4 b D   (2 b F each, 2 b D each)
    state: X dW', X dS', d dW'^T, d dS'^T                8 P
    keys: dz W^T and X^T dz                              4 P
    below the top layer: d W^T twice again, and dE W, dE^T d of the second order   8 P

The coefficients (C = A N, 2 b^2) and all that is elementwise are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titans_kernels.bench.shapes import Shape

PHASES = ("forward", "backward")
GATES = 3
GATE_BYTES = 4


def flops(pairs: Sequence[tuple[int, int]], chunk_size: int) -> dict[str, int]:
    """FLOPs of each pass per token and head, for layers of these input and output widths.

    `again` is the part of the backward that is recomputation.
    """
    total = {"forward": 0, "backward": 0, "again": 0}
    b = chunk_size
    for l, (D, F) in enumerate(pairs):
        P, hidden = D * F, l > 0
        total["forward"] += (10 + 2 * hidden) * P + 2 * b * (D + F)
        total["backward"] += (28 + 8 * hidden) * P + b * (6 * D + 4 * F)
        total["again"] += (8 + 4 * hidden) * P + 2 * b * D
    return total


def traffic(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of each pass per token and head: every input read once, every output written once.

    Chunk-start states that a form may write for its backward are its own choice, and not counted.
    """
    token = shape.head_dim * dtype.itemsize
    gates = GATES * GATE_BYTES
    # weights are read, weights and momentum written (or the gradient of the weights)
    weights = sum(D * F for D, F in shape.pairs) * 4 / shape.length
    return {
        "forward": 4 * token + gates + 3 * weights,  # q, k, v; y
        "backward": 7 * token + 2 * gates + 2 * weights,  # q, k, v, dy; dq, dk, dv
    }
