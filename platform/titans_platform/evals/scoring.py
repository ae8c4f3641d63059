"""Forward passes for evaluation, shared by the workers of a process group: each measures its share of the
batches, and all get every result.

Rows that begin alike read their beginning once: the choices of a question, whose context is the same.
Neighbours in sorted order make a group. A batch reads the beginnings of its groups together, the longer ones
on after the shorter ones have ended, and copies the state at its `forks` for the rows of the groups that end
there. A fork lies before the end of a beginning where each row of its group reading the rest costs less than
another pass.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core import LanguageModel
from titans_core.backbone import ModelState
from titans_core.generation import PREFILL_TOKENS
from titans_platform.errors import TitansError
from titans_platform.evals.items import Tokenizer

IDS_AT_ONCE, LOGITS_AT_ONCE = {"cpu": 1024}, {"cpu": 2**18}
"""Ids of the vocabulary whose logits are made together, and logits: what a processor's cache holds."""
AT_ONCE = 16
"""Rows that are read side by side in pieces, at most."""
AT_ONCE_BYTES = 2**28
"""What they and their states may take."""
TOKEN_BYTES = 16
"""A token as it comes and as it goes to the model, two integers."""
PASS_TOKENS = 256
"""What a pass costs beside its tokens, in tokens: what would save fewer is not worth a pass of its own."""

