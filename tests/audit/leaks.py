"""Planted faults: outputs that depend on later tokens, other rows, other calls, or the size of the batch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.audit.layers import CHUNK, VOCAB, Attention, Blocks, Chunked, D, Delta, State, Tokens, fault

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
