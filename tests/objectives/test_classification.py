"""Sequence classification: reading, splitting, invariance to padding, and where a run starts."""

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from tests.data.small import drawing
from tests.small import run_name
from titans_core import ConvClassifier, SequenceClassifier
from titans_core.presets import preset
from titans_platform import cli
from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.objectives import build_objective
from titans_platform.objectives.classification import SCHEMA, divide, load_items, read_file
from titans_platform.runs.execute import execute
from titans_platform.runs.load import check_start, spec_for
from titans_platform.training.checkpoint import load_model, newest

RUN: dict[str, Any] = {
    "model": {
        "variant": "hyena", "vocab_size": 8, "d_model": 16, "n_layers": 1, "mlp_expansion": 1.0,
        "options": {"length": 32, "filter_width": 8},
    },
    "data": {"tokenizer": "dna", "sequence_length": 25},
    "objective": {"kind": "classification", "options": {"path": "motif.csv"}},
    "optim": {"steps": 60, "global_batch_size": 16, "lr": 1e-2},
    "eval": {"items": 999, "columns": {"accuracy": [{"task": "accuracy"}], "loss": [{"task": "class_loss"}]}},
}  # fmt: skip
ROOT = Path("runs")


def items(n: int = 300, seed: int = 0, motif: str = "AAAAAAA") -> list[tuple[str, int]]:
    """Sequences of 12 to 24 letters, two in five with a motif of seven in them."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        text = "".join(rng.choices("ACGT", k=rng.randint(12, 24)))
        label = int(i % 5 < 2)
        if label:
            place = rng.randrange(len(text) - 6)
            text = text[:place] + motif + text[place + 7 :]
        rows.append((text, label))
    return rows


def write(path: Path, rows: list[tuple[str, int]]) -> Path:
    path.write_text("sequence,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return path


def config(run: dict[str, Any] = RUN, **options: Any) -> RunConfig:
    given = {"kind": "classification", "options": RUN["objective"]["options"] | options}
    return RunConfig.model_validate_json(json.dumps(run | {"objective": given}))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "motif.csv", items())
    return tmp_path


def test_motif_is_learnt_after_pretraining_and_a_run_goes_on_from_a_checkpoint():
    cfg = config(pretrain_steps=10, path="motif.csv")
    objective = build_objective(cfg)
    objective.check(objective.prepare(ROOT))
    spec = spec_for(cfg, ROOT)
    first = execute(spec)
    assert first.chance["accuracy"] == pytest.approx(0.6, abs=0.15)
    assert first.columns["accuracy"] > first.chance["accuracy"] + 0.15
    assert first.columns["loss"] < first.chance["loss"] - 0.1
    # a classifier is no language model for others, though it is made of one
    assert cli.run(["export", spec.name, "out", "--root", "runs"]) == 2
    (spec.folder.path / "result.json").unlink()
    for path in list((spec.folder.path / "checkpoints").glob("step-*"))[1:]:
        path.rename(path.with_name(f"gone-{path.name}"))
    assert execute(spec).columns == first.columns


def test_steps_of_pretraining_are_next_tokens_of_the_training_part():
    objective = build_objective(config(pretrain_steps=2))
    stream = objective.prepare(ROOT).train_stream(drawing(8))
    before, after = stream.batch(1), stream.batch(2)
    assert (before.labels == -1).all()
    assert (after.labels >= 0).all()
    model = objective.build_model()
    losses = objective.losses(model, before)
    assert losses.mean().item() == pytest.approx(2.3, abs=1.5)
    alone = type(before)(before.tokens[0, : before.lengths[0]][None], before.lengths[:1], before.labels[:1])
    torch.testing.assert_close(objective.losses(model, alone), losses[:1])
    losses.sum().backward()
    # every weight has a gradient, as workers that exchange them need
    assert {p.grad is None for p in model.parameters()} == {False}
    assert objective.losses(model, after).tolist() == pytest.approx([0.6931] * 8, abs=1e-3)


@pytest.mark.parametrize(("variant", "pooling"), [
    *((v, "mean") for v in ("lmm", "mac", "mag", "transformer", "mamba", "based", "hyena", "cnn")),
    ("lmm", "last"), ("mac", "last"),
])  # fmt: skip
def test_padding_changes_nothing(variant, pooling):
    torch.manual_seed(0)
    if variant == "cnn":
        model: Any = ConvClassifier(8, 3, length=80, pad=6)
    else:
        model = SequenceClassifier(preset("laptop", variant, 8), 3, pooling)
    model = model.double().eval()
    torch.nn.init.normal_(model.classifier.weight)
    tokens, lengths = torch.randint(0, 5, (3, 70)), torch.tensor([70, 23, 1])
    together = model(tokens, lengths_B=lengths).logits
    for row, length, expected in zip(tokens, lengths, together, strict=True):
        alone = model(row[None, :length], lengths_B=length[None]).logits[0]
        torch.testing.assert_close(alone, expected, rtol=1e-9, atol=1e-9)
    other = torch.where(torch.arange(70) < lengths[:, None], tokens, 7)
    torch.testing.assert_close(model(other, lengths_B=lengths).logits, together, rtol=1e-12, atol=1e-12)


def test_run_begins_from_a_language_model_with_a_new_head(folder):
    (folder / "dna.jsonl").write_text("".join(json.dumps({"sequence": text}) + "\n" for text, _ in items()))
    language = RUN | {
        "data": RUN["data"] | {"sources": [{"kind": "files", "path": "dna.jsonl", "text_field": "sequence"}]},
        "objective": {"kind": "next_token"}, "optim": {"steps": 3, "global_batch_size": 4},
        "eval": {"columns": {}},
    }  # fmt: skip
    first = RunConfig.model_validate_json(json.dumps(language))
    build_objective(first).prepare(ROOT)
    spec = spec_for(first, ROOT)
    execute(spec)
    point = newest(spec.folder.path / "checkpoints")
    cfg = config().model_copy(update={"start_from": str(point)})
    check_start(cfg)
    assert run_name(cfg, ROOT) != run_name(config(), ROOT)
    model, trained = build_objective(cfg).build_model(), build_objective(first).build_model()
    load_model(point, model)
    load_model(point, trained)
    weights = trained.state_dict()
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in weights.items())
    assert set(model.state_dict()) - set(weights) == {"classifier.weight", "classifier.bias"}


def test_equal_sequences_stay_together_and_a_split_is_that_of_its_seed():
    whole = pa.table([[text for text, _ in items(100)] * 2, ["0"] * 200], schema=SCHEMA)
    left, out = divide(whole, 0.25, seed=1)
    assert (len(left), len(out)) == (150, 50)
    assert not set(left["sequence"].to_pylist()) & set(out["sequence"].to_pylist())
    assert divide(whole, 0.25, seed=1) == (left, out) != divide(whole, 0.25, seed=2)


def test_files_of_each_part_and_kind_and_a_dataset_by_name_are_read(folder):
    rows = items(20, seed=3)
    lines = "".join(json.dumps({"text": text, "kind": f"k{label}"}) + "\n" for text, label in rows)
    (folder / "test.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    expected = pa.table([[text for text, _ in rows], [f"k{label}" for _, label in rows]], schema=SCHEMA)
    assert read_file("test.jsonl.gz", ("text", "kind"), "f") == expected
    (folder / "CODES.CSV").write_text("sequence,label\n010,01\n011,1\nA,\n")
    with pytest.raises(UsageError, match=r"CODES\.CSV has no label in row 2"):
        read_file("CODES.CSV", SCHEMA.names, "f")
    (folder / "CODES.CSV").write_text("sequence,label\n010,01\n011,1\n")
    assert read_file("CODES.CSV", SCHEMA.names, "f") == pa.table([["010", "011"], ["01", "1"]], schema=SCHEMA)
    write(folder / "test.csv", rows)
    data = build_objective(config(test_path="test.csv", validation_path="test.csv")).prepare(ROOT)
    assert (data.split["test"], len(data.labels["train"])) == (data.split["validation"], 300)
    assert data.classes == ["0", "1"]
    (folder / "set").mkdir()
    for split, count in (("train", 200), ("test", 50)):
        text = write(folder / "rows.csv", items(count, seed=len(split))).read_text()
        (folder / "set" / f"{split}.csv").write_text(text.replace("sequence", "seq", 1))
    data = build_objective(config(path=None, dataset=str(folder / "set"))).prepare(ROOT)
    assert [len(data.labels[part]) for part in ("train", "validation", "test")] == [180, 20, 50]
    named = build_objective(config(path=None, dataset="human_ocr_ensembl")).options
    assert named.hub_name == "katarinagresova/Genomic_Benchmarks_human_ocr_ensembl"
    assert named.fields == ("seq", "label")


def test_run_is_named_by_what_its_files_hold_which_are_read_once(folder):
    write(folder / "same.csv", items())
    assert run_name(config(path="same.csv"), ROOT) == run_name(config(), ROOT)
    assert run_name(config(path="same.csv", folder=str(folder)), ROOT) == run_name(config(), ROOT)
    assert run_name(config(pooling="last"), ROOT) != run_name(config(), ROOT)
    write(folder / "same.csv", items(seed=1))
    assert run_name(config(path="same.csv"), ROOT) != run_name(config(), ROOT)
    objective = build_objective(config(path="motif.csv"))
    made = objective.prepare(folder / "once")
    (folder / "motif.csv").unlink()
    assert objective.open(folder / "once").fingerprint == made.fingerprint
    (stored,) = (folder / "once/data/labelled").glob("*.parquet")
    stored.write_bytes(b"not parquet")
    with pytest.raises(UsageError, match="damaged"):
        load_items(stored)


@pytest.mark.parametrize(("changes", "says"), [
    ({"objective.options.path": None}, "objective.options.path: give a file of sequences and labels, or"),
    ({"objective.options.path": "none.csv"}, "objective.options.path: none.csv cannot be read"),
    ({"objective.options.label_field": "kind"}, "motif.csv has no column kind; it has sequence, label"),
    ({"objective.options.validation_fraction": 0.001}, "validation_fraction: leaves validation no sequence"),
    ({"objective.options.classes": 3}, r"objective.options.classes: 3, but the data have 2"),
    ({"data.sequence_length": 20}, "data.sequence_length: a row of 20 tokens .* set it to 25"),
    ({"objective.options.pretrain_steps": 60}, "objective.options.pretrain_steps: all 60 of optim.steps"),
    ({"objective.options.network": "cnn", "objective.options.pretrain_steps": 1},
     "pretrain_steps: network cnn predicts no next tokens"),
    ({"objective.options.network": "cnn"}, "data.sequence_length: 25 tokens are too few for three"),
    ({"model.vocab_size": 4}, "model.vocab_size: 4 is less than the 8 of tokenizer"),
    ({"eval.columns.accuracy.0.lengths": [2]}, "lengths: sequences have the lengths they have"),
    ({"data.sources": [{"kind": "corpus", "weight": 2}]}, "data.sources: objective class"),
    ({"objective.options.test_fraction": 0.95}, "validation_fraction: with test_fraction all"),
])  # fmt: skip
def test_wrong_config_is_one_line(folder, refused, changes, says):
    (folder / "run.yaml").write_text(json.dumps(RUN))
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    assert re.search(says, refused("train", "run.yaml", "--root", "runs", *sets))
