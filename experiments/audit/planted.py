"""Layers with one known fault each, by the check that must find it.

A fault replaces methods of a correct layer of `layers`, which is its twin.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.audit.layers import (
    CHUNK,
    VOCAB,
    Attention,
    Blocks,
    Chunked,
    D,
    Delta,
    State,
    Tokens,
    fault,
    plant,
)

# leaks from the future

pad = lambda left, right: lambda _, x: F.pad(x, (0, 0, left, right))  # noqa: E731
ConvolutionOneAhead = plant("causal_gradient", Blocks, "convolution one ahead", pad=pad(2, 1))
plant("causal_gradient", Blocks, "centred convolution", pad=pad(1, 2))
plant("causal_gradient", Blocks, "reversed sum", prepare=lambda _, x: x.flip(1).cumsum(1).flip(1) / 16)
over_time = lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True, correction=0) + 1e-5)  # noqa: E731
plant("causal_gradient", Blocks, "norm over time", normalize=lambda self, x: self.norm(over_time(x)))
# as an int8 quantiser with one scale for the sequence does; the scale is detached
scaled = lambda self, x: self.norm(x) + 0.1 * x / x.detach().abs().amax((1, 2), keepdim=True)  # noqa: E731
plant("causal_perturbation", Blocks, "scaled by the maximum over time", normalize=scaled)
of_next = lambda self, x: Delta.gate(self, torch.cat([x[:, 1:], x[:, -1:]], 1))  # noqa: E731
plant("causal_gradient", Delta, "gates of the next token", gate=of_next)
off_by_one = lambda _, n, scores: (scores - 0.3 * n.abs()).masked_fill(n < -1, -torch.inf)  # noqa: E731
plant("causal_gradient", Attention, "mask off by one", mask=off_by_one)
# a mask of a finite penalty, which large scores pass
soft = lambda _, n, scores: scores - 0.3 * n.abs() - 6.0 * (n < 0)  # noqa: E731
plant("causal_gradient", Attention, "soft mask", mask=soft)


@fault("causal_gradient", Chunked, "read")
def every_token_of_a_chunk_reads_the_weights_after_it(self, states, q):
    last = [min(t - t % CHUNK + CHUNK, len(states)) - 1 for t in range(len(states))]
    return Chunked.read(self, [states[t] for t in last], q)


@fault("causal_gradient", Delta, "prepare")
def last_of_sixteen_tokens_sees_the_next(self, x):
    ends = torch.arange(15, x.shape[1] - 1, 16)
    return x.index_add(1, ends, 0.1 * x[:, ends + 1])


@fault("causal_perturbation", Blocks, "normalize")
def half_with_the_largest_norm(self, x):
    norm = x.square().sum(-1)
    return self.norm(x) * (norm >= norm.median(1, keepdim=True).values)[..., None]


@fault("impossible_retrieval", Tokens, "inputs")
def labels_shifted_once_too_often(self, tokens):
    labels = torch.cat([tokens[:, 1:], tokens[:, -1:]], 1)
    return self.embedding(tokens) + 0.5 * self.embedding((labels + 1) % VOCAB)


@fault("causal_perturbation", Tokens, "inputs")
def rank_among_all_tokens_of_the_row(self, tokens):
    rank = tokens.argsort(dim=1, stable=True).argsort(dim=1)
    return self.embedding(tokens) + 0.05 * rank[..., None]


# leaks from other rows, other calls, the size of the batch

mean_row = lambda self, x: Delta.gate(self, x.mean(0, keepdim=True).expand_as(x))  # noqa: E731
plant("rows", Delta, "gates of the mean row", gate=mean_row)
plant("repeatable", Blocks, "dropout in evaluation", drop=lambda _, x: F.dropout(x, 0.1))
plant("batch_size", Blocks, "divided by the batch", normalize=lambda self, x: self.norm(x) / len(x))


@fault("rows", Blocks)
class BatchNorm(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(D)

    def normalize(self, x: Tensor) -> Tensor:
        return self.batch_norm(x.mT).mT


@fault("rows", Blocks, "pad")
def last_tokens_of_a_row_reach_the_next(self, x):
    flat = F.pad(x.reshape(-1, D), (0, 0, 3, 0))
    return torch.stack([flat[i * x.shape[1] : (i + 1) * x.shape[1] + 3] for i in range(len(x))])


@fault("repeatable", Delta)
class LastStateOfACallIsTheFirstOfTheNext(Delta):
    kept: Tensor | None = None

    def start(self, batch: int) -> State:
        state = super().start(batch)
        return state if self.kept is None else state._replace(S=self.kept[:1].expand(batch, D, D))

    def read(self, states: list[Tensor], q: Tensor) -> Tensor:
        self.kept = states[-1].detach()
        return super().read(states, q)


@fault("repeatable", Blocks, "normalize")
def running_scale_updated_in_evaluation(self, x):
    seen = x.detach().abs().mean()
    self.scale = seen if not hasattr(self, "scale") else 0.9 * self.scale + 0.1 * seen
    return self.norm(x) / self.scale


@fault("repeatable", Blocks, "prepare")
def changes_its_input(self, x):
    if not torch.is_grad_enabled():
        x *= 0.5
    return x


@fault("batch_size", Delta, "convolve")
def path_of_one_row_leaves_the_residual_out(self, x, tail):
    y, tail = Delta.convolve(self, x, tail)
    return (y - x if len(x) == 1 else y), tail


@fault("modes", Chunked, "gate")
def form_of_training_does_not_decay(self, x):
    alpha, theta = Chunked.gate(self, x)
    return (torch.ones_like(alpha) if self.training else alpha), theta


# training


class _Scale(torch.autograd.Function):
    """y = g x, whose backward pass forgets the derivative of g."""

    @staticmethod
    def forward(ctx, g, x):
        ctx.save_for_backward(g)
        return g * x

    @staticmethod
    def backward(ctx, grad):
        return None, grad * ctx.saved_tensors[0]


class _Silu(torch.autograd.Function):
    """x sigmoid(x), with the derivative of the sigmoid's part left out."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].sigmoid()


