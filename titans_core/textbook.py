"""Titans (arXiv 2501.00663), to be read beside the paper: loops over one sequence [T, D], vectors are rows.

A number in parentheses is the paper's equation. M is the memory, an MLP given by its weights, S its momentum.
Token t has a query q_t, a key k_t and a value v_t; alpha_t is the part of M that it forgets, eta_t the part
of S that it keeps, theta_t the size of its step. The operator and the blocks lmm, mac, mag and mal are tested
against this file; `python -m tests.core.test_textbook` prints the largest difference.
"""
# fmt: off

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = list[Tensor]  # of each layer, [D_in, D_out], or [H, D_in, D_out] for H heads

def read(M: Weights, q: Tensor) -> Tensor:
    """Return M(q) [..., D], an MLP with SiLU between its layers."""
    for W in M[:-1]:
        q = F.silu(q @ W)
    return q @ M[-1]                                                                            # (15)

def loss(M: Weights, k: Tensor, v: Tensor) -> Tensor:
    """Return the squared error of the value that M recalls for a key."""
    return (read(M, k) - v).square().sum()                                                      # (12)

surprise = torch.func.grad(loss)                                                                # (8)

def memory(q, k, v, alpha, eta, theta, M: Weights, S: Weights, b: int):
    """Write each token into M, then read it: q, k, v [T, D] and alpha, eta, theta [T] to y [T, D], M and S.

    A chunk of b tokens takes its gradients at the weights M_t' that it starts from; b = 1 is (13, 14). Gates
    [T, D] have a number for each output of a layer (32, 33): for vectors that are rows, each column of W.
    """
    start, y = M, []
    for t in range(len(k)):
        start = M if t % b == 0 else start                                                      # (16)
        u = surprise(start, k[t], v[t])                                                         # (8, 12)
        S = [eta[t] * s - theta[t] * g for s, g in zip(S, u, strict=True)]                      # (10, 14)
        M = [(1 - alpha[t]) * W + s for W, s in zip(M, S, strict=True)]                         # (9, 13)
        y.append(read(M, q[t]))                                                                 # (15)
    return torch.stack(y), M, S

def chunk(q, k, v, alpha, eta, theta, M: Weights, S: Weights):
    """Equal `memory` on one chunk: all its gradients are taken at M, and the weights are linear in them."""
    u = torch.vmap(surprise, (None, 0, 0))(M, k, v)                                             # (18) u_t
    S = [recurrence(eta, s, -theta.view(len(k), 1, -1) * g) for s, g in zip(S, u, strict=True)] # (18)
    M = [recurrence(1 - alpha, W, s) for W, s in zip(M, S, strict=True)]                        # (16)
    return torch.vmap(read)(M, q), [W[-1] for W in M], [s[-1] for s in S]                       # (15)

def recurrence(g: Tensor, X: Tensor, U: Tensor) -> Tensor:
    """Return all X_t = g_t X_{t-1} + U_t [T, D, E]: beta_t X_0 plus the sum of (beta_t / beta_i) U_i."""
    t, g = range(len(g)), g.view(len(g), -1)
    B = torch.stack([torch.stack([g[j + 1 : i + 1].prod(0) * (j <= i) for j in t]) for i in t]) # (17) B
    return torch.einsum("te,de->tde", g.cumprod(0), X) + torch.einsum("tie,ide->tde", B, U)     # (16, 17)

class Parameters(SimpleNamespace):
    """Trained tensors by name, of a memory, an attention or a block; H heads of width E.

    Memory and attention: W_q, W_k, W_v [D, H E], conv_q, conv_k, conv_v [K, H E], W_o [H E, D], heads. Memory
    alone: M_0, W_gates [D, 3 H] or [D, 3 H E], c_gates [3 H] or [3 H E], norm [E], W_y [D, H E]. Attention
    alone: scale [H]. Block: memory, attention, persistent tokens P [N, D], norm, inner_norm, gate_norm [D].
    """

