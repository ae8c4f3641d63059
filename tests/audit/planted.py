"""Layers with one known fault each, the check that must find it, and the correct layer behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Fault:
    """A layer with a fault, and the check that must find it."""

    layer: type[nn.Module]
    check: str
    adapt: Callable[[Any], Any]
    twin: type[nn.Module]


FAULTS: dict[str, Fault] = {}
TWINS: dict[str, tuple[type[nn.Module], Callable[[Any], Any]]] = {
    "delta": (Delta, delta),
    "chunked": (Chunked, delta),
    "attention": (Attention, attention),
    "blocks": (Blocks, plain),
    "tokens": (Tokens, plain),
}


def fault(check: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a layer as the fault that ``check`` must find; its base class is its correct twin."""

    def register(layer: type[nn.Module]) -> type[nn.Module]:
        twin = layer.__mro__[1]
        adapt = next(adapt for base, adapt in TWINS.values() if base is twin)
        FAULTS[layer.__name__] = Fault(layer, check, adapt, twin)
        return layer

    return register


# leaks from the future


@fault("causal_gradient")
class ConvolutionOneAhead(Blocks):
    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 2, 1))


@fault("causal_gradient")
class CentredConvolution(Blocks):
    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, 2))


@fault("causal_gradient")
class ReadsAtChunkEnd(Chunked):
    """Every token of a chunk reads the weights after the whole chunk."""

    def read(self, states: list[Tensor], q: Tensor) -> Tensor:
        last = [min(t - t % CHUNK + CHUNK, len(states)) - 1 for t in range(len(states))]
        return super().read([states[t] for t in last], q)


@fault("causal_gradient")
class LastOfChunkSeesNext(Delta):
    """Only the last token of each chunk of 16 sees the first of the next."""

    def prepare(self, x: Tensor) -> Tensor:
        x = x.clone()
        ends = torch.arange(15, x.shape[1] - 1, 16)
        x[:, ends] = x[:, ends] + 0.1 * x[:, ends + 1]
        return x


@fault("causal_gradient")
class NormOverTime(Blocks):
    def normalize(self, x: Tensor) -> Tensor:
        return self.norm((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True, correction=0) + 1e-5))


@fault("causal_perturbation")
class ScaledByMaximumOverTime(Blocks):
    """As an int8 quantiser with one scale for the sequence does; the scale is detached."""

    def normalize(self, x: Tensor) -> Tensor:
        return self.norm(x) + 0.1 * x / x.detach().abs().amax((1, 2), keepdim=True)


@fault("causal_perturbation")
class TopTokens(Blocks):
    """Routes the half of the tokens with the largest norm: which ones depends on later tokens."""

    def normalize(self, x: Tensor) -> Tensor:
        norm = x.square().sum(-1)
        threshold = norm.median(1, keepdim=True).values
        return self.norm(x) * (norm >= threshold)[..., None]


@fault("causal_gradient")
class ReversedSum(Blocks):
    def prepare(self, x: Tensor) -> Tensor:
        return x.flip(1).cumsum(1).flip(1) / 16


@fault("causal_gradient")
class GatesOfNextToken(Delta):
    def gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().gate(torch.cat([x[:, 1:], x[:, -1:]], 1))


@fault("causal_gradient")
class MaskOffByOne(Attention):
    def mask(self, distance: Tensor, scores: Tensor) -> Tensor:
        return (scores - 0.3 * distance.abs()).masked_fill(distance < -1, -torch.inf)


@fault("causal_gradient")
class SoftMask(Attention):
    """A mask of a finite penalty, which large scores pass."""

    def mask(self, distance: Tensor, scores: Tensor) -> Tensor:
        return scores - 0.3 * distance.abs() - 6.0 * (distance < 0)


@fault("impossible_retrieval")
class ShiftedLabels(Tokens):
    """Embeds the labels, which were shifted once too often, with the inputs."""

    def inputs(self, tokens: Tensor) -> Tensor:
        labels = torch.cat([tokens[:, 1:], tokens[:, -1:]], 1)
        return self.embedding(tokens) + 0.5 * self.embedding((labels + 1) % VOCAB)


@fault("causal_perturbation")
class SortedTokens(Tokens):
    """Adds each token's rank among all tokens of the row."""

    def inputs(self, tokens: Tensor) -> Tensor:
        rank = tokens.argsort(dim=1, stable=True).argsort(dim=1)
        return self.embedding(tokens) + 0.05 * rank[..., None]


# leaks from other rows, other calls, the size of the batch


