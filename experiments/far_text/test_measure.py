"""Readings of a text, held to plain passes over it."""

import csv
import json
import lzma
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from experiments.far_text import measure, novels
from experiments.tables import section, table
from titans_core import LanguageModel
from titans_core.interventions import Intervention, intervene
from titans_core.presets import preset
from titans_platform.evals.by_position import LongText
from titans_platform.evals.ngrams import NGrams
from titans_platform.evals.scoring import Scorer


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(measure, "BEYOND", 64)
    monkeypatch.setattr(measure, "BLOCK", 16)
    monkeypatch.setattr(measure, "READ", {"256": 16, "1k": 32})


@pytest.fixture
def texts():
    rng = np.random.default_rng(0)
    return [LongText(rng.integers(0, 256, 129), np.ones(128, bool)) for _ in range(3)]


@torch.no_grad()
def test_readings_are_the_losses_of_plain_passes(short, texts):
    torch.manual_seed(0)
    model = LanguageModel(preset("smoke")).eval()
    tokenizer: Any = SimpleNamespace(vocab_size=260)
    read = measure.read(Scorer(model, tokenizer, torch.device("cpu"), 64), texts)

    def plain(tokens: np.ndarray) -> np.ndarray:
        row = torch.from_numpy(tokens)[None]
        return cast(torch.Tensor, model(row[:, :-1], targets_BT=row[:, 1:]).losses)[0].numpy()

    for text, *losses in zip(texts, *read.losses.values(), strict=True):
        given = dict(zip(read.losses, losses, strict=True))
        assert given["all"] == pytest.approx(plain(text.tokens)[64:], abs=1e-5)
        with intervene(model, Intervention(memory=False)):
            assert given["off"] == pytest.approx(plain(text.tokens)[64:], abs=1e-5)
        for name, before in (("256", 16), ("1k", 32)):
            first = 64 + 16 * 2
            block = plain(text.tokens[first - before : first + 17])[before:]
            assert given[name][32:48] == pytest.approx(block, abs=1e-5)


def test_cache_of_a_reading_counts_only_what_it_read(short, texts):
    ngrams = NGrams((texts[0].tokens[None], texts[0].counts[None]), vocab_size=260)
    p = measure.cached(ngrams, texts, 32)
    first = 64 + 16 * 3
    block = ngrams.cached(texts[1].tokens[None, first - 32 : first + 17])[0, 32:]
    np.testing.assert_allclose(p[1, 48:], block)
    np.testing.assert_allclose(
        measure.cached(ngrams, texts, None)[2], ngrams.cached(texts[2].tokens[None])[0, 64:]
    )


@torch.no_grad()
def test_gain_over_ngrams_has_its_error_over_texts(short, texts, monkeypatch):
    torch.manual_seed(0)
    tokenizer: Any = SimpleNamespace(vocab_size=260)
    scorer = Scorer(LanguageModel(preset("smoke")).eval(), tokenizer, torch.device("cpu"), 64)
    counted = NGrams((texts[0].tokens[None], texts[0].counts[None]), vocab_size=260)
    monkeypatch.setattr(measure.FarText, "texts", lambda self, context: texts)

    def measured(ngrams: NGrams | None, **options: str) -> Any:
        task = measure.FarText(measure.FarTextOptions.model_validate(options))
        return task.measure(cast(Any, SimpleNamespace(scorer=scorer, ngrams=lambda: ngrams)))

    losses_NP = measure.read(scorer, texts).losses["1k"]
    floors_NP = -np.log(measure.cached(counted, texts, 32))
    gain = measured(counted, read="1k", less="ngrams")
    each_N = (floors_NP - losses_NP).mean(1)
    assert gain.value == pytest.approx(each_N.mean(), abs=1e-5)
    assert gain.stderr == pytest.approx(each_N.std(ddof=1) / np.sqrt(3), rel=1e-5)
    assert measured(counted, read="1k").floor == pytest.approx(floors_NP.mean(), rel=1e-5)
    assert np.isnan(measured(None, read="1k", less="ngrams").value)


def test_last_seen_is_the_distance_to_the_same_token():
    assert measure.last_seen(np.array([5, 7, 5, 5, 7])).tolist() == [0, 0, 2, 1, 3]


def test_novels_begin_a_document_and_count_every_token(tmp_path):
    with lzma.open(tmp_path / "texts.jsonl.xz", "wt") as file:
        file.writelines(json.dumps({"text": letter * 20}) + "\n" for letter in "abc")
    tokenizer = SimpleNamespace(bos=256, encode=lambda text: list(text.encode()))
    context: Any = SimpleNamespace(scorer=SimpleNamespace(tokenizer=tokenizer), length=8)
    task = novels.Novels(novels.NovelsOptions(file=str(tmp_path / "texts.jsonl.xz")))
    texts = task.texts(context)
    assert [text.tokens.tolist() for text in texts] == [[256, *[ord(letter)] * 8] for letter in "abc"]
    assert all(text.counts.all() and len(text.counts) == 8 for text in texts)


def test_table_of_novels_equals_its_file():
    folder = Path(__file__).parent
    headings = {"1024": "On novels", "4096": "On novels, after 16.78M tokens"}
    tables = {steps: table(section(folder / "README.md", heading)) for steps, heading in headings.items()}
    columns = ("read_256", "read_1k", "read_4k", "read_all", "far_gain", "far_tokens", "far_tokens_256")
    keys = (*columns, "memory_off")
    with (folder / "novels.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 8
    for line in lines:
        row, steps, _ = line["row"].rsplit(" ", 2)
        for cell, key in zip(tables[steps][row], keys, strict=True):
            value, stderr = line[f"{key} (nats)"], line[f"{key} stderr (nats)"]
            places = 4 if key == "far_gain" else 3
            assert cell == (f"{float(value):.{places}f}±{float(stderr):.{places}f}" if value else "—")
