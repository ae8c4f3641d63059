"""Floors: the best of each task's heuristics, computed by code on a fixed sample and pinned here."""

import random
from collections import Counter
from statistics import fmean
from typing import ClassVar

import numpy as np
import pytest
from click.testing import CliRunner

from titans_platform.cli import cli
from titans_platform.config import TaskConfig
from titans_platform.data import load_tokenizer
from titans_platform.evals.ngrams import NGrams, perplexity
from titans_platform.tasks import TASKS, GeneratedTask, Heuristic, Item, build_generated

BYTE = load_tokenizer("byte")
NEEDLE = {"style": "compact", "kind": "number"}
REASONING = {"one_fact": 1 / 4, "two_facts": 1 / 3, "three_facts": 0.26, "yes_no": 0.52, "counting": 0.55}
FLOORS = [
    ("recall", {}, 64, 1 / 4, None),
    ("recall", {"pairs": 48, "queries": 30, "keys": 50, "values": 36}, 160, 0.042, None),
    # with one needle no key is needed
    ("needle", NEEDLE, 64, 1.0, "any value stated"), ("needle", NEEDLE | {"needles": 4}, 64, 1 / 4, None),
    ("needle", NEEDLE | {"needles": 4, "queries": 4}, 64, 25 / 48, "any value not yet answered"),
    *(("reasoning", {"style": "compact", "kind": k}, 64, level, None) for k, level in REASONING.items()),
    ("reasoning", {"kind": "one_fact"}, 512, 1 / 4, None),
]  # fmt: skip
"""Task, options, tokens, floor within 0.04, and the heuristic where one is clearly best."""


@pytest.mark.parametrize(("task", "options", "length", "level", "best"), FLOORS)
def test_floor_keeps_its_value_and_no_heuristic_beats_it_on_other_items(task, options, length, level, best):
    """Guesses drawn and scored one by one, on items that the floor was not computed from."""
    task = build_generated(TaskConfig(task=task, options=options))
    rng, floor = random.Random(7), task.floor(length, BYTE)
    assert abs(floor.value - level) < 0.04, floor
    assert best in (None, floor.heuristic)
    drawn = [task.item(rng, length, BYTE) for _ in range(300 if length < 512 else 40)]
    for name, heuristic in task.heuristics.items():
        shares = []
        for item in drawn:
            guesses = [(heuristic(before), answer.strip()) for before, answer in item.questions()]
            shares.append(fmean(bool(guess) and rng.choice(guess) == answer for guess, answer in guesses))
        assert fmean(shares) < floor.value + 4 * (1 / 4 / len(drawn)) ** 0.5, name


def test_every_generated_task_lists_heuristics():
    for name, kind in TASKS.items():
        if issubclass(kind, GeneratedTask) and kind.__module__.startswith("titans_platform."):
            assert kind.heuristics is not GeneratedTask.heuristics, name


class Coin(GeneratedTask):
    """Heads twice in three."""

    name = "coin"
    guesses: ClassVar[tuple[tuple[str, Heuristic], ...]] = ()

    @property
    def chance(self):
        return 1 / 2

    @property
    def heuristics(self):
        return {"always tails": lambda before: ["tails"], **dict(self.guesses)}

    def item(self, rng, length, tokenizer):
        return Item((("?", False), (rng.choice(["heads", "heads", "tails"]), True)))


class Heads(Coin):
    """Its heuristics beat chance."""

    guesses = (("always heads", lambda before: ["heads"]), ("either", lambda before: ["heads", "tails"]))


def test_floor_is_the_best_heuristic_or_chance_and_the_same_for_every_model():
    floor = Heads().floor(2, BYTE)
    assert (floor.heuristic, floor.value) == ("always heads", floor.scores["always heads"])
    assert abs(floor.value - 2 / 3) < 0.06
    assert floor.scores["either"] == 1 / 2
    # the next run of a process has a tokenizer of its own
    assert Heads().floor(2, load_tokenizer("byte")) is floor
    # a heuristic below chance is no floor
    assert Coin().floor(2, BYTE)[:2] == (1 / 2, None)
    assert type("Unlisted", (Coin,), {"heuristics": {}})().floor(2, BYTE) is None
    first, again = ([item.text for item in Heads().floor_items(9, BYTE)] for _ in range(2))
    assert first == again


