"""Forward passes for evaluation: logits of whole rows, and log-likelihoods of continuations.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titans_platform.evals.items import Tokenizer
from titans_platform.evals.ranks import measure_shared


class Request(NamedTuple):
    """A context and a continuation to be scored after it; token ids, no document start."""

    context: list[int]
    continuation: list[int]


def encode_pair(context: str, continuation: str, tokenizer: Tokenizer) -> Request:
    """Tokens of both, cut where the context ends.

    As the harness does it: spaces that end the context belong to the continuation, and both are
    tokenised as one text.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    before = tokenizer.encode(stripped)
    whole = tokenizer.encode(stripped + continuation)
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

    def logits(self, tokens_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """[B, T, V] logits; `starts_BT` marks document starts, None: one document a row."""
        starts = None if starts_BT is None else starts_BT.to(self.device)
        return self.model(tokens_BT.to(self.device), document_starts=starts).logits

    def score(self, requests: Sequence[Request], max_length: int) -> list[Score]:
        """Scores in the order of `requests`; contexts lose their beginning where a row exceeds `max_length`.

        Rows of similar length share a pass, padded on the right, which a causal model does not see.
        Every worker of a process group calls this with the same requests.
        """
        sequences = [self._sequence(request, max_length) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: -len(sequences[i]))
        batches = []
        while order:
            rows = self.rows(len(sequences[order[0]]))
            batches.append(order[:rows])
            order = order[rows:]

        def measure(batch: list[int]) -> list[Score]:
            return self._pass([sequences[i] for i in batch], [len(requests[i].continuation) for i in batch])

        scores: list[Score] = [Score(0.0, True, 0)] * len(requests)
        for batch, results in zip(batches, measure_shared(batches, measure), strict=True):
            for i, result in zip(batch, results, strict=True):
                scores[i] = result
        return scores

    def _sequence(self, request: Request, max_length: int) -> list[int]:
        tokens = request.context + request.continuation
        return [self.tokenizer.bos, *tokens[max(0, len(tokens) - (max_length - 1)) :]]

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
