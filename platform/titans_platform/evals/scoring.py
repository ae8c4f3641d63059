"""Forward passes for evaluation, distributed over a process group: each rank measures its share of the
batches, and all ranks get every result.

Shapes: B rows, T tokens, V vocabulary, N scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core import LanguageModel
from titans_core.generation import PREFILL_TOKENS
from titans_platform.errors import TitansError
from titans_platform.tasks.items import Item, ItemTokenizer, answer_spans, encode_item

LOGITS_PER_BLOCK = 2**24
"""Logits that are computed together."""
MAX_PARALLEL_ROWS = 16
"""Most rows that are read together in chunks."""
PARALLEL_BYTES = 2**28
"""Memory limit of these rows and their states, bytes."""
TOKEN_BYTES = 16
"""A token takes two int64: one in the batch and one on the device."""

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def measure_distributed(batches: Iterable[Batch], measure: Callable[[Batch], Result]) -> list[Result]:
    """Measure every batch, in order, on every rank; rank r computes batches r, r + W, r + 2W, ...

    One rank measures a whole batch, so the results do not depend on the world size W. All ranks make the same
    number of forward passes, because a sharded model's forward needs all ranks: a rank without a batch of its
    own measures another one's and drops the result.

    Raises:
        TitansError: another rank failed; an error of this rank is raised unchanged.
    """
    rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batches, local, total = iter(batches), [], 0
    error: Exception | None = None
    try:
        while group := list(islice(batches, workers)):
            total += len(group)
            local.append(measure(group[min(rank, len(group) - 1)]))
    except Exception as raised:
        error = raised
    gathered = _gather(local, error)
    return [gathered[i % workers][i // workers] for i in range(total)]


def sharded_modules(model: nn.Module) -> list[Any]:
    """Modules whose parameters are sharded (FSDP2), so that each forward pass needs all ranks."""
    if not dist.is_initialized():
        return []
    # takes a second to import, and a single process does not need it
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _gather(outcome: Any, error: Exception | None) -> list[Any]:
    """Return every rank's ``outcome``. Raises on all ranks if one has an error, else others would hang."""
    outcomes: list[Any] = [(outcome, error and str(error))]
    if dist.is_initialized():
        local, outcomes = outcomes[0], [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, local)
    if error:
        raise error
    for rank, (_, reason) in enumerate(outcomes):
        if reason is not None:
            raise TitansError(f"evaluation failed on rank {rank}: {reason}")
    return [result for result, _ in outcomes]


class Request(NamedTuple):
    """A context and the continuation to score after it; token ids, without a document start."""

    context: list[int]
    continuation: list[int]


def encode_pair(context: str, continuation: str, tokenizer: ItemTokenizer) -> Request:
    """Tokens of both, cut where the context ends.

    As lm-evaluation-harness does it: spaces that end the context belong to the continuation, and both are
    tokenised as one text.
    """
    before = tokenizer.encode(context.rstrip())
    whole = tokenizer.encode(context + continuation)
    return Request(whole[: len(before)], whole[len(before) :])


