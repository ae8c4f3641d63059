"""`titans chat` and `titans generate` with a model of `titans adapt`; other commands name what to use."""

import pytest
import torch

from titans_platform.cli import run
from titans_platform.cli.adapt import _convert
from titans_platform.data.tokenizer import load_tokenizer, write_tokenizer

transformers = pytest.importorskip("transformers")
adapt = pytest.importorskip("titans_core.adapt")
chat = pytest.importorskip("titans_core.adapt.chat")

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    source, out = (tmp_path_factory.mktemp("chat") / name for name in ("source", "out"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=260,
        eos_token_id=256, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    write_tokenizer(load_tokenizer("byte"), source)
    about = {"data": None, "length": 48, "rows": {"transfer": 1, "tune": 1}, "threads": 1}
    _convert(str(source), out, adapt.MemoryOptions(window=16, sinks=2), about)
    return str(out)


def test_sessions_are_continued_forked_rolled_back_listed_and_deleted(model, capsys):
    def told(*words):
        assert run(["chat", model, "--max-new-tokens", "6", *words]) == 0
        out, err = capsys.readouterr()
        return out, err.strip().splitlines()[-1:]

    told("--session", "anna", "--say", "My name is Anna.")
    second = told("--session", "anna", "--say", "And yours?")
    assert "anna, turn 2: " in second[1][0]
    assert told("--session", "anna", "--fork", "bert")[1] == [second[1][0].replace("anna", "bert")]
    assert "anna, turn 1: 23 tokens" in told("--session", "anna", "--rollback", "1")[1][0]
    assert told("--session", "anna", "--say", "And yours?") == second
    told("--session", "bert", "--rollback", "1")
    assert told("--session", "bert", "--say", "And yours?")[0] == second[0]
    listed = told("--list")[0].splitlines()
    assert [line.partition(":")[0] for line in listed] == [
        f"{n}, turn {i}" for n in ("anna", "bert") for i in (1, 2)
    ]
    assert [line.partition(":")[2] for line in listed[:2]] == [line.partition(":")[2] for line in listed[2:]]
    told("--session", "bert", "--delete")
    assert "bert" not in told("--list")[0]
    for words, message in (
        (["--session", "none", "--delete"], "no session none; there are anna"),
        (["--session", "anna", "--rollback", "3"], "turn: 3, but session anna has 2"),
    ):
        assert run(["chat", model, *words]) == 2
        assert f"{model}: {message}" in capsys.readouterr().err


def test_turns_of_a_template_are_the_text_of_the_whole_chat(model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert chat.turn_text(tokenizer, "Hi", True) == chat.turn_text(tokenizer, "Hi", False) == "Hi"
    tokenizer.chat_template = CHATML
    said = [
        {"role": role, "content": text}
        for role, text in (("user", "Hi"), ("assistant", "Ho"), ("user", "No"))
    ]
    turns = chat.turn_text(tokenizer, "Hi", True), chat.turn_text(tokenizer, "No", False)
    assert "Ho".join(turns) == tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert "".join(chat.decoded(tokenizer, "né€😀".encode())) == "né€😀"


def test_generate_takes_the_model_and_commands_for_runs_refuse_it(model, capsys, tmp_path):
    words = ["--max-new-tokens", "6", "--memory-out", str(tmp_path / "m")]
    assert run(["generate", model, "--prompt", "The quick brown fox", *words]) == 0
    assert run(["generate", model, "--prompt", "?", *words, "--memory-in", str(tmp_path / "m")]) == 0
    assert "after 33 tokens" in capsys.readouterr().err
    for command in (["eval"], ["inspect", "--text", __file__], ["export", "x"]):
        assert run([command[0], model, *command[1:]]) == 2
        assert "a transformers model, and not a run; give the run" in capsys.readouterr().err.splitlines()[-1]
    assert run(["chat", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: ")
