"""Needles by depth: counted, printed, and read in rows far longer than a pass."""

import io
import re

import torch
from rich.console import Console

from tests.evals.test_run import COMPACT, Oracle, config, prepared, solve_needle
from titans_core import LanguageModel
from titans_platform.cli.live import bucket_tables
from titans_platform.evals import evaluate
from titans_platform.runs.folder import Measures
from titans_platform.tasks import Item

TENTHS = [f"{10 * tenth}-{10 * tenth + 10}%" for tenth in range(10)]


def early(text: str) -> str | None:
    """Solves what stands in the first half of a row of 80."""
    return solve_needle(text) if re.search(r"[A-Z]:\d", text[:40]) else "x"


def test_needles_are_counted_by_depth():
    found = evaluate(Oracle(early), prepared(), config("needle", COMPACT, items=120), 80)
    ((key, buckets),) = found["buckets"].items()
    assert key == "col/needle-passkey@80"
    assert list(buckets) == TENTHS
    assert buckets["0-10%"] == 1.0
    assert buckets["90-100%"] == 0.0
    # of several questions each has a depth of its own
    several = config("needle", {**COMPACT, "needles": 2, "queries": 2}, items=120)
    ((_, both),) = evaluate(Oracle(early), prepared(), several, 80)["buckets"].items()
    assert list(both) == TENTHS
    assert both["0-10%"] > both["90-100%"]


def test_the_bucket_of_an_item_is_no_part_of_what_it_is():
    pieces = (("a", False), ("b", True))
    assert Item(pieces, ("0-10%",)).hash == Item(pieces).hash


def test_depths_are_printed_by_length_and_positions_beside_them():
    needle = dict(zip(TENTHS, (1.0, 0.5, *8 * [0.0]), strict=True))
    keys = {"pk/needle-passkey@64": needle, "pk/needle-passkey@1024": {"0-10%": 0.25}}
    measures = Measures.model_validate({"buckets": keys | {"lm/perplexity@64": {"32-63": 7.5}}})
    tables = list(bucket_tables(measures))
    out = io.StringIO()
    for table in tables:
        Console(file=out, width=60).print(table)
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["needle-passkey"] in lines
    assert ["position,", "at", "tokens", "64", "1,024"] in lines
    assert ["0-10%", "1.000", "0.250"] in lines
    assert ["10-20%", "0.500", "-"] in lines
    assert ["32-63", "7.500"] in lines


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
