"""`titans chat` and `titans generate` with a model of `titans adapt`; other commands name what to use."""

from pathlib import Path

import pytest
from pandas import read_feather

from tests.objectives.test_adapt import write_source
from titans_platform.cli import run
from titans_platform.cli.adapt import _convert

transformers = pytest.importorskip("transformers")
adapt = pytest.importorskip("titans_core.adapt")
chat = pytest.importorskip("titans_core.adapt.chat")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    settings = {"data": None, "lora": 0, "length": 48, "rows": [1, 1], "threads": 1}
    source = write_source(folder / "source", initializer_range=0.2)
    _convert(str(source), folder / "out", adapt.MemoryOptions(window=16, sinks=2), settings)
    return str(folder / "out")


def test_sessions_are_continued_forked_rolled_back_listed_and_deleted(model, capsys):
    def command(*words):
        assert run(["chat", model, "--max-new-tokens", "6", *words]) == 0
        out, err = capsys.readouterr()
        return out, err.strip().splitlines()[-1:]

    command("--session", "anna", "--say", "My name is Anna.")
    second = command("--session", "anna", "--say", "And yours?")
    assert "anna, turn 2: " in second[1][0]
    assert command("--session", "anna", "--fork", "bert")[1] == [second[1][0].replace("anna", "bert")]
    assert "anna, turn 1: 23 tokens" in command("--session", "anna", "--rollback", "1")[1][0]
    assert command("--session", "anna", "--say", "And yours?") == second
    command("--session", "bert", "--rollback", "1")
    assert command("--session", "bert", "--say", "And yours?")[0] == second[0]
    turns, states = zip(*(line.split(":") for line in command("--list")[0].splitlines()), strict=True)
    assert turns == ("anna, turn 1", "anna, turn 2", "bert, turn 1", "bert, turn 2")
    assert states[:2] == states[2:]
    command("--session", "bert", "--delete")
    assert "bert" not in command("--list")[0]
    for words, message in (
        (["--session", "none", "--delete"], "no session none; there are anna"),
        (["--session", "anna", "--rollback", "3"], "turn: 3, but session anna has 2"),
    ):
        assert run(["chat", model, *words]) == 2
        assert f"{model}: {message}" in capsys.readouterr().err
    assert run(["chat", model, "--session", "anna", "--list", "--delete"]) == 2
    assert "--list, --delete: exclude each other" in capsys.readouterr().err
    assert "anna" in command("--list")[0]
    command("--session", "anna", "--fork", "bert")
    (Path(model) / "sessions" / "anna" / "000002.memory").write_bytes(b"half")
    assert run(["chat", model, "--list"]) == 2
    out, err = capsys.readouterr()
    assert out.count("bert, turn") == 2
    assert "000002.memory: damaged" in err


def test_turns_of_a_template_are_the_text_of_the_whole_chat(model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert chat.turn_text(tokenizer, "Hi", True) == chat.turn_text(tokenizer, "Hi", False) == "Hi"
    tokenizer.chat_template = "{% for m in messages %}<{{m.role}}>{{m.content}}</>\n{% endfor %}<assistant>"
    turns = ("user", "Hi"), ("assistant", "Ho"), ("user", "No")
    messages = [{"role": role, "content": text} for role, text in turns]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = chat.turn_text(tokenizer, "Hi", True), chat.turn_text(tokenizer, "No", False)
    assert "Ho".join(turns) == whole
    assert "".join(chat.decoded(tokenizer, "né€😀".encode())) == "né€😀"


def test_generate_takes_the_model_and_commands_for_runs_refuse_it(model, capsys, tmp_path):
    words = ["--max-new-tokens", "6", "--memory-out", str(tmp_path / "m")]
    assert run(["generate", model, "--prompt", "The quick brown fox", *words]) == 0
    assert run(["generate", model, "--prompt", "?", *words, "--memory-in", str(tmp_path / "m")]) == 0
    assert "after 33 tokens" in capsys.readouterr().err
    for command in (["eval"], ["export", "x"]):
        assert run([command[0], model, *command[1:]]) == 2
        assert "a transformers model, and not a run; give the run" in capsys.readouterr().err.splitlines()[-1]
    page, table = tmp_path / "page.html", tmp_path / "table.arrow"
    assert run(["inspect", model, "--text", __file__, "--out", str(page), "--arrow", str(table)]) == 0
    frame = read_feather(table)
    assert (frame["gain"][1 : 1 + 16].abs() < 1e-5).all()
    assert frame["gain"].abs().max() > 1e-4
    assert "memory and kept tokens lower the loss" in page.read_text()
    assert run(["chat", str(tmp_path)]) == 2
    assert f"error: {tmp_path}: has no config.json; give a folder" in capsys.readouterr().err