@fault("rows")
class BatchStatistic(Blocks):
    """Batch norm: in training, of all rows and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(D)

    def normalize(self, x: Tensor) -> Tensor:
        return self.batch_norm(x.mT).mT


@fault("rows")
class GatesOfMeanRow(Delta):
    def gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().gate(x.mean(0, keepdim=True).expand_as(x))


@fault("rows")
class FlattenedWrongly(Blocks):
    """[B, T, D] seen as [T, B, D] while mixing: the last tokens of a row reach the next."""

    def pad(self, x: Tensor) -> Tensor:
        flat = F.pad(x.reshape(-1, D), (0, 0, 3, 0))
        return torch.stack([flat[i * x.shape[1] : (i + 1) * x.shape[1] + 3] for i in range(len(x))])


@fault("repeatable")
class KeptBetweenCalls(Delta):
    """The last state of a call is the first of the next."""

    kept: Tensor | None = None

    def start(self, batch: int) -> State:
        state = super().start(batch)
        return state if self.kept is None else state._replace(S=self.kept[:1].expand(batch, D, D))

    def read(self, states: list[Tensor], q: Tensor) -> Tensor:
        self.kept = states[-1].detach()
        return super().read(states, q)


@fault("repeatable")
class RunningScale(Blocks):
    """A running scale that is also updated in evaluation."""

    def normalize(self, x: Tensor) -> Tensor:
        seen = x.detach().abs().mean()
        self.scale = seen if not hasattr(self, "scale") else 0.9 * self.scale + 0.1 * seen
        return self.norm(x) / self.scale


@fault("repeatable")
class DropoutInEvaluation(Blocks):
    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1)


@fault("repeatable")
class ChangesItsInput(Blocks):
    def prepare(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            x *= 0.5
        return x


@fault("batch_size")
class DividedByBatch(Blocks):
    def normalize(self, x: Tensor) -> Tensor:
        return self.norm(x) / len(x)


@fault("batch_size")
class SingleRowPath(Delta):
    """A path for one row, as of decoding, that leaves the convolution's residual out."""

    def convolve(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        y, tail = super().convolve(x, tail)
        return (y - x if len(x) == 1 else y), tail


@fault("modes")
class TrainsAnotherForm(Chunked):
    """The form of training forgets to decay."""

    def gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        alpha, theta = super().gate(x)
        return (torch.ones_like(alpha) if self.training else alpha), theta


# training


@fault("finite_differences")
class DetachedWrite(Delta):
    """The error of the inner loop is a constant to the outer loop."""

    def write(self, S: Tensor, start: Tensor, k: Tensor, v: Tensor, alpha: Tensor, theta: Tensor) -> Tensor:
        error = (v - torch.einsum("bij,bj->bi", start, k)).detach()
        return alpha * S + theta * torch.einsum("bi,bj->bij", error, k)


@fault("finite_differences")
class HalfDetachedWrite(Chunked):
    """The gradient is taken at detached weights, which only misses how one chunk reaches the next."""

    def write(self, S: Tensor, start: Tensor, k: Tensor, v: Tensor, alpha: Tensor, theta: Tensor) -> Tensor:
        return super().write(S, start.detach(), k, v, alpha, theta)


class _Scale(torch.autograd.Function):
    """y = g x, whose backward pass forgets the derivative of g."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(g)
        return g * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad * ctx.saved_tensors[0]


@fault("parameters")
class MissingDerivative(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.randn(D))

    def normalize(self, x: Tensor) -> Tensor:
        return _Scale.apply(self.g, self.norm(x))


class _Silu(torch.autograd.Function):
    """x sigmoid(x), with the derivative of the sigmoid's part left out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].sigmoid()


@fault("finite_differences")
class WrongDerivative(Blocks):
    def drop(self, x: Tensor) -> Tensor:
        return super().drop(_Silu.apply(x))


@fault("parameters")
class UnusedParameter(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Linear(D, D)


@fault("parameters")
class InitialStateNotTrained(Delta):
    def start(self, batch: int) -> State:
        S = self.S0.data.expand(batch, D, D)
        return super().start(batch)._replace(S=S, start=S)


@fault("reference")
class FastFormDropsATerm(Delta):
    """The parallel form leaves out that the error depends on what was written."""

    def write(self, S: Tensor, start: Tensor, k: Tensor, v: Tensor, alpha: Tensor, theta: Tensor) -> Tensor:
        return alpha * S + theta * torch.einsum("bi,bj->bij", v, k)

    def slow(self, x: Tensor) -> Tensor:
        slow = Delta()
        slow.write = lambda *args: Delta.write(self, *args)  # type: ignore[method-assign]
        return torch.func.functional_call(slow, dict(self.named_parameters()), (x,))[0]


# pieces, decoding, documents


@fault("pieces")
class DroppedRemainder(Chunked):
    """Tokens after the last whole chunk are read but not in the state that is returned."""

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, after = super().forward(x, state)
        whole = x.shape[1] - x.shape[1] % CHUNK
        kept = super().forward(x[:, :whole], state)[1] if whole else state or self.start(len(x))
        return y, after._replace(S=kept.S, start=kept.start)


@fault("pieces")
class ChunksFromEachCall(Chunked):
    """A chunk begins with every call, wherever the last one ended."""

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, state = super().forward(x, state)
        return y, state._replace(seen=0)


@fault("pieces")
class HalfPrecisionState(Delta):
    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        if state is not None:
            state = state._replace(S=state.S.to(x.dtype))
        y, state = super().forward(x, state)
        return y, state._replace(S=state.S.bfloat16())


@fault("pieces")
class CacheOffByOne(Delta):
    """The convolution's cache ends one token early."""

    def convolve(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = super().convolve(x, tail)
        return y, torch.cat([tail, x], 1)[:, -3:-1].clone()


@fault("decoding")
class DecodesWithoutGate(Delta):
    """The path of a single token reads before it writes."""

    def read(self, states: list[Tensor], q: Tensor) -> Tensor:
        if len(states) > 1:
            return super().read(states, q)
        return super().read([0.9 * states[0]], q)


@fault("state_kept")
class StateInPlace(Delta):
    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, after = super().forward(x, state)
        if state is None:
            return y, after._replace(S=after.S.clone())
        state.S.copy_(after.S)
        return y, after._replace(S=state.S)


@fault("packed")
class ResetMissing(Delta):
    def packed(self, x: Tensor, borders: Tensor) -> Tensor:
        return self(x)[0]


@fault("packed")
class ConvolutionNotReset(Delta):
    """Documents share the convolution's window."""

    def packed(self, x: Tensor, borders: Tensor) -> Tensor:
        outputs, tail = [], None
        for document in x.split(borders.diff().tolist(), 1):
            state = self.start(len(x))
            y, after = self(document, state if tail is None else state._replace(tail=tail))
            outputs, tail = [*outputs, y], after.tail
        return torch.cat(outputs, 1)


# lengths


@fault("short_inputs")
class ShortInputsNotWritten(Chunked):
    """Fewer tokens than a chunk are not written."""

    def write(self, S: Tensor, start: Tensor, k: Tensor, v: Tensor, alpha: Tensor, theta: Tensor) -> Tensor:
        return S if self.short else super().write(S, start, k, v, alpha, theta)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        self.short = state is None and x.shape[1] < CHUNK
        return super().forward(x, state)


@fault("short_inputs")
class DividedByLength(Blocks):
    def normalize(self, x: Tensor) -> Tensor:
        return self.norm(x) / x.shape[1] ** 0.5


@fault("short_inputs")
class PositionFromTheEnd(Attention):
    def mask(self, distance: Tensor, scores: Tensor) -> Tensor:
        position = torch.arange(scores.shape[-1], 0, -1) / 8
        return super().mask(distance, scores * position)


@fault("short_inputs")
class FailsOnOneToken(Blocks):
    def normalize(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            raise IndexError("index out of range")
        return self.norm(x)


@fault("long_inputs")
class DividesByDecay(Blocks):
    """The parallel form of a decaying sum that divides by the decay's product, which underflows."""

    def prepare(self, x: Tensor) -> Tensor:
        decay = 0.8 ** torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return (x / decay).cumsum(1) * decay


@fault("long_inputs")
class Grows(Delta):
    """No forgetting, and a step so large that repeated keys diverge."""

    def gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        alpha, theta = super().gate(x)
        return torch.ones_like(alpha), 2.05 + 0.05 * theta


@fault("state_growth")
class StateGrows(Delta):
    """Keeps every input in the convolution's cache."""

    def convolve(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = super().convolve(x, tail[:, -2:])
        return y, torch.cat([tail, x], 1)


@fault("state_growth")
class StateIsAView(Delta):
    """The cache is a view of the whole input, which it keeps alive."""

    def convolve(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        return super().convolve(x, tail)[0], torch.cat([tail, x], 1)[:, -2:]


@fault("time_growth")
class QuadraticTime(Delta):
    """Computes each output's window again from the start."""

    def prepare(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.stack([x[:, : t + 1].clone()[:, -1] for t in range(x.shape[1])], 1)


@fault("float32")
class BfloatInside(Blocks):
    def normalize(self, x: Tensor) -> Tensor:
        return self.norm(x.bfloat16().to(x.dtype))


@fault("float32")
class CancelledVariance(Blocks):
    """The variance as E[x^2] - E[x]^2 of values with a large mean."""

    def normalize(self, x: Tensor) -> Tensor:
        x = x + 300
        variance = x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()
        return (x - x.mean(-1, keepdim=True)) / (
            variance.abs() + 1e-5
        ).sqrt() * self.norm.weight + self.norm.bias


@fault("bfloat16")
class CountsInBfloat(Blocks):
    """A position counted by adding ones, which bfloat16 cannot beyond 256."""

    def prepare(self, x: Tensor) -> Tensor:
        steps = 8 * torch.ones_like(x)
        position = torch.stack(_running(steps), 1)
        return x + (position * 0.1).sin() * 8


def _running(steps: Tensor) -> list[Tensor]:
    totals = [steps[:, 0]]
    for t in range(1, steps.shape[1]):
        totals.append(totals[-1] + steps[:, t] * 1.01)
    return totals
