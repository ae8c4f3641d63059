"""An n-gram model against its equation, counted token by token."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest

from titans_platform import cli
from titans_platform.data.ngram import NGram
from titans_platform.data.reading import Span
from titans_platform.errors import UsageError

VOCAB = 5


def text(seed: int, *shape: int) -> Span:
    rng = np.random.default_rng(seed)
    starts = rng.random(shape) < 0.1
    return Span(rng.integers(0, VOCAB, shape), starts, np.ones(shape, bool))


def histories(tokens: list[int], starts: list[bool], order: int) -> list[list[int]]:
    """What stands before each token in its document, up to ``order`` - 1 of them; None before that."""
    found, document = [], []
    for token, start in zip(tokens, starts, strict=True):
        document = [] if start else document
        found.append(([None] * order + document)[len(document) + 1 :])
        document = [*document, token]
    return found


def by_hand(train: Span, test: Span, order: int) -> list[float]:
    """p_n(w | h) = (c(h w) + k(h) p_{n-1}(w | h')) / (c(h) + k(h)), from the uniform p_0."""
    seen: Counter = Counter()
    for w, h in zip(train.tokens, histories(train.tokens, train.starts, order), strict=True):
        for n in range(order):
            seen[(*h[len(h) - n :], int(w))] += 1
    values = []
    for w, h in zip(test.tokens, histories(test.tokens, test.starts, order), strict=True):
        p = 1 / VOCAB
        for n in range(order):
            context = tuple(h[len(h) - n :])
            follow = [c for gram, c in seen.items() if gram[:-1] == context]
            if follow:
                p = (seen[(*context, int(w))] + len(follow) * p) / (sum(follow) + len(follow))
        values.append(-math.log(p))
    return values


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_it_is_the_equation(order):
    train, test = text(0, 300), text(1, 40)
    model = NGram(train, VOCAB, order)
    np.testing.assert_allclose(model.nll(test), by_hand(train, test, order), rtol=1e-12)


def test_rows_are_read_one_by_one():
    model, rows = NGram(text(0, 300), VOCAB, 3), text(2, 4, 25)
    apart = [model.nll(Span(*(part[i] for part in rows))) for i in range(4)]
    np.testing.assert_array_equal(model.nll(rows), np.stack(apart))


def test_the_likelihoods_of_all_next_tokens_sum_to_one():
    model, context = NGram(text(0, 300), VOCAB, 4), [3, 1, 4]
    rows = np.array([[*context, token] for token in range(VOCAB)])
    found = model.nll(Span(rows, np.zeros(rows.shape, bool), np.ones(rows.shape, bool)))
    assert np.exp(-found[:, -1]).sum() == pytest.approx(1)


def test_more_than_64_bits_are_refused():
    with pytest.raises(UsageError, match=r"^ngram: 5 tokens of 32,000 ids"):
        NGram(text(0, 10), 32_000, 5)


def test_the_command_says_it_beside_the_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("a line of a book, not a long one; and then the next of them\n" * 200)
    assert cli.run(["init", "run.yaml", "--data", "book.txt"]) == 0
    assert cli.run(["data", "prepare", "run.yaml"]) == 0
    capsys.readouterr()
    values = {}
    for order in (1, 4):
        assert cli.run(["data", "info", "run.yaml", "--ngram", str(order), "--json"]) == 0
        values[order] = json.loads(capsys.readouterr().out)["ngram"]["perplexity"]
    assert 1 < values[4] < 2 < values[1]
    assert cli.run(["data", "info", "run.yaml", "--ngram", "4"]) == 0
    assert f"an interpolated 4-gram has perplexity {values[4]:.3f} on" in capsys.readouterr().out