plant("finite_differences", Blocks, "wrong derivative", drop=lambda self, x: self.dropout(_Silu.apply(x)))
# the gradient is taken at detached weights, which only misses how one chunk reaches the next
half = lambda self, S, start, *rest: Chunked.write(self, S, start.detach(), *rest)  # noqa: E731
plant("finite_differences", Chunked, "half-detached write", write=half)


@fault("finite_differences", Delta, "write")
def detached_write(self, S, start, k, v, alpha, theta):
    error = (v - torch.einsum("bij,bj->bi", start, k)).detach()
    return alpha * S + theta * torch.einsum("bi,bj->bij", error, k)


@fault("parameters", Blocks)
class UnusedParameter(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Linear(D, D)


@fault("parameters", Blocks)
class MissingDerivativeOfAParameter(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.randn(D))

    def normalize(self, x: Tensor) -> Tensor:
        return _Scale.apply(self.g, self.norm(x))


@fault("parameters", Delta, "start")
def initial_state_is_not_trained(self, batch):
    S = self.S0.data.expand(batch, D, D)
    return Delta.start(self, batch)._replace(S=S, start=S)


@fault("reference", Delta)
class FastFormLeavesOutWhatWasWritten(Delta):
    def write(self, S: Tensor, start: Tensor, k: Tensor, v: Tensor, alpha: Tensor, theta: Tensor) -> Tensor:
        return alpha * S + theta * torch.einsum("bi,bj->bij", v, k)

    def slow(self, x: Tensor) -> Tensor:
        slow = Delta()
        slow.write = lambda *args: Delta.write(self, *args)  # type: ignore[method-assign]
        return torch.func.functional_call(slow, dict(self.named_parameters()), (x,))[0]


# pieces, decoding, documents


@fault("pieces", Chunked, "forward")
def tokens_after_the_last_whole_chunk_are_not_in_the_state(self, x, state=None):
    y, after = Chunked.forward(self, x, state)
    whole = x.shape[1] - x.shape[1] % CHUNK
    kept = Chunked.forward(self, x[:, :whole], state)[1] if whole else state or self.start(len(x))
    return y, after._replace(S=kept.S, start=kept.start)


@fault("pieces", Chunked, "forward")
def a_chunk_begins_with_every_call(self, x, state=None):
    y, state = Chunked.forward(self, x, state)
    return y, state._replace(seen=0)


@fault("pieces", Delta, "forward")
def state_in_half_precision(self, x, state=None):
    y, state = Delta.forward(self, x, state and state._replace(S=state.S.to(x.dtype)))
    return y, state._replace(S=state.S.bfloat16())


@fault("pieces", Delta, "convolve")
def cache_ends_one_token_early(self, x, tail):
    return Delta.convolve(self, x, tail)[0], torch.cat([tail, x], 1)[:, -3:-1].clone()


@fault("decoding", Delta, "read")
def single_token_reads_before_it_writes(self, states, q):
    return Delta.read(self, states if len(states) > 1 else [0.9 * states[0]], q)


@fault("state_kept", Delta, "forward")
def state_in_place(self, x, state=None):
    y, after = Delta.forward(self, x, state)
    if state is None:
        return y, after._replace(S=after.S.clone())
    return y, after._replace(S=state.S.copy_(after.S))


plant("packed", Delta, "no reset", packed=lambda self, x, borders: self(x)[0])


@fault("packed", Delta, "packed")
def documents_share_the_window_of_the_convolution(self, x, borders):
    outputs, tail = [], None
    for document in x.split(borders.diff().tolist(), 1):
        state = self.start(len(x))
        y, after = self(document, state if tail is None else state._replace(tail=tail))
        outputs, tail = [*outputs, y], after.tail
    return torch.cat(outputs, 1)


# lengths, growth, precision

plant("short_inputs", Blocks, "divided by length", normalize=lambda self, x: self.norm(x) / x.shape[1] ** 0.5)
from_end = lambda self, n, scores: Attention.mask(  # noqa: E731
    self, n, scores * torch.arange(scores.shape[-1], 0, -1) / 8
)
plant("short_inputs", Attention, "position from the end", mask=from_end)


@fault("short_inputs", Chunked)
class FewerTokensThanAChunkAreNotWritten(Chunked):
    def write(self, S: Tensor, *rest: Tensor) -> Tensor:
        return S if self.short else super().write(S, *rest)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        self.short = state is None and x.shape[1] < CHUNK
        return super().forward(x, state)


@fault("short_inputs", Blocks, "normalize")
def fails_on_one_token(self, x):
    if x.shape[1] == 1:
        raise IndexError("index out of range")
    return self.norm(x)


@fault("long_inputs", Blocks, "prepare")
def divides_by_a_decay_that_underflows(self, x):
    decay = 0.8 ** torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    return (x / decay).cumsum(1) * decay


@fault("long_inputs", Delta, "gate")
def steps_so_large_that_repeated_keys_diverge(self, x):
    alpha, theta = Delta.gate(self, x)
    return torch.ones_like(alpha), 2.05 + 0.05 * theta


@fault("state_growth", Delta, "convolve")
def cache_keeps_every_input(self, x, tail):
    return Delta.convolve(self, x, tail[:, -2:])[0], torch.cat([tail, x], 1)


@fault("state_growth", Delta, "convolve")
def cache_is_a_view_of_the_whole_input(self, x, tail):
    return Delta.convolve(self, x, tail)[0], torch.cat([tail, x], 1)[:, -2:]


@fault("time_growth", Delta, "prepare")
def each_window_from_the_start(self, x):
    return x + 0.1 * torch.stack([x[:, : t + 1].clone()[:, -1] for t in range(x.shape[1])], 1)


rounded = lambda self, x: self.norm(x.bfloat16().to(x.dtype))  # noqa: E731
plant("float32", Blocks, "bfloat16 inside", normalize=rounded)


@fault("float32", Blocks, "normalize")
def variance_by_cancellation(self, x):
    x = x + 300
    mean = x.mean(-1, keepdim=True)
    variance = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) / (variance.abs() + 1e-5).sqrt() * self.norm.weight + self.norm.bias


@fault("bfloat16", Blocks, "prepare")
def positions_counted_in_bfloat16(self, x):
    totals = [8 * torch.ones_like(x[:, 0])]
    for _ in range(1, x.shape[1]):
        totals.append(totals[-1] + 8 * torch.ones_like(x[:, 0]) * 1.01)
    return x + (torch.stack(totals, 1) * 0.1).sin() * 8
