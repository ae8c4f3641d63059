"""Forward passes for evaluation, shared by the workers of a process group: each measures its share of the
batches, and all get every result.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titans_platform.errors import TitansError
from titans_platform.evals.items import Tokenizer

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def measure_shared(batches: Iterable[Batch], measure: Callable[[Batch], Result]) -> list[Result]:
    """``measure`` of every batch, in order and on every worker; worker r measures r, r + W, r + 2W, ...

    A batch is measured as it is given, by one worker, so the results do not depend on W. All workers make
    the same number of passes, since those of a sharded model need all of them: one that has no batch left
    measures another's and drops the result.

    Raises:
        TitansError: another worker could not measure; the own error is raised as it is.
    """
    rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batches, own, total = iter(batches), [], 0
    error: Exception | None = None
    try:
        while group := list(islice(batches, workers)):
            total += len(group)
            own.append(measure(group[min(rank, len(group) - 1)]))
    except Exception as raised:
        error = raised
    gathered = _gather(own, error)
    return [gathered[i % workers][i // workers] for i in range(total)]


def measure_alone(model: nn.Module, measure: Callable[[], Result]) -> Result:
    """What ``measure`` gives on the first worker, on every worker.

    The others wait, so that it can time what it does; of a sharded model all take part.
    """
    if not dist.is_initialized():
        return measure()
    found, error = None, None
    if dist.get_rank() == 0 or sharded_modules(model):
        try:
            found = measure()
        except Exception as raised:
            error = raised
    return _gather(found, error)[0]


def sharded_modules(model: nn.Module) -> list[Any]:
    """Modules whose parameters the workers share out (FSDP2), so that each pass needs all workers."""
    if not dist.is_initialized():
        return []
    # a second of imports that a single worker need not wait for
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _gather(found: Any, error: Exception | None) -> list[Any]:
    """``found`` of every worker, unless one has an error: a worker that raised alone would leave the others
    waiting for it."""
    outcomes: list[Any] = [(found, error and str(error))]
    if dist.is_initialized():
        own, outcomes = outcomes[0], [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, own)
    if error:
        raise error
    for rank, (_, reason) in enumerate(outcomes):
        if reason is not None:
            raise TitansError(f"evaluation failed on worker {rank}: {reason}")
    return [result for result, _ in outcomes]


class Request(NamedTuple):
    """A context and a continuation to be scored after it; token ids, no document start."""

    context: list[int]
    continuation: list[int]


def encode_pair(context: str, continuation: str, tokenizer: Tokenizer) -> Request:
    """Tokens of both, cut where the context ends.

    As lm-evaluation-harness does it: spaces that end the context belong to the continuation, and both are
    tokenised as one text.
    """
    before = tokenizer.encode(context.rstrip())
    whole = tokenizer.encode(context + continuation)
    return Request(whole[: len(before)], whole[len(before) :])


class Score(NamedTuple):
    """Log-likelihood of a continuation in nats, whether greedy decoding would give it, its tokens."""

    logprob: float
    greedy: bool
    tokens: int


@dataclass(frozen=True)
class Scorer:
    """A model with its tokenizer and device, and how many tokens one forward pass takes."""

    model: nn.Module
    tokenizer: Tokenizer
    device: torch.device
    batch_tokens: int

    def rows(self, length: int) -> int:
        """Rows of `length` tokens in one forward pass."""
        return max(1, self.batch_tokens // length)

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which rows of these lengths share a pass: similar ones, the longest first."""
        order, batches = sorted(range(len(lengths)), key=lambda i: -lengths[i]), []
        while order:
            rows = self.rows(lengths[order[0]])
            batches.append(order[:rows])
            order = order[rows:]
        return batches

    def logits(self, tokens_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """[B, T, V] logits; `starts_BT` marks document starts, None: one document a row."""
        starts = None if starts_BT is None else starts_BT.to(self.device)
        return self.model(tokens_BT.to(self.device), document_starts=starts).logits

    def score(self, requests: Sequence[Request], max_length: int) -> list[Score]:
        """Scores in the order of `requests`; contexts lose their beginning where a row exceeds `max_length`.

        Rows of similar length share a pass, padded on the right, which a causal model does not see.
        Every worker of a process group calls this with the same requests.
        """
        sequences = []
        for request in requests:
            tokens = request.context + request.continuation
            sequences.append([self.tokenizer.bos, *tokens[max(0, len(tokens) - (max_length - 1)) :]])
        batches = self.batches([len(row) for row in sequences])

        def measure(batch: list[int]) -> list[Score]:
            return self._pass([sequences[i] for i in batch], [len(requests[i].continuation) for i in batch])

        measured = chain.from_iterable(measure_shared(batches, measure))
        scores = dict(zip(chain.from_iterable(batches), measured, strict=True))
        return [scores[i] for i in range(len(requests))]

    def _pass(self, sequences: list[list[int]], widths: list[int]) -> list[Score]:
        length = max(map(len, sequences))
        padded = [row + [self.tokenizer.pad] * (length - len(row)) for row in sequences]
        logits = self.logits(torch.tensor(padded)[:, :-1])
        return [
            _score_row(row_logits, row, min(width, len(row) - 1))
            for row_logits, row, width in zip(logits, sequences, widths, strict=True)
        ]


def _score_row(logits_TV: Tensor, row: list[int], width: int) -> Score:
    """Score of the last `width` tokens of `row`; position t of the logits predicts token t + 1."""
    if width == 0:
        return Score(0.0, True, 0)
    logprobs = logits_TV[len(row) - 1 - width : len(row) - 1].float().log_softmax(-1)
    targets = torch.tensor(row[-width:], device=logprobs.device)
    chosen = logprobs.gather(-1, targets[:, None]).sum()
    return Score(float(chosen), bool((logprobs.argmax(-1) == targets).all()), width)