def rms(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [..., D] with a root mean square of 1, times a learned vector."""
    return F.rms_norm(x, x.shape[-1:], weight, eps=1e-6)

def project(p: Parameters, name: str, x: Tensor) -> Tensor:
    """Return q, k or v [T, H, E]: projection, SiLU, causal convolution, q and k of norm 1 (Section 4.4)."""
    y, conv = F.silu(x @ getattr(p, f"W_{name}")), getattr(p, f"conv_{name}")                   # (11)
    y = torch.stack([w * F.pad(y, (0, 0, j, 0))[: len(y)] for j, w in enumerate(conv)]).sum(0)
    y = y.unflatten(1, (p.heads, -1))
    return y if name == "v" else F.normalize(y, dim=-1)

def output(p: Parameters, y: Tensor, x: Tensor) -> Tensor:
    """Normalise reads y [T, H, E], gate them by a linear layer of x [T, D], project (Section 4.4)."""
    return (rms(y, p.norm).flatten(1) * F.silu(x @ p.W_y)) @ p.W_o

def write(p: Parameters, x: Tensor, now: slice, M: Weights, S: Weights, b: int):
    """Write the tokens ``now`` of x [T, D] and read them; each head is a memory of its own."""
    q, k, v = (project(p, name, x)[now] for name in "qkv")                                      # (11)
    gates = torch.sigmoid(x[now] @ p.W_gates + p.c_gates).chunk(3, 1)
    alpha, eta, theta = (gate.unflatten(1, (p.heads, -1)) for gate in gates)
    heads = torch.vmap(memory, (1, 1, 1, 1, 1, 1, 0, 0, None), (1, 0, 0))
    y, M, S = heads(q, k, v, alpha, eta, theta, M, S, b)
    return output(p, y, x[now]), M, S

def remember(p: Parameters, P: Tensor, x: Tensor, b: int) -> Tensor:
    """Return M([P] || x) at x; the persistent tokens P are written first, in chunks of their own."""
    x, n = torch.cat([P, x]), len(P)                                                            # (19, 26, 29)
    _, M, S = write(p, x, slice(n), p.M_0, [torch.zeros_like(W) for W in p.M_0], b)
    return write(p, x, slice(n, None), M, S, b)[0]

def rotate(x: Tensor, at: Tensor) -> Tensor:
    """Turn queries or keys [T, H, E] by the angles of their positions [T]."""
    half = x.shape[-1] // 2
    angle = at[:, None, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    z = torch.complex(*x.split(half, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)

def attend(p: Parameters, P: Tensor, x: Tensor, reach: Tensor, place: Tensor, *reads: Tensor) -> Tensor:
    """Attend to P, and in ``reads`` and x [T, D] to the token itself and the ``reach`` [T] tokens before it.

    ``place`` [T] is the position of a query relative to P.
    """
    n, at, streams = len(P), torch.arange(len(x)), [torch.cat([P, y]) for y in (*reads, x)]     # (22, 26)
    q = p.scale[:, None] * project(p, "q", streams[-1])[n:]
    k, v = ([project(p, name, y) for y in streams] for name in "kv")
    fixed = torch.einsum("ihe,jhe->hij", rotate(q, place), k[0][:n])                            # (20)
    near = torch.einsum("ihe,jhe->hij", rotate(q, at), torch.cat([rotate(y[n:], at) for y in k]))
    back = at[:, None] - at
    hidden = ((back < 0) | (back > reach[:, None])).repeat(1, len(streams))
    weights = torch.cat([fixed, near.masked_fill(hidden, -torch.inf)], -1) * q.shape[-1] ** 0.5
    y = torch.einsum("hij,jhe->ihe", weights.softmax(-1), torch.cat([v[0][:n], *(y[n:] for y in v)]))
    return y.flatten(1) @ p.W_o                                                                 # (23, 27, 31)

def gate(p: Parameters, y: Tensor, m: Tensor) -> Tensor:
    """Gate the memory's output m by y; which non-linearity, the paper leaves open."""
    return y + 2 * rms(y, p.gate_norm).sigmoid() * m                                            # (25, 28)

def lmm(p: Parameters, x: Tensor, b: int) -> Tensor:
    """Memory alone; like every part of a block, on normalised input and with a residual connection."""
    return x + remember(p.memory, p.P, rms(x, p.norm), b)

def mac(p: Parameters, x: Tensor, b: int, segment: int) -> Tensor:
    """Memory as context: attention sees one segment, and what the memory holds of those before it."""
    z, h, y, o = rms(x, p.norm), x[:0], x[:0], x[:0]
    place, M, S = torch.arange(len(x)) % segment, p.memory.M_0, [torch.zeros_like(W) for W in p.memory.M_0]
    for i in range(0, len(x), segment):
        now, past = slice(i, i + segment), slice(i + segment)
        h_t = torch.vmap(read, (0, 1), 1)(M, project(p.memory, "q", z)[now])                    # (21)
        h = torch.cat([h, output(p.memory, h_t, z[now])])
        y_t = x[now] + attend(p.attention, p.P, z[past], place[past], place[past], h)[now]      # (22, 23)
        y = torch.cat([y, y_t])
        m, M, S = write(p.memory, rms(y, p.inner_norm), now, M, S, b)                           # (24)
        o = torch.cat([o, gate(p, y_t, m)])                                                     # (25)
    return o

def mag(p: Parameters, x: Tensor, b: int, window: int) -> Tensor:
    """Memory as gate: attention over a sliding window, beside the memory."""
    z, zero = rms(x, p.norm), torch.zeros(len(x))
    y = x + attend(p.attention, p.P, z, zero + window - 1, zero)                                # (26, 27)
    return gate(p, y, remember(p.memory, p.P, z, b))                                            # (28)

def mal(p: Parameters, x: Tensor, b: int, window: int) -> Tensor:
    """Memory as layer: attention over a sliding window of the memory's outputs."""
    y, zero = x + remember(p.memory, p.P, rms(x, p.norm), b), torch.zeros(len(x))               # (29, 30)
    return y + attend(p.attention, x[:0], rms(y, p.inner_norm), zero + window - 1, zero)        # (31)
