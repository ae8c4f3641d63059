"""Data that changed after a run was named for them: text, task files and tokenizers are known by content."""

import json
import os
import shutil
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.data.small import config
from tests.small import RUN, trained
from titans_platform import load_run
from titans_platform.cli import run
from titans_platform.config import RunConfig
from titans_platform.data import load_tokenizer, prepare
from titans_platform.data.tokenizer import train_tokenizer
from titans_platform.objectives import build_objective
from titans_platform.objectives.base import DataChanged
from titans_platform.runs.execute import Worker
from titans_platform.runs.load import spec_for

SEA, CODE = "the sea was at http://a.b/c" * 200, "zwoelf Boxkaempfer jagen Vi" * 200
PPL = {"perplexity_tokens": 512, "columns": {"ppl": [{"task": "perplexity"}]}}


def source(path: Path, **fields) -> dict:
    return {"kind": "files", "path": str(path), "validation_fraction": 0.2} | fields


def run_on(path: Path, **data) -> dict:
    return {"data": {"sequence_length": 32, "sources": [source(path)]} | data, "eval": PPL}


def same_times(path: Path, text: str) -> None:
    """Replace a text by one of equal size, and put its times back."""
    stat = path.stat()
    path.write_text(text)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def renamed(path: Path, text: str) -> None:
    """Rename another file of equal size and times over it."""
    other, stat = path.with_suffix(".new"), path.stat()
    other.write_text(text)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


@pytest.fixture
def served(tmp_path):
    """Address of a server of the folder, which states sizes and times but no hash."""
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("change", [same_times, renamed])
@pytest.mark.parametrize("kind", ["text", "record", "url", "http", "dataset"])
def test_text_of_equal_size_and_times_is_prepared_anew(kind, change, tmp_path, served):
    (folder := tmp_path / "texts").mkdir()
    path = folder / ("train.jsonl" if kind in ("record", "dataset") else "a.txt")
    texts = [json.dumps({"text": t}) for t in (SEA, CODE)] if path.suffix == ".jsonl" else [SEA, CODE]
    path.write_text(texts[0])
    os.utime(path, (1, 1))
    named = {"url": f"file://{path}", "http": f"{served}/texts/a.txt"}.get(kind, path)
    data = config({"kind": "hub", "dataset": str(folder)} if kind == "dataset" else source(named), length=32)
    before = prepare(data, tmp_path / "r").fingerprint
    change(path, texts[1])
    assert prepare(data, tmp_path / "r").fingerprint != before
    change(path, texts[0])
    assert prepare(data, tmp_path / "r").fingerprint == before


@pytest.mark.parametrize("named", ["babi", "./babi", "babi/qa1_test.txt"])
def test_file_that_an_evaluation_reads_is_part_of_the_name(named, tmp_path, monkeypatch, answer, refused):
    monkeypatch.chdir(tmp_path)
    path, story = Path("babi/qa1_test.txt"), "1 Mary went home.\n2 Where is Mary?\thome\t1\n"
    path.parent.mkdir()
    path.write_text(story)
    options = {"path": named, "kind": "qa1", "split": "test"}
    measured = {"items": 1, "columns": {"qa": [{"task": "babi", "lengths": [2], "options": options}]}}
    cell = trained(tmp_path, eval=measured)
    cfg = RunConfig.model_validate_json(json.dumps(RUN | {"eval": measured}))
    spec = spec_for(cfg, tmp_path, labels={"study": "of cells that wait"})
    assert (spec.name, Worker(spec).cfg) == (cell.name, cfg)
    same_times(path, story.replace("Mary", "John"))
    assert spec_for(cfg, tmp_path).name != spec.name
    with pytest.raises(DataChanged, match="has changed; run the command again"):
        Worker(spec)
    assert "--other-data" in refused("eval", cell, "--root", tmp_path)
    assert answer("eval", cell, "--root", tmp_path, "--other-data")["columns"]["qa"] is not None


def test_run_trains_on_the_data_it_was_named_for(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(SEA)
    cfg = RunConfig.model_validate_json(json.dumps(RUN | run_on(path)))
    objective = build_objective(cfg)
    objective.prepare(tmp_path)
    spec = spec_for(cfg, tmp_path)
    path.write_text(CODE)
    assert objective.prepare(tmp_path).fingerprint != spec.data
    assert objective.reopen(tmp_path, spec.data).fingerprint == spec.data
    for index in tmp_path.glob("data/index/data-*"):
        index.unlink()
    with pytest.raises(DataChanged, match="run the command again"):
        objective.reopen(tmp_path, spec.data)


def test_evaluation_reads_the_data_of_the_run_or_needs_a_flag(tmp_path, answer, refused):
    path = tmp_path / "a.txt"
    path.write_text(SEA)
    ask = ("eval", trained(tmp_path, **run_on(path)), "--root", tmp_path)
    before = answer(*ask)["columns"]["ppl"]
    path.write_text(CODE)
    build_objective(RunConfig.model_validate_json(json.dumps(RUN | run_on(path)))).prepare(tmp_path)
    assert answer(*ask)["columns"]["ppl"] == before
    for index in tmp_path.glob("data/index/data-*"):
        index.unlink()
    assert "--other-data" in refused(*ask)
    assert answer(*ask, "--other-data")["columns"]["ppl"] > 2 * before
    shutil.rmtree(tmp_path / "data")
    assert "--other-data" in refused(*ask)


@pytest.mark.parametrize("change", ["moved", "edited", "same times", "folder", "lost copy"])
def test_run_keeps_its_tokenizer(change, tmp_path, monkeypatch, refused, capsys):
    monkeypatch.chdir(tmp_path)
    path, text, named = Path("tok.json"), tmp_path / "a.txt", {"model": RUN["model"] | {"vocab_size": 272}}
    text.write_text(SEA)
    path.write_text(train_tokenizer([SEA], 272))
    mine = load_tokenizer("tok.json").fingerprint
    cell = trained(tmp_path, **run_on(text, tokenizer="tok.json"), **named)
    match change:
        case "moved":
            path.rename("elsewhere.json")
        case "edited":
            path.write_text(train_tokenizer([CODE], 272))
        case "same times":
            same_times(path, train_tokenizer([CODE], 272))
        case "folder":
            (tmp_path / "below").mkdir()
            monkeypatch.chdir(tmp_path / "below")
        case "lost copy":
            (cell / "tokenizer.json").write_text(train_tokenizer([CODE], 272))
            assert "no intact copy of its tokenizer" in refused("export", cell, "out")
            return
    assert load_run(cell)[1].fingerprint == mine
    assert run(["export", str(cell), "out"]) == 0
    assert f"tokenizer {mine};" in Path("out/README.md").read_text()
    exported = json.loads(Path("out/tokenizer.json").read_text())["model"]
    assert exported == json.loads((cell / "tokenizer.json").read_text())["model"]
    capsys.readouterr()
    by_position = ["eval", cell, "--root", tmp_path, "--by-position", "--rows", 2, "--read", text]
    assert run([*map(str, by_position)]) == 0
