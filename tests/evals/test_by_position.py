"""Loss by position: every way of reading equals reading token by token; the gain has the right sign."""

import json
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import small
from tests.evals.small import BYTE
from tests.small import RUN
from titans_core import LanguageModel
from titans_platform.cli import run as titans
from titans_platform.config import DataConfig, RunConfig
from titans_platform.data import prepare
from titans_platform.evals import Scorer
from titans_platform.evals import by_position as module
from titans_platform.evals.by_position import ByPosition, LongText, long_texts, read_by_position

CPU = torch.device("cpu")
T, ROWS = 16, 5


def texts(count=2, rows=ROWS, row=T):
    rng, counts = np.random.default_rng(0), np.ones(rows * row, bool)
    counts[T + 5] = False
    return [LongText(rng.integers(97, 123, rows * row + 1), counts) for _ in range(count)]


def scorer(model, batch_tokens=4096):
    return Scorer(model, BYTE, CPU, batch_tokens)


@torch.no_grad()
def token_by_token(model, tokens, first_row):
    """Losses of each row, on the state of all tokens since row ``first_row(row)``, a call for each token."""
    losses = []
    for row in range(ROWS):
        state = None
        for p in range(first_row(row) * T, (row + 1) * T):
            out = model(torch.tensor([[tokens[p]]]), state)
            state = out.state
            if p >= row * T:
                losses.append(float(F.cross_entropy(out.logits[0], torch.tensor([tokens[p + 1]]))))
    return np.array(losses)


WAYS = {
    "carried": lambda row: 0, "fresh": lambda row: row, "window-1": lambda row: max(0, row - 1),
    "window-2": lambda row: max(0, row - 2),
}  # fmt: skip


@pytest.mark.parametrize(("variant", "sizes"), [
    ("lmm", (40, 60, 4096)), ("mac", (40, 60)), ("transformer", (40,)), ("gla", (60,)), ("samba", (60,)),
])  # fmt: skip
def test_every_way_of_reading_equals_a_token_at_a_time(variant, sizes):
    torch.manual_seed(0)
    fields = RUN["model"] | {"variant": variant, "attention": {"heads": 2, "segment_size": 8}}
    model = LanguageModel(RunConfig.model_validate({"model": fields}).model).double().eval()
    for parameter in model.parameters():  # so that what was read long ago is seen
        parameter.data.mul_(1.5)
    wanted = {way: token_by_token(model, texts()[0].tokens, first) for way, first in WAYS.items()}
    for batch_tokens in sizes:
        with torch.no_grad():
            result = read_by_position(scorer(model, batch_tokens), texts(), T, windows=(1, 2, 4, 9))
        # windows of 4 rows and more are all that 5 rows have
        assert set(result.losses) == set(WAYS)
        for way, losses in wanted.items():
            np.testing.assert_allclose(result.losses[way][0], losses, atol=1e-6, err_msg=way)
    # else any way would pass for another
    for way in ("fresh", "window-1", "window-2"):
        assert np.abs(wanted["carried"] - wanted[way])[-T:].max() > 1e-3


class Counting(nn.Module):
    """The loss is one over the tokens read: what reads further on one state has the lower loss."""

    def forward(self, tokens, state=None, *, last=False, targets_BT=None):
        seen = (state or 0) + torch.arange(1, tokens.shape[1] + 1)
        losses = None if targets_BT is None else (1 / seen.double()).expand(tokens.shape)
        return SimpleNamespace(losses=losses, state=int(seen[-1]))