Batch = TypeVar("Batch")
Result = TypeVar("Result")
T = TypeVar("T")


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

    def side_by_side(self, length: int) -> int:
        """Rows of `length` tokens that `greedy` takes at once; of those it reads in pieces also several."""
        if not self._in_pieces(length):
            return self.rows(length)
        kept = AT_ONCE_BYTES // (cast(LanguageModel, self.model).state_bytes(length) + TOKEN_BYTES * length)
        return max(1, min(AT_ONCE, kept))

    def _in_pieces(self, length: int) -> bool:
        return length > self.batch_tokens and isinstance(self.model, LanguageModel)

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

    def greedy(self, tokens_BT: Tensor, start: int = 0) -> Tensor:
        """[B, T - start] the likeliest token after each from ``start`` on, on the CPU.

        Rows longer than `batch_tokens` are read in pieces, each on the state that the last one left, so that
        memory grows with the length by the tokens alone (and by what attention without a window keeps).
        """
        if not self._in_pieces(tokens_BT.shape[1]):
            return self.logits(tokens_BT).argmax(-1).cpu()[:, start:]
        found, state, end = [], None, 0
        for piece_BT in tokens_BT.split(max(1, PREFILL_TOKENS // len(tokens_BT)), 1):
            end += piece_BT.shape[1]
            # sharded models: every worker makes all of these passes, wherever its answers are
            out = self.model(piece_BT.to(self.device), state, last=end <= start)
            state = out.state
            if end > start:
                found.append(out.logits.argmax(-1).cpu()[:, max(0, start - end + piece_BT.shape[1]) :])
        return torch.cat(found, 1)

    def score(self, requests: Sequence[Request], max_length: int) -> list[Score]:
        """Scores in the order of `requests`; contexts lose their beginning where a row exceeds `max_length`.

        What rows have in common at their beginning is read once (`group_rows`), and logits are made of the
        tokens scored alone. Rows of similar length share a pass, padded on the right, which a causal model
        does not see. Every worker of a process group calls this with the same requests.
        """
        rows = [self._row(request, max_length) for request in requests]
        lengths = [len(row.tokens) for row in rows]
        if self._forks:
            groups = group_rows([row.tokens for row in rows], [row.first for row in rows])
            batches = batch_groups(groups, lengths, self.batch_tokens)
        else:
            batches = [[Group(0, (i,)) for i in batch] for batch in self.batches(lengths)]

        def measure(batch: list[Group]) -> dict[int, Score]:
            return self._measure(batch, rows)

        scores = {i: score for found in measure_shared(batches, measure) for i, score in found.items()}
        return [scores[i] for i in range(len(requests))]

    @property
    def _forks(self) -> bool:
        """Whether a batch may take any number of passes, on from a state."""
        return isinstance(self.model, LanguageModel) and not sharded_modules(self.model)

    def _row(self, request: Request, max_length: int) -> _Row:
        tokens = request.context + request.continuation
        row = [self.tokenizer.bos, *tokens[max(0, len(tokens) - (max_length - 1)) :]]
        return _Row(row, max(0, len(row) - 1 - len(request.continuation)))

    def _measure(self, batch: list[Group], rows: Sequence[_Row]) -> dict[int, Score]:
        """The score of every row of a batch."""
        found: dict[int, Score] = {}
        state: ModelState | None = None
        read = 0
        left = sorted(batch, key=lambda group: group.shared)
        for fork in forks(batch):
            if fork.position > read:
                state = self._read(
                    [rows[group.rows[0]].tokens[read : fork.position] for group in left], state
                )
            read = fork.position
            found |= self._ends(fork, state, rows)
            left = left[len(fork.groups) :]
            if state is not None and left:
                state = state.take(range(len(fork.groups), len(fork.groups) + len(left)))
        return found

    def _read(self, rows: list[list[int]], state: ModelState | None) -> ModelState | None:
        """The state after rows of one length; nothing else is made of their features."""
        model: Any = self.model
        for piece_BT in torch.tensor(rows, device=self.device).split(max(1, PREFILL_TOKENS // len(rows)), 1):
            _, state = model.features(piece_BT, state)
        return state

    def _ends(self, fork: Fork, state: ModelState | None, rows: Sequence[_Row]) -> dict[int, Score]:
        """Scores of the rows of a fork, whose groups are the first rows of `state`."""
        of = [(row, place) for place, group in enumerate(fork.groups) for row in group.rows]
        ends = [rows[row].after(fork.position) for row, _ in of]
        parts = alike([len(end.tokens) for end in ends]) if self._forks else [list(range(len(of)))]
        found = {}
        for part in parts:
            copies = state and state.take([of[i][1] for i in part])
            scores = self._pass([ends[i] for i in part], copies)
            found |= {of[i][0]: score for i, score in zip(part, scores, strict=True)}
        return found

    def _pass(self, rows: Sequence[_Row], state: ModelState | None) -> list[Score]:
        length = max(len(row.tokens) for row in rows)
        if length == 1:  # empty continuations
            return [Score(0.0, True, 0)] * len(rows)
        padded = [row.tokens + [self.tokenizer.pad] * (length - len(row.tokens)) for row in rows]
        tokens_BT = torch.tensor(padded, device=self.device)
        position_T = torch.arange(length - 1, device=self.device)
        first_B1 = torch.tensor([[row.first] for row in rows], device=self.device)
        last_B1 = torch.tensor([[len(row.tokens) - 1] for row in rows], device=self.device)
        at_BT = (position_T >= first_B1) & (position_T < last_B1)
        targets_N = tokens_BT[:, 1:][at_BT]
        scored = self._scored(tokens_BT[:, :-1], at_BT, state, targets_N)
        logprobs, greedy = (iter(torch.cat(part).tolist()) for part in zip(*scored, strict=True))
        return [
            Score(math.fsum(islice(logprobs, width)), all(list(islice(greedy, width))), width)
            for width in (len(row.tokens) - 1 - row.first for row in rows)
        ]

    def _scored(
        self, tokens_BT: Tensor, at_BT: Tensor, state: ModelState | None, targets_N: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`token_scores` of the places where `at_BT` is True, some of them after the others."""
        if not self._forks:
            yield token_scores([self.logits(tokens_BT)[at_BT]], targets_N)
            return
        model: Any = self.model
        x_BTD, _ = model.features(tokens_BT, state)
        weights = model.head.weight.split(IDS_AT_ONCE.get(self.device.type, 2**24))
        rows = max(1, LOGITS_AT_ONCE.get(self.device.type, 2**24) // len(weights[0]))
        for x_ND, part_N in zip(x_BTD[at_BT].split(rows), targets_N.split(rows), strict=True):
            yield token_scores((F.linear(x_ND, weight) for weight in weights), part_N)


class _Row(NamedTuple):
    """Tokens, and the place of the last one that is not scored."""

    tokens: list[int]
    first: int

    def after(self, position: int) -> _Row:
        """What is left when so many tokens have been read."""
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
    """Rows that begin alike."""

    shared: int
    """Tokens of the common beginning."""
    rows: tuple[int, ...]


class Fork(NamedTuple):
    """Where a batch copies states, and for which groups."""

    position: int
    groups: tuple[Group, ...]


def group_rows(rows: Sequence[list[int]], most: Sequence[int]) -> list[Group]:
    """Each row in one group, so that few tokens are read.

    Args:
        rows: tokens.
        most: of each row, how many of its tokens may be shared.
    """
    groups: list[Group] = []
    for i in sorted(range(len(rows)), key=lambda i: rows[i]):
        if groups:
            shared, members = groups[-1]
            common = _common(rows[members[-1]], rows[i], min(shared, most[i]))
            # the members read on from an earlier place; the new one saves what it shares
            if common > (len(members) - 1) * (shared - common):
                groups[-1] = Group(common, (*members, i))
                continue
        groups.append(Group(most[i], (i,)))
    return [group if len(group.rows) > 1 else group._replace(shared=0) for group in groups]


def batch_groups(groups: Sequence[Group], lengths: Sequence[int], budget: int) -> list[list[Group]]:
    """Groups of like lengths together, the longest beginnings first, up to ``budget`` tokens a batch."""

    def tokens(group: Group) -> int:
        return group.shared + sum(lengths[row] - group.shared for row in group.rows)

    order = sorted(groups, key=lambda group: (-group.shared, -lengths[group.rows[0]]))
    batches: list[list[Group]] = []
    left = 0
    for group in order:
        if not batches or tokens(group) > left:
            batches.append([])
            left = budget
        batches[-1].append(group)
        left -= tokens(group)
    return batches


def forks(batch: Sequence[Group]) -> list[Fork]:
    """Where the states of a batch are copied, in order."""
    order = sorted(batch, key=lambda group: group.shared)
    parts = _parts(order, lambda first, group: (group.shared - first.shared) * (len(group.rows) - 1))
    return [Fork(part[0].shared, tuple(part)) for part in parts]


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Which rows of these lengths one pass takes, the longest first; shorter ones are padded."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return _parts(order, lambda first, row: lengths[first] - lengths[row])


def _parts(order: Sequence[T], waste: Callable[[T, T], int]) -> list[list[T]]:
    """``order`` cut wherever a part would waste more than a pass; ``waste(first of the part, another)``."""
    parts: list[list[T]] = []
    wasted = 0
    for item in order:
        wasted += waste(parts[-1][0], item) if parts else 0
        if not parts or wasted > PASS_TOKENS:
            parts.append([])
            wasted = 0
        parts[-1].append(item)
    return parts


def _common(a: list[int], b: list[int], most: int) -> int:
    """Tokens that ``a`` and ``b`` begin with alike, ``most`` at most."""
    low, high = 0, min(most, len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
