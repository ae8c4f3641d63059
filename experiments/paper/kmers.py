"""`python -m experiments.paper.kmers RUN.yaml`: logistic regression on counts of k-mers, a baseline.

Shapes: N sequences, K classes, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from titans_platform.cli import config_options, echo_json
from titans_platform.errors import UsageError
from titans_platform.loading import load_config
from titans_platform.objectives import build_objective
from titans_platform.objectives.classification import PARTS, Classification, LabelledData

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
"""Candidate L2 penalties."""
LARGEST = 2**28
"""Maximum number of counts in memory: 1 GiB in float32."""


class KmerResult(NamedTuple):
    """The regression with the highest validation accuracy."""

    k: int
    penalty: float
    validation: float
    """Validation accuracy."""
    test: float
    """Test accuracy; nothing was selected on the test split."""


def kmer_regression(data: LabelledData, largest: int) -> KmerResult:
    """Select k from 1 to ``largest`` and the penalty by validation accuracy; the first wins ties.

    Raises UsageError if there are more counts than LARGEST.
    """
    labels = {part: torch.from_numpy(data.labels[part]) for part in PARTS}
    best = KmerResult(0, 0.0, -1.0, 0.0)
    for k in range(1, largest + 1):
        x = _features(data, k)
        for penalty in PENALTIES:
            weight = fit(x["train"], labels["train"], len(data.classes), penalty)
            share = {p: (x[p] @ weight).argmax(1).eq(labels[p]).double().mean().item() for p in PARTS}
            if share["validation"] > best.validation:
                best = KmerResult(k, penalty, share["validation"], share["test"])
    return best


def fit(x_NF: Tensor, labels_N: Tensor, classes: int, penalty: float) -> Tensor:
    """[F, K] weights that minimise cross-entropy plus ``penalty`` times their squared norm, by L-BFGS."""
    weight = torch.zeros(x_NF.shape[1], classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(x_NF @ weight, labels_N) + penalty * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach()


def _features(data: LabelledData, k: int) -> dict[str, Tensor]:
    """[N, F] features of each split: scaled counts of the training split's k-mers, and a constant 1."""

    def codes_of(ids: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Encode the k-mers of a sequence as integers."""
        if len(ids) < k:
            return np.empty(0, np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.int64), k)
        return windows @ data.tokenizer.vocab_size ** np.arange(k)

    codes = {part: [codes_of(ids) for ids in data.tokens[part]] for part in PARTS}
    known = np.unique(np.concatenate(codes["train"]))
    if (size := len(known) * sum(map(len, codes.values()))) > LARGEST:
        raise UsageError(f"kmer: {size:,} counts of {k}-mers are too many; give fewer than {k}")
    counts = {part: torch.from_numpy(_counts(codes[part], known)) for part in PARTS}
    scale = counts["train"].square().mean(0).sqrt()
    return {part: F.pad(x / scale, (0, 1), value=1.0) for part, x in counts.items()}


def _counts(codes: Sequence[NDArray[np.int64]], known: NDArray[np.int64]) -> NDArray[np.float32]:
    counts = np.zeros((len(codes), len(known)), np.float32)
    for row, sequence in zip(counts, codes, strict=True):
        place = np.searchsorted(known, sequence).clip(max=len(known) - 1)
        np.add.at(row, place[known[place] == sequence], 1)
    return counts


@click.command()
@config_options
@click.option("--largest", type=click.IntRange(1), default=6, help="Largest k.")
def main(config: Path, overrides: tuple[str, ...], root: Path, largest: int) -> None:
    """Fit the regression on the labelled sequences of CONFIG, with k and the penalty chosen on validation."""
    objective = build_objective(load_config(config, overrides))
    if not isinstance(objective, Classification):
        raise UsageError(f"objective.kind: {objective.cfg.objective.kind} has no labelled sequences")
    echo_json(kmer_regression(objective.prepare(root), largest)._asdict())


if __name__ == "__main__":
    main()
