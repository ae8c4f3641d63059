"""Loss of long held-out texts beyond a position, by the tokens before each block that the state has read.

Shapes: N texts, B of them read side by side, L tokens of a text (with its last target L + 1), of which
P = L - BEYOND are measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from titans_core.config import Frozen
from titans_core.interventions import Intervention, has_effect, intervene
from titans_platform.errors import UsageError
from titans_platform.evals.by_position import LongText, long_texts, ratio
from titans_platform.evals.ngrams import NGrams
from titans_platform.evals.scoring import Scorer, measure_distributed
from titans_platform.tasks import Context, Measurement, Task

BEYOND = 4096
"""Tokens of a text before the first that is measured."""
BLOCK = 256
"""Tokens that are measured on one state; the least that a state has read."""
READ = {"256": 256, "1k": 1024, "4k": 4096}
ALL, OFF, NGRAMS = "all", "off", "ngrams"


@dataclass(frozen=True)
class Readings:
    """Losses of the same tokens, each text's last P."""

    losses: dict[str, NDArray[np.float32]]
    """[N, P] nats, by what the state has read: `256`, `1k`, `4k`, `all`; `off`: all, without reads. 5-grams
    that have read as much: `ngrams-256` to `ngrams-all`, once a column needs them."""
    counts_NP: NDArray[np.bool_]
    """True where a prediction counts: the next token is not a document's first."""
    far_NP: NDArray[np.bool_]
    """True where it counts and the next token last occurred in the same text more than BLOCK tokens ago."""

    def mean(self, values_NP: NDArray[Any], far: bool = False) -> tuple[float, float]:
        """Mean a token and its standard error, with texts as independent samples."""
        counts_NP = self.far_NP if far else self.counts_NP
        sums_N = np.where(counts_NP, values_NP, 0).sum(1, dtype=np.float64)
        return ratio(sums_N, counts_NP.sum(1).astype(np.float64))


class FarTextOptions(Frozen):
    """The reading, and the tokens that count."""

    read: Literal["256", "1k", "4k", "all", "off"] = "all"
    less: Literal["256", "1k", "4k", "all", "off", "ngrams"] | None = None
    """Report how much lower the loss of `read` is than this reading's; `ngrams`: than the loss of 5-grams
    with a cache of the same tokens."""
    tokens: Literal["all", "far"] = "all"
    """far: tokens whose last occurrence in the text is more than 256 tokens back."""


class FarText(Task):
    """Mean nats a token beyond position 4,096 of held-out texts of `context.length` tokens.

    Texts are spread over the held-out text, as many as `eval.perplexity_tokens` allows; each begins where a
    document does. NaN: memory off, of a model without memory; less 5-grams, where none were counted.
    """

    name = "far_text"
    Options = FarTextOptions

    @property
    def label(self) -> str:
        """Name, reading and tokens: `far_text-all-far`."""
        options = self.options
        parts = [self.name, options.read, options.less and f"for-{options.less}", options.tokens]
        return "-".join(filter(None, parts))

    @property
    def chance(self) -> float:
        """0 for a difference; of a loss `measure` gives it."""
        return 0.0 if self.options.less else math.inf

    def check(self, objective: Any, length: int, data: Any) -> None:
        """Refuse texts that end before the first measured token."""
        if length <= BEYOND or (length - BEYOND) % BLOCK:
            raise UsageError(
                f"lengths: {length} tokens are not {BEYOND} and a multiple of {BLOCK}; use e.g. 8192"
            )

    def measure(self, context: Context) -> Measurement:
        """Read the texts, once for all columns of a model, and average over the tokens that count."""
        model, options = context.scorer.model, self.options
        if model not in _READINGS:
            _READINGS[model] = read(context.scorer, self.texts(context))
        readings, far = _READINGS[model], options.tokens == "far"
        items = int((readings.far_NP if far else readings.counts_NP).sum())
        loss_NP = readings.losses[options.read]
        if options.less:
            ngrams = options.less == NGRAMS
            less_NP = self.ngram_losses(context) if ngrams else readings.losses[options.less]
            return Measurement(*readings.mean(less_NP - loss_NP, far), 0.0, items)
        value, stderr = readings.mean(loss_NP, far)
        floor, heuristic = None, None
        if options.read != OFF and context.ngrams():
            floor, _ = readings.mean(self.ngram_losses(context), far)
            heuristic = "5-grams with a cache of what is read"
        chance = math.log(context.scorer.tokenizer.vocab_size)
        return Measurement(value, stderr, chance, items, floor=floor, heuristic=heuristic)

    def ngram_losses(self, context: Context) -> NDArray[np.floating]:
        """[N, P] losses of 5-grams with a cache of the tokens read; NaN where none were counted.

        Computed once a reading, and kept with the model's.
        """
        losses, kept = _READINGS[context.scorer.model].losses, f"{NGRAMS}-{self.options.read}"
        if not (ngrams := context.ngrams()):
            return np.full_like(losses[ALL], math.nan)
        if kept not in losses:
            p_NP = cached(ngrams, self.texts(context), READ.get(self.options.read))
            losses[kept] = -np.log(p_NP).astype(np.float32)
        return losses[kept]

    def texts(self, context: Context) -> list[LongText]:
        """Return texts of `context.length` tokens."""
        rows = context.length // context.prepared.config.sequence_length
        return long_texts(context.prepared, rows, context.config.perplexity_tokens)


