"""Correct layers, and the register of layers with one known fault that are made from them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.audit import Adapter

D = 8
CHUNK = 8
VOCAB = 12


class State(NamedTuple):
    """Of `Delta`: the matrix, the last inputs of the convolution, the matrix at the chunk's start, tokens."""

    S: Tensor
    tail: Tensor
    start: Tensor
    seen: int


class Delta(nn.Module):
    """A delta rule: S_t = alpha_t S_{t-1} + theta_t (v_t - S k_t) k_t^T, y_t = W S_t q_t."""

    chunk = 1
    """The error is taken at the S of the start of the chunk, as in Titans."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates, self.out = nn.Linear(D, 3 * D), nn.Linear(D, 2), nn.Linear(D, D)
        self.kernel = nn.Parameter(torch.randn(3, D) / 2)
        self.S0 = nn.Parameter(torch.randn(D, D) / 4)

    def start(self, batch: int) -> State:
        S = self.S0.expand(batch, D, D)
        return State(S, self.S0.new_zeros(batch, 2, D), S, 0)

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def convolve(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([tail, x], 1)
        y = sum(seen[:, i : i + x.shape[1]] * self.kernel[i] for i in range(3))
        return y + x, seen[:, -2:].clone()

    def gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        alpha, theta = torch.sigmoid(self.gates(x) + 1).unbind(-1)
        # equal tokens of a chunk write together at most one full step; with more a repeated token diverges
        return alpha[..., None, None], theta[..., None, None] / self.chunk

    def write(self, S: Tensor, start: Tensor, k: Tensor, v: Tensor, alpha: Tensor, theta: Tensor) -> Tensor:
        error = v - torch.einsum("bij,bj->bi", start, k)
        return alpha * S + theta * torch.einsum("bi,bj->bij", error, k)

    def read(self, states: list[Tensor], q: Tensor) -> Tensor:
        return torch.einsum("btij,btj->bti", torch.stack(states, 1), q)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        S, tail, start, seen = state or self.start(x.shape[0])
        x, tail = self.convolve(self.prepare(x), tail)
        q, k, v = self.qkv(x).chunk(3, -1)
        k = F.normalize(k, dim=-1)
        alpha, theta = self.gate(x)
        states = []
        for t in range(x.shape[1]):
            start = S if seen % self.chunk == 0 else start
            S = self.write(S, start, k[:, t], v[:, t], alpha[:, t], theta[:, t])
            states.append(S)
            seen += 1
        return self.finish(self.out(self.read(states, q))), State(S, tail, start, seen % self.chunk)

    def finish(self, y: Tensor) -> Tensor:
        return y

    def packed(self, x: Tensor, borders: Tensor) -> Tensor:
        sizes = borders.diff().tolist()
        return torch.cat([self(document)[0] for document in x.split(sizes, 1)], 1)

    def slow(self, x: Tensor) -> Tensor:
        return Delta.forward(self, x)[0]


class Chunked(Delta):
    """The same with errors at the start of each chunk."""

    chunk = CHUNK


class Attention(nn.Module):
    """Causal attention with a penalty for distance, and a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def mask(self, distance: Tensor, scores: Tensor) -> Tensor:
        return (scores - 0.3 * distance).masked_fill(distance < 0, -torch.inf)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(x).chunk(3, -1)
        if state is not None:
            k, v = torch.cat([state[0], k], 1), torch.cat([state[1], v], 1)
        T, n = x.shape[1], k.shape[1]
        distance = torch.arange(n - T, n)[:, None] - torch.arange(n)
        weights = self.mask(distance, q @ k.mT * D**-0.5).softmax(-1)
        return self.out(weights @ v), (k, v)


class Blocks(nn.Module):
    """A causal convolution and a feed-forward layer with dropout and a norm; no state is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, D) / 2)
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.dropout = nn.Dropout(0.1)

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 3, 0))

    def normalize(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def drop(self, x: Tensor) -> Tensor:
        return self.dropout(x)

    def forward(self, x: Tensor) -> Tensor:
        padded = self.pad(self.prepare(x))
        mixed = x + sum(padded[:, i : i + x.shape[1]] * self.kernel[i] for i in range(4))
        return mixed + self.down(self.drop(torch.tanh(self.up(self.normalize(mixed)))))


class Tokens(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(VOCAB, D), Blocks(), nn.Linear(D, VOCAB)

    def inputs(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.inputs(tokens)))


def plain(layer: nn.Module) -> Any:
    return layer


def delta(layer: Any) -> Adapter:
    return Adapter(
        layer, lambda x: layer(x)[0], width=D, step=layer, packed=layer.packed,
        reference=layer.slow if layer.chunk == 1 else None, state_grows="constant", time_grows="linear",
    )  # fmt: skip


def attention(layer: Any) -> Adapter:
    return Adapter(layer, lambda x: layer(x)[0], width=D, step=layer)


class Fault(NamedTuple):
    """A layer with a fault, and the check that must find it."""

    layer: type[nn.Module]
    check: str
    adapt: Callable[[Any], Any]


FAULTS: dict[str, Fault] = {}
TWINS: dict[str, tuple[type[nn.Module], Callable[[Any], Any]]] = {
    "delta": (Delta, delta), "chunked": (Chunked, delta), "attention": (Attention, attention),
    "blocks": (Blocks, plain), "tokens": (Tokens, plain),
}  # fmt: skip


def register(check: str, twin: type[nn.Module], layer: type[nn.Module]) -> type[nn.Module]:
    FAULTS[layer.__name__] = Fault(
        layer, check, next(adapt for base, adapt in TWINS.values() if base is twin)
    )
    return layer


def plant(check: str, twin: type[nn.Module], name: str, **methods: Any) -> type[nn.Module]:
    """Register a correct layer with other methods as the fault ``name``, which ``check`` must find."""
    return register(check, twin, type(name, (twin,), methods))


def fault(check: str, twin: type[nn.Module], method: str = "") -> Callable[[Any], Any]:
    """Register a function in place of a method of ``twin``, or a subclass of ``twin``, as a fault."""
    return lambda made: (
        plant(check, twin, made.__name__, **{method: made}) if method else register(check, twin, made)
    )