class Score(NamedTuple):
    """Log-likelihood of a continuation (nats), and whether greedy decoding gives it."""

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class Scorer:
    """A model with its tokenizer, its device and the number of tokens in a forward pass."""

    model: nn.Module
    tokenizer: ItemTokenizer
    device: torch.device
    batch_tokens: int

    def rows(self, length: int) -> int:
        """Rows of `length` tokens in one forward pass."""
        return max(1, self.batch_tokens // length)

    def parallel_rows(self, length: int) -> int:
        """Rows of `length` tokens that `greedy` reads together, whether in one pass or in chunks."""
        if not self._is_chunked(length):
            return self.rows(length)
        kept = PARALLEL_BYTES // (cast(LanguageModel, self.model).state_bytes(length) + TOKEN_BYTES * length)
        return max(1, min(MAX_PARALLEL_ROWS, kept))

    def _is_chunked(self, length: int) -> bool:
        return length > self.batch_tokens and isinstance(self.model, LanguageModel)

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return indices of the rows that share a forward pass: rows of similar length, the longest first."""
        order, batches = iter(sorted(range(len(lengths)), key=lambda i: -lengths[i])), []
        for first in order:
            batches.append([first, *islice(order, self.rows(lengths[first]) - 1)])
        return batches

    def logits(self, tokens_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """[B, T, V] logits; `starts_BT` marks document starts, None: one document a row."""
        starts = None if starts_BT is None else starts_BT.to(self.device)
        return self.model(tokens_BT.to(self.device), document_starts=starts).logits

    def greedy(self, tokens_BT: Tensor, start: int = 0) -> Tensor:
        """[B, T - start] the likeliest token after each from ``start`` on, on the CPU.

        Rows longer than `batch_tokens` are read in pieces, each on the state that the last one left, so that
        memory grows with the length by the tokens alone (and by what attention without a window keeps).
        """
        if not self._is_chunked(tokens_BT.shape[1]):
            if not isinstance(self.model, LanguageModel):
                return self.logits(tokens_BT)[:, start:].argmax(-1).cpu()
            # logits of all tokens would be a tenth of the time
            return self.model(tokens_BT.to(self.device), start=start).logits.argmax(-1).cpu()
        pieces, state, end = [], None, 0
        for piece_BT in tokens_BT.split(max(1, PREFILL_TOKENS // len(tokens_BT)), 1):
            end += piece_BT.shape[1]
            # sharded models: every rank makes all of these passes, even if it needs few of the results
            out = self.model(piece_BT.to(self.device), state, last=end <= start)
            state = out.state
            if end > start:
                pieces.append(out.logits.argmax(-1).cpu()[:, max(0, start - end + piece_BT.shape[1]) :])
        return torch.cat(pieces, 1)

    def grade(self, items: Iterable[Item], length: int) -> Iterator[tuple[tuple[str, ...], list[bool]]]:
        """Yield for each item, in rows of ``length`` tokens, the buckets of its answers and which are right.

        Given the right tokens before it, each token of an answer is the greedy choice if and only if greedy
        decoding from the question gives the whole answer: one forward pass does for generation. Every rank of
        a process group calls this with the same items.
        """
        left, rows = iter(items), self.parallel_rows(length)
        batches = iter(lambda: list(islice(left, rows)), [])
        return chain.from_iterable(measure_distributed(batches, partial(self._graded, length)))

    def _graded(self, length: int, items: list[Item]) -> list[tuple[tuple[str, ...], list[bool]]]:
        rows, answers = zip(*(encode_item(item, self.tokenizer, length) for item in items), strict=True)
        spans, tokens_BT = [list(answer_spans(row)) for row in answers], torch.tensor(rows)
        start = min(first for row in spans for first, _ in row) - 1
        right = (self.greedy(tokens_BT[:, :-1], start) == tokens_BT[:, start + 1 :]).tolist()
        return [
            (item.buckets, [all(row[first - 1 - start : end - 1 - start]) for first, end in answers])
            for item, row, answers in zip(items, right, spans, strict=True)
        ]

    def score(self, requests: Sequence[Request], max_length: int) -> list[Score]:
        """Scores in the order of `requests`; contexts are truncated on the left to fit `max_length` tokens.

        Rows of similar length share a pass, padded on the right, which a causal model does not see. Every
        rank of a process group calls this with the same requests.
        """
        rows = []
        for context, continuation in requests:
            tokens = context + continuation
            kept = [self.tokenizer.bos, *tokens[max(0, len(tokens) - (max_length - 1)) :]]
            rows.append((kept, max(0, len(kept) - 1 - len(continuation))))
        batches = self.batches([len(tokens) for tokens, _ in rows])
        measured = measure_distributed(batches, lambda batch: self._scores([rows[i] for i in batch]))
        scores = dict(zip(chain(*batches), chain(*measured), strict=True))
        return [scores[i] for i in range(len(requests))]

    def _scores(self, rows: Sequence[tuple[list[int], int]]) -> list[Score]:
        """Scores of rows, each its tokens and the position of the last one that is not scored."""
        length = max(len(tokens) for tokens, _ in rows)
        if length == 1:  # empty continuations
            return [Score(0.0, True)] * len(rows)
        padded = [tokens + [self.tokenizer.pad] * (length - len(tokens)) for tokens, _ in rows]
        tokens_BT = torch.tensor(padded, device=self.device)
        position_T = torch.arange(length - 1, device=self.device)
        first_B1 = torch.tensor([[first] for _, first in rows], device=self.device)
        last_B1 = torch.tensor([[len(tokens) - 1] for tokens, _ in rows], device=self.device)
        at_BT = (position_T >= first_B1) & (position_T < last_B1)
        parts = list(self._token_scores(tokens_BT[:, :-1], at_BT, tokens_BT[:, 1:][at_BT]))
        logprobs, greedy = (iter(torch.cat(part).tolist()) for part in zip(*parts, strict=True))
        return [
            Score(math.fsum(islice(logprobs, width)), all(list(islice(greedy, width))))
            for width in (len(tokens) - 1 - first for tokens, first in rows)
        ]

    def _token_scores(
        self, tokens_BT: Tensor, at_BT: Tensor, targets_N: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scores of the positions at which `at_BT` is True, in blocks.

        A score is the target's log-likelihood in nats, and True if it is the first of the likeliest tokens.
        """
        if isinstance(self.model, LanguageModel) and not sharded_modules(self.model):
            # logits of the scored positions alone
            weight_VD = cast(Tensor, self.model.head.weight)
            x_BTD, _ = self.model.features(tokens_BT)
            rows = max(1, LOGITS_PER_BLOCK // len(weight_VD))
            blocks = (F.linear(x_ND, weight_VD) for x_ND in x_BTD[at_BT].split(rows))
        else:
            rows, blocks = max(1, len(targets_N)), iter([self.logits(tokens_BT)[at_BT]])
        for logits_NV, part_N in zip(blocks, targets_N.split(rows), strict=True):
            logprobs_N = -F.cross_entropy(logits_NV.float(), part_N, reduction="none")
            yield logprobs_N, logits_NV.argmax(-1) == part_N
