"""Forward passes for evaluation, distributed over a process group: each rank measures its share of the
batches, and all ranks get every result.

Rows with a common prefix (the choices of one question, say) share its forward pass. Rows are sorted, and
neighbours with a common prefix make a group. A batch reads the prefixes of its groups together and copies the
states at its `forks`, one copy for each row of the groups whose prefix ends there. A fork comes before the
end of a prefix where reading the rest in every row of the group costs less than another forward pass.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core import LanguageModel
from titans_core.generation import PREFILL_TOKENS
from titans_core.state import ModelState
from titans_platform.errors import TitansError
from titans_platform.evals.items import Tokenizer

VOCAB_BLOCK, LOGITS_PER_BLOCK = {"cpu": 1024}, {"cpu": 2**18}
"""Vocabulary ids whose logits are computed together, and logits at once: sized for a CPU's cache."""
MAX_PARALLEL_ROWS = 16
"""Most rows that are read together in chunks."""
PARALLEL_BYTES = 2**28
"""Memory limit of these rows and their states, bytes."""
TOKEN_BYTES = 16
"""A token takes two int64: one in the batch and one on the device."""
FORWARD_OVERHEAD_TOKENS = 256
"""Fixed cost of a forward pass, in tokens; a pass that saves fewer tokens is not worth it."""

Batch = TypeVar("Batch")
Result = TypeVar("Result")
T = TypeVar("T")


def measure_distributed(batches: Iterable[Batch], measure: Callable[[Batch], Result]) -> list[Result]:
    """``measure`` of every batch, in order, on every rank; rank r measures batches r, r + W, r + 2W, ...

    One rank measures a whole batch, so the results do not depend on the world size W. All ranks make the same
    number of forward passes, because those of a sharded model need all ranks: a rank without a batch of its
    own measures another one's and drops the result.

    Raises:
        TitansError: another rank failed; an error of this rank is raised unchanged.
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


def measure_on_rank_0(model: nn.Module, measure: Callable[[], Result]) -> Result:
    """The result of ``measure`` on rank 0, returned on every rank.

    The other ranks wait, so that rank 0 can take timings; with a sharded model all ranks take part.
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
    """Modules whose parameters are sharded (FSDP2), so that each forward pass needs all ranks."""
    if not dist.is_initialized():
        return []
    # takes a second to import, and a single process does not need it
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _gather(found: Any, error: Exception | None) -> list[Any]:
    """``found`` of every rank. Raises on all ranks if one has an error; otherwise the others would hang."""
    outcomes: list[Any] = [(found, error and str(error))]
    if dist.is_initialized():
        own, outcomes = outcomes[0], [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, own)
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


def encode_pair(context: str, continuation: str, tokenizer: Tokenizer) -> Request:
    """Tokens of both, cut where the context ends.

    As lm-evaluation-harness does it: spaces that end the context belong to the continuation, and both are
    tokenised as one text.
    """
    before = tokenizer.encode(context.rstrip())
    whole = tokenizer.encode(context + continuation)
    return Request(whole[: len(before)], whole[len(before) :])


class Score(NamedTuple):
    """Log-likelihood of a continuation (nats), whether greedy decoding gives it, its number of tokens."""

    logprob: float
    greedy: bool
    tokens: int


