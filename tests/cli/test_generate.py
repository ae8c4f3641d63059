"""`titans generate`: text on stdout, rates on stderr, memory files between two calls."""

import io
import json
import re
from pathlib import Path

import pytest

from tests.small import RUN, trained
from titans_core.pretrained import load_folder
from titans_platform import load_run
from titans_platform.cli import run
from titans_platform.data import load_tokenizer

BOOK = "Call me Ishmael. Some years ago - never mind how long precisely - I went to sea. " * 4


@pytest.fixture(scope="module")
def cell(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("root"), optim=RUN["optim"] | {"steps": 4})


def generate(capsys, *words: object) -> tuple[str, str]:
    assert run(["generate", *map(str, words)]) == 0
    return capsys.readouterr()


def test_it_prints_the_text_and_on_stderr_how_fast_it_was(cell, capsys):
    line = (cell, "--prompt", "Call me", "--max-new-tokens", 30)
    out, err = generate(capsys, *line)
    assert out.startswith("Call me")
    assert out.endswith("\n")
    assert len("Call me") < len(out) <= len("Call me") + 31
    (report,) = err.splitlines()
    assert re.fullmatch(r"8 tokens read, [\d,]+ a second; \d+ tokens written, [\d,]+ a second", report)
    assert generate(capsys, *line, "--seed", 1)[0] != out
    assert generate(capsys, *line, "--top-k", 1)[0] == generate(capsys, *line, "--temperature", 0)[0]


def test_book_is_read_once_and_continued_later(cell, book, tmp_path, capsys):
    book.write_text(BOOK)
    greedy = ("--temperature", 0, "--max-new-tokens", 12)
    at_once, _ = generate(capsys, cell, "--read", book, "--prompt", "Whale?", *greedy)
    memory, after = tmp_path / "book.memory", tmp_path / "after.memory"
    out, err = generate(capsys, cell, "--read", book, "--max-new-tokens", 0, "--memory-out", memory)
    read = 1 + len(BOOK)
    assert out == ""
    assert err.splitlines()[-1] == f"memory {memory}: {memory.stat().st_size:,} bytes after {read} tokens"
    line = (cell, "--memory-in", memory, "--prompt", "Whale?", *greedy)
    out, err = generate(capsys, *line, "--memory-out", after)
    assert out == at_once
    assert err.startswith("6 tokens read, ")
    assert generate(capsys, *line)[0] == at_once  # the file is as it was
    whole, _ = generate(capsys, cell, "--read", book, "--prompt", "Whale?", *greedy[:3], 20)
    rest, _ = generate(capsys, cell, "--memory-in", after, *greedy[:3], 8)
    assert out[:-1] + rest == whole


def test_text_is_of_stdin_and_memory_of_its_checkpoint(cell, book, capsys, monkeypatch, tmp_path, refused):
    book.write_text(BOOK)
    line = ("--temperature", 0, "--max-new-tokens", 9)
    expected, _ = generate(capsys, cell, "--read", book, *line)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(BOOK.encode())))
    assert generate(capsys, cell, "--read", "-", *line)[0] == expected
    memory = tmp_path / "a.memory"
    generate(capsys, cell, "--prompt", "a", "--max-new-tokens", 0, "--memory-out", memory)
    error = refused("generate", sorted(cell.glob("checkpoints/step-*"))[0], "--memory-in", memory)
    assert error.startswith(f"error: --memory-in {memory}: written by another model")


@pytest.mark.parametrize(("words", "says"), [
    (["--read", "nobody.txt"], "--read nobody.txt: No such file"),
    (["--read", "."], "--read .: Is a directory"), (["--read", "latin"], "--read latin: not UTF-8 at byte 1"),
    (["--memory-in", "nobody"], "--memory-in nobody: cannot be read as a memory file: No such file"),
    (["--memory-in", "latin"], "--memory-in latin: cannot be read as a memory file: "),
    (["--temperature", "nan"], "--temperature: .nan and .inf are not allowed"),
    (["--top-p", "0"], "'--top-p'"), (["--seed", str(2**63)], "--seed: "),
])  # fmt: skip
def test_bad_input_is_one_line(words, says, cell, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    Path("latin").write_bytes(b"a\xe9b")
    assert says in refused("generate", cell, *words)


def test_run_is_handed_over_as_a_folder(cell, tmp_path, capsys, refused):
    out = tmp_path / "out"
    assert run(["export", str(cell), str(out)]) == 0
    names = ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    names += ["tokenizer_config.json"]
    assert [Path(line.split()[0]).name for line in capsys.readouterr().out.splitlines()] == names
    tokenizer = load_tokenizer(str(out / "tokenizer.json"))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["bos_token_id"] == tokenizer.bos
    assert len({(out / name).stat().st_mode for name in names}) == 1
    tokens = tokenizer.encode("Call me")
    model, byte, _ = load_run(cell)
    assert tokens == byte.encode("Call me")
    assert load_folder(out).generate([tokens], 9) == model.generate([tokens], 9)
    assert "is not empty; give another folder" in refused("export", cell, out)


def test_any_tokenizer_will_do(sentencepiece_model, tmp_path, book, capsys):
    book.write_text(BOOK * 30)
    tokenizer = str(sentencepiece_model)
    data = {"sequence_length": 32, "tokenizer": tokenizer, "sources": [{"kind": "files", "path": str(book)}]}
    measured = {"columns": {"lm": [{"task": "perplexity"}]}, "perplexity_tokens": 32}
    sizes = {"model": RUN["model"] | {"vocab_size": 32}, "optim": RUN["optim"] | {"steps": 1}}
    cell = trained(tmp_path / "root", data=data, eval=measured, **sizes)
    _, err = generate(capsys, cell, "--prompt", "Call me", "--max-new-tokens", 20)
    assert err.count(" a second") == 2
    assert run(["export", str(cell), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == sentencepiece_model.read_bytes()