_READINGS: WeakKeyDictionary[nn.Module, Readings] = WeakKeyDictionary()


def read(scorer: Scorer, texts: list[LongText]) -> Readings:
    """Compute every reading's losses of the tokens beyond BEYOND. All ranks of a process group call this."""
    size = scorer.parallel_rows(len(texts[0].counts))
    batches = [texts[i : i + size] for i in range(0, len(texts), size)]
    parts = measure_distributed(batches, partial(_read_batch, scorer))
    losses = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    counts_NP = np.stack([text.counts for text in texts])[:, BEYOND:]
    last_NP = np.stack([last_seen(text.tokens)[BEYOND + 1 :] for text in texts])
    return Readings(losses, counts_NP, counts_NP & (last_NP > BLOCK))


def cached(ngrams: NGrams, texts: list[LongText], before: int | None) -> NDArray[np.float64]:
    """Probability [N, P] of each measured token, by n-grams with a cache of what a state has read.

    Args:
        ngrams: counted on the text trained on.
        texts: N texts.
        before: tokens read before each block; None: the text from its start.
    """
    tokens_NL = np.stack([text.tokens for text in texts])
    if before is None:
        return ngrams.cached(tokens_NL)[:, BEYOND:]
    rows = np.lib.stride_tricks.sliding_window_view(tokens_NL[:, BEYOND - before :], before + BLOCK + 1, 1)
    p = ngrams.cached(rows[:, ::BLOCK].reshape(-1, before + BLOCK + 1))[:, before:]
    return p.reshape(len(texts), -1)


def last_seen(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Distance of each token to its last occurrence before; 0: there is none."""
    order = np.argsort(tokens, kind="stable")
    distance = np.zeros(len(tokens), np.int64)
    same = tokens[order][1:] == tokens[order][:-1]
    distance[order[1:][same]] = (order[1:] - order[:-1])[same]
    return distance


def _read_batch(scorer: Scorer, texts: list[LongText]) -> dict[str, NDArray[np.float32]]:
    tokens_BL = torch.from_numpy(np.stack([text.tokens for text in texts])).to(scorer.device)
    model, off = scorer.model, Intervention(memory=False)
    losses = {ALL: _carried(scorer, tokens_BL)}
    losses[OFF] = torch.full_like(losses[ALL], math.nan)
    if has_effect(model, off):
        with intervene(model, off):
            losses[OFF] = _carried(scorer, tokens_BL)
    return {name: loss.numpy() for name, loss in (losses | _windows(scorer, tokens_BL)).items()}


def _carried(scorer: Scorer, tokens_BL: Tensor) -> Tensor:
    """[B, P] losses on a state carried from the start of the text."""
    state, losses = None, []
    inputs, targets = tokens_BL[:, :-1], tokens_BL[:, 1:]
    piece = max(BLOCK, scorer.batch_tokens // len(tokens_BL) // BLOCK * BLOCK)
    for part, after in zip(inputs.split(piece, 1), targets.split(piece, 1), strict=True):
        out = scorer.model(part, state, targets_BT=after)
        state = out.state
        losses.append(out.losses.cpu())
    return torch.cat(losses, 1)[:, BEYOND:]


def _windows(scorer: Scorer, tokens_BL: Tensor) -> dict[str, Tensor]:
    """[B, P] losses of each block on a state that has read so many tokens before it."""
    losses = {}
    for name, before in READ.items():
        width = before + BLOCK
        rows = tokens_BL[:, BEYOND - before :].unfold(1, width + 1, BLOCK).flatten(0, 1)
        parts = [
            scorer.model(row[:, :-1], targets_BT=row[:, 1:]).losses[:, before:].cpu()
            for row in rows.split(max(1, scorer.batch_tokens // width))
        ]
        losses[name] = torch.cat(parts).view(len(tokens_BL), -1)
    return losses