def test_command_prints_chance_heuristics_and_floor():
    printed = CliRunner().invoke(cli, ["tasks", "--task", "{task: needle, options: {style: compact}}"])
    assert printed.exit_code == 0, printed.output
    assert ["needle-passkey@64", "1.0", "100.0"] in [line.split() for line in printed.output.splitlines()]


def counted(text: list[list[int]], row: list[int], order: int, vocab: int) -> list[float]:
    """Witten-Bell by dictionaries, a token at a time."""
    after: dict[tuple[int, ...], Counter[int]] = {}
    for tokens in text:
        for t in range(1, len(tokens)):
            for n in range(order):
                history = tuple(([-1] * order + tokens)[order + t - n : order + t])
                after.setdefault(history, Counter())[tokens[t]] += 1
    probabilities = []
    for t in range(1, len(row)):
        p = 1 / vocab
        for n in range(order):
            seen = after.get(tuple(([-1] * order + row)[order + t - n : order + t]), Counter())
            if seen:
                p = (seen[row[t]] + len(seen) * p) / (seen.total() + len(seen))
        probabilities.append(p)
    return probabilities


@pytest.mark.parametrize("order", [1, 3, 5])
def test_ngrams_give_the_probabilities_of_counting_by_dictionaries(order):
    rng = np.random.default_rng(0)
    text, row = rng.integers(0, 4, (7, 23)), rng.integers(0, 6, (3, 11))
    passes = np.concatenate([text, text[2:5]])  # rows that are read again
    ngrams = NGrams((passes, np.ones((10, 22), bool)), vocab_size=6, order=order)
    expected = [counted(text.tolist(), one, order, 6) for one in row.tolist()]
    np.testing.assert_allclose(ngrams.probabilities(row, order), expected, rtol=1e-12)
    measured = perplexity(lambda tokens: ngrams.probabilities(tokens, order), [(row, np.ones((3, 10), bool))])
    assert measured == pytest.approx(np.exp(-np.log(expected).mean()))


def test_cache_counts_what_followed_the_same_tokens_earlier_in_the_row():
    rng = np.random.default_rng(0)
    text, row = rng.integers(0, 4, (7, 23)), rng.integers(0, 3, 17)
    ngrams = NGrams((text, np.ones((7, 22), bool)), vocab_size=6, order=3)
    expected = counted(text.tolist(), row.tolist(), 3, 6)
    for t in range(1, len(row)):
        for n in range(1, min(t, 3) + 1):
            after = [row[u] for u in range(n, t) if row[u - n : u].tolist() == row[t - n : t].tolist()]
            if after:
                kinds, same = len(set(after)), after.count(row[t])
                expected[t - 1] = (same + kinds * expected[t - 1]) / (len(after) + kinds)
    np.testing.assert_allclose(ngrams.cached(row[None])[0], expected, rtol=1e-12)


def test_floor_is_the_lowest_perplexity_and_names_its_counts():
    text = np.random.default_rng(0).integers(0, 50, (20, 40))
    ngrams = NGrams((text, np.ones((20, 39), bool)), vocab_size=50)
    repeated = np.tile(np.random.default_rng(1).integers(0, 50, (1, 8)), 8)
    value, name = ngrams.floor([(repeated, np.ones((1, 63), bool))])
    assert name == "5-grams with a cache"
    assert value < 10
    assert ngrams.floor([(text, np.ones((20, 39), bool))])[1] == "5-grams"


def test_ngrams_are_not_counted_at_positions_without_loss():
    rows = np.array([[0, 1, 2, 1, 2]])
    ngrams = NGrams((rows, np.array([[True, False, False, True]])), vocab_size=3, order=2)
    # 1 follows 0 once, 2 follows 1 once, and nothing was counted after 2
    p = ngrams.probabilities(np.array([[0, 1, 2, 0]]), 1)
    assert p[0].tolist() == pytest.approx([(1 + 2 / 3) / 4, (1 + 2 / 3) / 4, (2 / 3) / 4])
    assert ngrams.probabilities(np.array([[2, 0]]), 2) == pytest.approx(p[0, 2])