def test_carrying_more_gains_more_and_errors_follow_texts_or_parts():
    result = read_by_position(scorer(Counting(), 20), texts(3), T, windows=(1, 2))
    counts, p = texts()[0].counts, np.arange(1, ROWS * T + 1)
    fresh, carried = 1 / ((p - 1) % T + 1), 1 / p
    beyond = (p > T) & counts
    gain, stderr = result.gain()
    assert gain == pytest.approx((fresh - carried)[beyond].mean())
    assert gain > 0
    assert (stderr, result.best_window) == (pytest.approx(0), "window-2")
    assert result.gain(1, T) == (0, 0)
    assert result.loss("carried", 2 * T + 1, 3 * T)[0] == pytest.approx(carried[2 * T : 3 * T].mean())
    assert result.loss("window-1", 2 * T + 1, 3 * T)[0] == pytest.approx(carried[T : 2 * T].mean())
    result = ByPosition(48, np.ones((1, 48 * 5), bool), {})
    assert result.buckets() == [(1, 6), (7, 12), (13, 24), (25, 48), (49, 96), (97, 192), (193, 240)]
    assert ByPosition(2, np.ones((1, 6), bool), {}).buckets() == [(1, 1), (2, 2), (3, 4), (5, 6)]
    fresh, carried = np.random.default_rng(0).normal(size=(2, 4, 64))
    result = ByPosition(32, np.ones((4, 64), bool), {"fresh": fresh, "carried": carried})
    means = (fresh - carried)[:, 32:].mean(1)
    assert result.gain() == pytest.approx((means.mean(), statistics.stdev(means) / 2))
    one = ByPosition(32, np.ones((1, 64), bool), {"fresh": fresh[:1], "carried": carried[:1]})
    parts = (fresh - carried)[0, 32:].reshape(module.BLOCKS, -1).mean(1)
    assert one.gain() == pytest.approx((parts.mean(), statistics.stdev(parts) / math.sqrt(module.BLOCKS)))
    # texts of other sizes: residuals of the common mean
    mean, stderr = module.ratio(np.array([2.0, 9.0]), np.array([1.0, 3.0]))
    assert (mean, stderr) == pytest.approx((11 / 4, math.sqrt(2 * (0.75**2 + 0.75**2)) / 4))


@pytest.fixture
def data(tmp_path) -> dict:
    """Twenty texts of 900 bytes, six of them held out, for rows of 32 tokens."""
    contents = (f"text number {part:02d}; " * 60 for part in range(20))
    return RUN["data"] | {"sources": [small.texts(tmp_path / "texts", *contents, validation_fraction=0.3)]}


def test_texts_are_spread_over_the_held_out_text_and_begin_with_a_document(data, tmp_path):
    prepared = prepare(DataConfig.model_validate_json(json.dumps(data)), tmp_path)
    assert module.longest_text(prepared) == 6 * 961 - 1
    actual = long_texts(prepared, 8, 4 * 8 * 32)
    assert len(actual) == 4
    for text in actual:
        assert (len(text.tokens), text.tokens[0]) == (8 * 32 + 1, BYTE.bos)
        assert (text.counts == (text.tokens[1:] != BYTE.bos)).all()
    assert len({text.tokens.tobytes() for text in actual}) == 4
    # two, whatever the budget; one where there is room for one
    assert len(long_texts(prepared, 60, 1)) == 2
    (whole,) = long_texts(prepared, 180, 1)
    assert (whole.tokens == prepared.sources[0].validation.read(0, 180 * 32 + 1).tokens).all()


def test_by_position_prints_a_table_and_draws_a_figure(data, tmp_path, capsys, answer, refused, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    config, root = tmp_path / "run.yaml", ["--root", str(tmp_path / "runs")]
    measured = {"columns": {"ppl": [{"task": "perplexity"}]}}
    config.write_text(json.dumps(RUN | {"data": data, "eval": measured}))
    name = answer("train", config, *root, "--set", "optim.steps=2")["cell"]
    by_position = ["eval", name, *root, "--by-position"]
    assert titans([*by_position, "--rows", "16"]) == 0
    folder, lines = tmp_path / "runs" / "cells" / name, capsys.readouterr().out.rstrip().splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1].endswith(str(folder / "by-position.png"))
    assert (folder / "by-position.png").stat().st_size > 5000
    rows = [line.split() for line in lines if (line.strip()[:1].isdigit() and "±" in line) or " - " in line]
    places = ["1-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129-256", "257-512"]
    assert [row[0] for row in rows] == places
    path = tmp_path / "own.txt"
    path.write_text("a text of my own " * 9)
    read = answer(*by_position, "--read", path)
    assert (read["texts"], read["tokens"], read["row"]) == (1, 4 * 32, 32)
    assert read["gain"] == pytest.approx(read["loss"]["fresh"] - read["loss"]["carried"])
    assert read["figures"][0] == str(folder / "by-position-own-txt.png")
    for wrong, message in [
        ([*by_position, "--rows", "1"], "--rows: 1 is too few"),
        ([*by_position, "--rows", "9", "--read", str(path)], "ask for at most 4 rows or give a longer text"),
        ([*by_position, "--read", str(tmp_path / "no.txt")], "--read: no file, folder or match for"),
        (["eval", name, *root, "--rows", "9"], "--rows: works only with --by-position"),
    ]:
        assert message in refused(*wrong)
