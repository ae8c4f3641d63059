"""`titans inspect`: the numbers of a text as a table, and the page that shows them."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.small import RUN, trained
from titans_core import LanguageModel, MemoryTrace, ModelConfig
from titans_platform.cli import run
from titans_platform.data import load_tokenizer
from titans_platform.report import inspect as module
from titans_platform.report.inspect import Inspected, as_frame, inspect_text, page, shades, token_texts

TEXT = 'The pass is 74 — don\'t <b>forget</b> & "tell" no-one.\n</script><script>x</script>\nThe pass is'
ONE_STEP = {"optim": RUN["optim"] | {"steps": 1}}


def small(variant: str = "lmm") -> LanguageModel:
    torch.manual_seed(0)
    model = RUN["model"] | {"variant": variant, "n_layers": 2, "attention": {"heads": 2, "segment_size": 16}}
    return LanguageModel(ModelConfig.model_validate_json(json.dumps(model))).eval()


@pytest.fixture(scope="module")
def inspected() -> dict[str, Inspected]:
    return {v: inspect_text(small(v), load_tokenizer("byte"), TEXT, f"a <{v}>", 2048) for v in ("lmm", "mac")}


@pytest.mark.parametrize("variant", ["lmm", "mac"])
def test_page_has_no_links_escapes_the_text_and_marks_the_last_token(inspected, variant):
    html = page(inspected[variant], "a & b.txt", warning="memory out of range")
    assert not re.search(r"https?://(?!www\.w3\.org)|<(a|link|img|iframe)\b", html)
    assert html.count("<script") == 2
    assert f"a <{variant}>" not in html
    assert ">&lt;</span>" in html
    (chosen,) = re.findall(r"<span[^>]*chosen[^>]*>", html)
    assert f'data-i="{len(inspected[variant].tokens) - 1}"' in chosen
    # gates and errors of two memories
    assert html.count("<svg") == 4
    assert html.index("memory out of range") < html.index("<main>")


def test_page_holds_the_reads_of_every_token(inspected):
    (data,) = re.findall(r"<script[^>]*>({.*?)</script>", page(inspected["mac"], "f"), re.DOTALL)
    data, trace = json.loads(data), inspected["mac"].traces[1]
    assert data["texts"] == inspected["mac"].texts
    labels = [read["label"] for read in data["reads"]]
    assert labels[-1] == "memory 1, head 1, own read"
    assert "memory 1, head 0, segments before" in labels
    near = data["reads"][-1]["near"]
    assert [len(line) for line in near[:6]] == [1, 2, 3, 4, 5, 5]
    assert [at for at, *_ in near[40]] == trace.own.position[40, 1].tolist()
    first = zip(trace.own[1:], (2, 3), strict=True)
    assert near[40][0][1:] == [round(x[40, 1, 0].item(), places) for x, places in first]


def test_colours_stand_a_burst_of_surprise_and_an_overshoot(inspected):
    def shaded(burst):
        trace = inspected["lmm"].traces[0]
        surprise = trace.surprise.clone()
        surprise[burst] *= 1e6
        return shades(replace(inspected["lmm"], traces=[trace._replace(surprise=surprise)]))[0]

    strength = shaded(slice(40, 50))["strength"]
    assert strength[40:50] == [1.0] * 10
    # on a scale up to the burst all others would have strength 0
    assert len(set(strength[:40] + strength[50:])) > 20
    after = shaded(slice(30, None))
    assert after["about"].endswith("logarithmic scale")
    assert max(after["strength"][:30]) < 0.3 < 0.7 < min(after["strength"][30:])


@pytest.mark.parametrize("variant", ["lmm", "mac"])
def test_table_has_a_row_for_each_memory_token_and_head(inspected, variant):
    seen = inspected[variant]
    rows, T = as_frame(seen).to_dict("records"), len(seen.tokens)
    assert len(rows) == 2 * T * 2
    row, trace = rows[(T + 33) * 2 + 1], seen.traces[1]
    place = ["blocks.1.memory", 33, 1, seen.texts[33]]
    assert [row[key] for key in ("memory", "position", "head", "text")] == place
    for name in ("surprise", "final", "alpha", "coefficient"):
        assert row[name] == pytest.approx(getattr(trace, name)[33, 1].item())
    assert math.isnan(row["weight_norm"])
    assert rows[(T + 31) * 2]["weight_norm"] == pytest.approx(trace.weight_norm[31, 0].item())
    assert [key["position"] for key in row["read"]] == trace.own.position[33, 1].tolist()
    assert row["loss"] == pytest.approx(seen.loss[33].item())
    assert math.isnan(rows[0]["loss"])
    assert [len(rows[i]["read"]) for i in (0, 2, 20)] == [1, 2, 5]
    assert rows[0]["context"] == ([] if variant == "mac" else None)


def test_losses_are_those_of_the_model(inspected):
    tokens = torch.tensor([inspected["lmm"].tokens])
    with torch.no_grad():
        logprobs = small()(tokens).logits.log_softmax(-1)
    assert inspected["lmm"].loss[9].item() == pytest.approx(-logprobs[0, 8, tokens[0, 9]].item(), rel=1e-5)
    assert math.isnan(inspected["lmm"].loss[0].item())


def test_kept_shares_bins_and_token_texts_are_as_defined(inspected):
    trace: MemoryTrace = inspected["lmm"].traces[0]
    known = trace._replace(final=torch.zeros_like(trace.final))
    lost = trace._replace(final=2 * trace.surprise)
    assert module.kept_shares([known]).tolist() == [1.0] * len(trace.final)
    assert module.kept_shares([known, lost])[3].item() == 0.5
    values = torch.tensor([1.0, math.nan, 3.0, 5.0, math.nan, 7.0]).numpy()
    assert (module.binned(values, 2), module.binned(values[:0])) == ({2.0: (2.0,), 5.0: (6.0,)}, {})
    assert [module.rounded(value) for value in (241.154, 0.012345, 15_900.0)] == ["241", "0.0123", "15.9K"]
    tokenizer = load_tokenizer("byte")
    tokens = [tokenizer.bos, *tokenizer.encode("aé—b")]
    assert token_texts(tokenizer, tokens) == ["", "a", "", "é", "", "", "—", "b"]
    cut = token_texts(tokenizer, tokens[:-2])
    assert (cut[:-1], cut[-1]) == (["", "a", "", "é", ""], "\ufffd")


@pytest.fixture(scope="module")
def cell(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("root"), **ONE_STEP)


def test_command_is_deterministic(cell, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out, arrow = tmp_path / "sub" / "page.html", tmp_path / "numbers.arrow"
    line = ["inspect", str(cell), "--text", str(text), "--out", str(out), "--arrow", str(arrow)]
    assert run([*line, "--tokens", "30"]) == 0
    assert [entry.split()[0] for entry in capsys.readouterr().out.splitlines()] == [str(out), str(arrow)]
    rows = pd.read_feather(arrow)
    assert (len(rows), rows["read"][0][0].keys()) == (30 * 2, {"position", "similarity", "share"})
    assert "more not read" in out.read_text()
    before = arrow.read_bytes()
    assert run([*line, "--tokens", "30"]) == 0
    assert arrow.read_bytes() == before


def test_bad_input_is_one_line_and_exit_code_2(cell, tmp_path, refused):
    text, empty = tmp_path / "text", tmp_path / "empty"
    text.write_text("some text")
    empty.write_text("")
    bare = trained(tmp_path, **ONE_STEP, model=RUN["model"] | {"variant": "transformer"})
    for words, message in (
        ([cell, "--text", empty], "the file is empty"),
        ([bare, "--text", text], "variant transformer has no neural memory"),
        ([tmp_path / "nowhere", "--text", text], "no such run"),
    ):
        assert message in refused("inspect", *words, "--out", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
