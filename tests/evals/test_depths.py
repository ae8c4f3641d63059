"""Needles by depth: counted, printed, and read in rows far longer than a pass."""

import re

import torch

from tests.evals.test_run import COMPACT, Oracle, config, prepared, solve_needle
from titans_core import LanguageModel
from titans_platform.evals import evaluate
from titans_platform.tasks import Item

TENTHS = [f"{10 * tenth}-{10 * tenth + 10}%" for tenth in range(10)]


def early(text: str) -> str | None:
    """Solves what stands in the first half of a row of 80."""
    return solve_needle(text) if re.search(r"[A-Z]:\d", text[:40]) else "x"


def test_needles_are_counted_by_depth():
    ((key, one),) = evaluate(Oracle(early), prepared(), config("needle", COMPACT, items=120), 80)[
        "buckets"
    ].items()
    assert key == "col/needle-passkey@80"
    assert (one["0-10%"], one["90-100%"]) == (1.0, 0.0)
    # of several questions each has a depth of its own
    several = config("needle", {**COMPACT, "needles": 2, "queries": 2}, items=120)
    ((_, both),) = evaluate(Oracle(early), prepared(), several, 80)["buckets"].items()
    assert list(one) == list(both) == TENTHS
    assert both["0-10%"] > both["90-100%"]
    # a bucket is no part of what an item is
    pieces = (("a", False), ("b", True))
    assert Item(pieces, ("0-10%",)).hash == Item(pieces).hash


def test_rows_beyond_the_budget_of_a_pass_give_what_one_pass_gives(tiny_run, monkeypatch):
    monkeypatch.setattr("titans_platform.evals.scoring.PREFILL_TOKENS", 200)
    monkeypatch.setattr("titans_platform.evals.scoring.MAX_PARALLEL_ROWS", 2)
    torch.manual_seed(0)
    model, passes = LanguageModel(tiny_run.model), []
    model.register_forward_pre_hook(lambda _, args: passes.append(args[0].shape))
    whole = evaluate(model, prepared(), config("needle", COMPACT, items=5, batch_tokens=150), 150)
    assert passes == [(1, 149)] * 5
    passes.clear()
    pieces = evaluate(model, prepared(), config("needle", COMPACT, items=5, batch_tokens=140), 150)
    assert passes == [*[(2, 100), (2, 49)] * 2, (1, 149)]
    assert pieces == whole