@dataclass(frozen=True)
class Scorer:
    """A model with its tokenizer, its device and the number of tokens in a forward pass."""

    model: nn.Module
    tokenizer: Tokenizer
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
        """Indices of the rows that share a forward pass: rows of similar length, the longest first."""
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
        found, state, end = [], None, 0
        for piece_BT in tokens_BT.split(max(1, PREFILL_TOKENS // len(tokens_BT)), 1):
            end += piece_BT.shape[1]
            # sharded models: every rank makes all of these passes, even if it needs few of the results
            out = self.model(piece_BT.to(self.device), state, last=end <= start)
            state = out.state
            if end > start:
                found.append(out.logits.argmax(-1).cpu()[:, max(0, start - end + piece_BT.shape[1]) :])
        return torch.cat(found, 1)

    def score(self, requests: Sequence[Request], max_length: int) -> list[Score]:
        """Scores in the order of `requests`; contexts are truncated on the left to fit `max_length` tokens.

        A common prefix of several rows is read once (`group_by_prefix`), and logits are computed only for the
        tokens that are scored. Rows of similar length share a pass, padded on the right, which a causal model
        does not see. Every rank of a process group calls this with the same requests.
        """
        rows = []
        for context, continuation in requests:
            tokens = context + continuation
            kept = [self.tokenizer.bos, *tokens[max(0, len(tokens) - (max_length - 1)) :]]
            rows.append(_Row(kept, max(0, len(kept) - 1 - len(continuation))))
        lengths = [len(row.tokens) for row in rows]
        if self._can_fork:
            groups = group_by_prefix([row.tokens for row in rows], [row.first for row in rows])
            batches = batch_groups(groups, lengths, self.batch_tokens)
        else:
            batches = [[Group(0, (i,)) for i in batch] for batch in self.batches(lengths)]

        found = measure_distributed(batches, partial(self._measure, rows))
        scores = {i: score for batch in found for i, score in batch.items()}
        return [scores[i] for i in range(len(requests))]

    @property
    def _can_fork(self) -> bool:
        """Whether a batch may take several forward passes, each from the state of the last one."""
        return isinstance(self.model, LanguageModel) and not sharded_modules(self.model)

    def _measure(self, rows: Sequence[_Row], batch: list[Group]) -> dict[int, Score]:
        """Score of every row of a batch, by row."""
        found: dict[int, Score] = {}
        state: ModelState | None = None
        read = 0
        left = sorted(batch, key=lambda group: group.shared)
        for fork in forks(batch):
            if fork.position > read:
                prefixes = [rows[group.rows[0]].tokens[read : fork.position] for group in left]
                piece = max(1, PREFILL_TOKENS // len(prefixes))
                # no logits are computed
                for piece_BT in torch.tensor(prefixes, device=self.device).split(piece, 1):
                    _, state = cast(LanguageModel, self.model).features(piece_BT, state)
            read = fork.position
            found |= self._score_fork(fork, state, rows)
            left = left[len(fork.groups) :]
            if state is not None and left:
                state = state.take(range(len(fork.groups), len(fork.groups) + len(left)))
        return found

    def _score_fork(self, fork: Fork, state: ModelState | None, rows: Sequence[_Row]) -> dict[int, Score]:
        """Scores of the rows of a fork; the first rows of `state` are those of its groups."""
        of = [(row, place) for place, group in enumerate(fork.groups) for row in group.rows]
        ends = [rows[row].after(fork.position) for row, _ in of]
        lengths = [len(end.tokens) for end in ends]
        found = {}
        for part in similar_lengths(lengths) if self._can_fork else [list(range(len(of)))]:
            copies = state and state.take([of[i][1] for i in part])
            scores = self._forward([ends[i] for i in part], copies)
            found |= {of[i][0]: score for i, score in zip(part, scores, strict=True)}
        return found

    def _forward(self, rows: Sequence[_Row], state: ModelState | None) -> list[Score]:
        length = max(len(row.tokens) for row in rows)
        if length == 1:  # empty continuations
            return [Score(0.0, True, 0)] * len(rows)
        padded = [row.tokens + [self.tokenizer.pad] * (length - len(row.tokens)) for row in rows]
        tokens_BT = torch.tensor(padded, device=self.device)
        position_T = torch.arange(length - 1, device=self.device)
        first_B1 = torch.tensor([[row.first] for row in rows], device=self.device)
        last_B1 = torch.tensor([[len(row.tokens) - 1] for row in rows], device=self.device)
        at_BT = (position_T >= first_B1) & (position_T < last_B1)
        scored = self._scored(tokens_BT[:, :-1], at_BT, state, tokens_BT[:, 1:][at_BT])
        logprobs, greedy = (iter(torch.cat(part).tolist()) for part in zip(*scored, strict=True))
        return [
            Score(math.fsum(islice(logprobs, width)), all(list(islice(greedy, width))), width)
            for width in (len(row.tokens) - 1 - row.first for row in rows)
        ]

    def _scored(
        self, tokens_BT: Tensor, at_BT: Tensor, state: ModelState | None, targets_N: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`token_scores` of the positions where `at_BT` is True, in blocks."""
        if not self._can_fork:
            yield token_scores([self.logits(tokens_BT)[at_BT]], targets_N)
            return
        model: Any = self.model
        x_BTD, _ = model.features(tokens_BT, state)
        weights = model.head.weight.split(VOCAB_BLOCK.get(self.device.type, 2**24))
        rows = max(1, LOGITS_PER_BLOCK.get(self.device.type, 2**24) // len(weights[0]))
        for x_ND, part_N in zip(x_BTD[at_BT].split(rows), targets_N.split(rows), strict=True):
            yield token_scores((F.linear(x_ND, weight) for weight in weights), part_N)


class _Row(NamedTuple):
    """Tokens, and the position of the last one that is not scored."""

    tokens: list[int]
    first: int

    def after(self, position: int) -> _Row:
        """The rest of the row after ``position`` tokens."""
        return _Row(self.tokens[position:], self.first - position)


def token_scores(parts: Iterable[Tensor], targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """[N] log-likelihoods of the targets in nats, and whether each is the first of the likeliest tokens.

    ``parts`` are logits [N, ids], together those of the vocabulary in its order, one at a time.
    """
    start, totals = 0, []
    best_N = torch.full_like(targets_N, -math.inf, dtype=torch.float32)
    chosen_N, greedy_N = best_N, torch.zeros_like(targets_N, dtype=torch.bool)
    for logits_NV in parts:
        logits_NV = logits_NV.float()
        place_N = (targets_N - start).clamp(0, logits_NV.shape[1] - 1)
        here_N = place_N == targets_N - start
        logit_N = logits_NV.gather(-1, place_N[:, None])[:, 0]
        # faster than logsumexp
        totals.append(F.cross_entropy(logits_NV, place_N, reduction="none") + logit_N)
        chosen_N = torch.where(here_N, logit_N, chosen_N)
        top_N = logits_NV.amax(-1)
        first_N = here_N & (logit_N == top_N) & (logit_N > best_N)
        # argmax takes longer than the rest, and only a tie needs it
        first_N[first_N.clone()] = logits_NV[first_N].argmax(-1) == place_N[first_N]
        greedy_N, best_N, start = greedy_N | first_N, best_N.maximum(top_N), start + logits_NV.shape[1]
    return chosen_N - torch.stack(totals).logsumexp(0), greedy_N & (chosen_N == best_N)


class Group(NamedTuple):
    """Rows with a common prefix."""

    shared: int
    """Tokens of the common prefix."""
    rows: tuple[int, ...]


class Fork(NamedTuple):
    """Position at which a batch copies states, and the groups they are copied for."""

    position: int
    groups: tuple[Group, ...]


def group_by_prefix(rows: Sequence[list[int]], most: Sequence[int]) -> list[Group]:
    """Partition of the rows into groups with common prefixes, so that few tokens are read.

    Args:
        rows: tokens.
        most: of each row, how many of its tokens may be shared.
    """
    groups: list[Group] = []
    for i in sorted(range(len(rows)), key=lambda i: rows[i]):
        if groups:
            shared, members = groups[-1]
            common = _common_prefix(rows[members[-1]], rows[i], min(shared, most[i]))
            # the members would share less of their prefix; the new row saves what it shares
            if common > (len(members) - 1) * (shared - common):
                groups[-1] = Group(common, (*members, i))
                continue
        groups.append(Group(most[i], (i,)))
    return [group if len(group.rows) > 1 else group._replace(shared=0) for group in groups]


def batch_groups(groups: Sequence[Group], lengths: Sequence[int], budget: int) -> list[list[Group]]:
    """Batches of at most ``budget`` tokens, of groups with similar lengths, the longest prefixes first."""

    def tokens(group: Group) -> int:
        return group.shared + sum(lengths[row] - group.shared for row in group.rows)

    batches: list[list[Group]] = []
    left = 0
    for group in sorted(groups, key=lambda group: (-group.shared, -lengths[group.rows[0]])):
        if not batches or tokens(group) > left:
            batches.append([])
            left = budget
        batches[-1].append(group)
        left -= tokens(group)
    return batches


def forks(batch: Sequence[Group]) -> list[Fork]:
    """Forks of a batch, by position."""
    order = sorted(batch, key=lambda group: group.shared)
    parts = _split_by_waste(order, lambda first, group: (group.shared - first.shared) * (len(group.rows) - 1))
    return [Fork(part[0].shared, tuple(part)) for part in parts]


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the rows that share a padded forward pass, the longest first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return _split_by_waste(order, lambda first, row: lengths[first] - lengths[row])


def _split_by_waste(order: Sequence[T], waste: Callable[[T, T], int]) -> list[list[T]]:
    """``order`` split so that no part wastes more tokens than a pass costs; see ``waste(first, other)``."""
    parts: list[list[T]] = []
    wasted = 0
    for item in order:
        wasted += waste(parts[-1][0], item) if parts else 0
        if not parts or wasted > FORWARD_OVERHEAD_TOKENS:
            parts.append([])
            wasted = 0
        parts[-1].append(item)
    return parts


def _common_prefix(a: list[int], b: list[int], most: int) -> int:
    """Length of the common prefix of ``a`` and ``b``, at most ``most``."""
    # by bisection: slices are compared in C, and contexts may have millions of tokens
    low, high = 0, min(most, len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
