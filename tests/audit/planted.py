"""Planted faults: training, pieces, decoding, documents and lengths; `leaks` has the others."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.audit.layers import CHUNK, Attention, Blocks, Chunked, D, Delta, State, fault

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
        mean = x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True) - mean.square()
        return (x - mean) / (variance.abs() + 1e-5).sqrt() * self.norm.weight + self.norm.bias


@fault("bfloat16")
class CountsInBfloat(Blocks):
    """A position counted by adding ones, which bfloat16 cannot beyond 256."""

    def prepare(self, x: Tensor) -> Tensor:
        totals = [8 * torch.ones_like(x[:, 0])]
        for _ in range(1, x.shape[1]):
            totals.append(totals[-1] + 8 * torch.ones_like(x[:, 0]) * 1.01)
        return x + (torch.stack(totals, 1) * 0.1).sin() * 8
