"""An exported model in transformers' Trainer and pipeline, in lm-evaluation-harness and in peft."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.small import RUN, trained
from titans_core.pretrained import load_folder
from titans_platform.cli import run

transformers = pytest.importorskip("transformers")
pytest.importorskip("titans_core.huggingface")

# their own dependencies warn
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
LENGTHS = [64, 9, 33, 50, 2, 17, 64, 28]
load = transformers.AutoModelForCausalLM.from_pretrained
TEXTS = ["Call me Ishmael", "Some years ago - never mind how long", "I", "went to sea." * 6]


@pytest.fixture(scope="module", params=["lmm", "mac"])
def folder(request, tmp_path_factory) -> Path:
    model = RUN["model"] | {"variant": request.param, "attention": {"heads": 2, "segment_size": 16}}
    cell = trained(tmp_path_factory.mktemp("root"), model=model, optim=RUN["optim"] | {"steps": 4})
    out = tmp_path_factory.mktemp("exported") / "out"
    assert run(["export", str(cell), str(out)]) == 0
    return out


@pytest.fixture
def tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def rows(ragged):
    lengths = LENGTHS if ragged else [64] * 8
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 256, (n,), generator=generator).tolist()} for n in lengths]


def trainer(model, tokenizer, ragged, tmp_path, compute_metrics=None, **options):
    options |= {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    args = transformers.TrainingArguments(str(tmp_path), **options)
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    data = {"train_dataset": rows(ragged), "eval_dataset": rows(ragged), "data_collator": collator}
    return transformers.Trainer(model, args, compute_metrics=compute_metrics, **data)


def one_step(model, tokenizer, micro, accumulated, ragged, tmp_path, **options):
    """Loss and gradient norm of a step of Trainer on the same eight rows."""
    options |= {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulated}
    options |= {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "max_grad_norm": 1e9}
    hf_trainer = trainer(model, tokenizer, ragged, tmp_path, **options)
    hf_trainer.train()
    return next([log["loss"], log["grad_norm"]] for log in hf_trainer.state.log_history if "grad_norm" in log)


@pytest.mark.parametrize(("side", "width", "rel"), [
    ("full", None, [1e-4, 1e-4]), ("right", None, [1e-4, 1e-4]),
    ("left", None, [1e-3, 3e-3]), ("left", 72, [1e-3, 3e-3]),
])  # fmt: skip
def test_trainers_step_does_not_depend_on_its_micro_batches(side, width, rel, folder, tokenizer, tmp_path):
    pad, tokenizer.padding_side, ragged = tokenizer.pad, "left" if side == "left" else "right", side != "full"
    if width:
        tokenizer.pad = partial(pad, padding="max_length", max_length=width)
    whole, divided = (one_step(load(folder), tokenizer, *d, ragged, tmp_path) for d in [(8, 1), (2, 4)])
    batch = pad(rows(ragged), return_tensors="pt", padding_side="right")  # has the mean of any padding
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    (model := load(folder))(**batch, labels=labels).loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    assert whole == pytest.approx([model(**batch, labels=labels).loss.item(), norm], rel=1e-4)
    near = [pytest.approx(x, rel=bound) for x, bound in zip(whole, rel, strict=True)]
    assert divided == near  # norms of LlamaForCausalLM, padded on the left: to 1.3e-2


def test_trainer_recomputes_activations_and_evaluates_padded_batches(folder, tokenizer, tmp_path):
    plain = one_step(load(folder), tokenizer, 4, 2, True, tmp_path)
    assert one_step(load(folder), tokenizer, 4, 2, True, tmp_path, activation_checkpointing=True) == plain
    smoothed = one_step(load(folder), tokenizer, 4, 2, True, tmp_path, label_smoothing_factor=1e-6)
    assert smoothed == pytest.approx(plain, rel=1e-4)
    seen, few = [], {"per_device_eval_batch_size": 3}
    hf_trainer = trainer(load(folder), tokenizer, True, tmp_path, lambda x: seen.append(x) or {}, **few)
    assert hf_trainer.evaluate()["eval_loss"] > 0
    assert (seen[0].predictions.shape, (seen[0].label_ids != -100).sum()) == ((8, 64, 260), sum(LENGTHS))


def test_pipeline_writes_the_same_for_a_batch_as_for_each_text(folder, tokenizer):
    writer = transformers.pipeline("text-generation", model=load(folder), tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    alone = [writer(text, **options)[0]["generated_text"] for text in TEXTS]
    assert [out[0]["generated_text"] for out in writer(TEXTS, batch_size=4, **options)] == alone
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    ours = load_folder(folder).generate(prompts, 8, stop=[tokenizer.eos_token_id])
    assert [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ours] == alone
    never = writer(TEXTS[1], stop_strings=["no such text"], tokenizer=tokenizer, **options)
    assert never[0]["generated_text"] == alone[1]


def test_harness_scores_and_writes_as_each_text_alone(folder, tokenizer):
    harness = pytest.importorskip("lm_eval.models.huggingface", reason="pip install lm-eval")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    lm = harness.HFLM(pretrained=load(folder), tokenizer=tokenizer, batch_size=3)
    model, pairs = load_folder(folder), [(text, " to sea") for text in TEXTS]
    scores = lm.loglikelihood([instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    for (text, more), (score, greedy) in zip(pairs, scores, strict=True):
        context, whole = (tokenizer(x)["input_ids"] for x in (text, text + more))
        logits = model(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)
        target = torch.tensor(whole[len(context) :])
        taken = logits[-len(target) :]
        assert score == pytest.approx(taken.gather(-1, target[:, None]).sum().item(), rel=1e-4)
        assert greedy == bool((taken.argmax(-1) == target).all())
    asked = [(text, {"until": ["."], "max_gen_toks": 6}) for text in TEXTS]
    written = lm.generate_until([instance("generate_until", {}, each, i) for i, each in enumerate(asked)])
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    expected = model.generate(prompts, 6, stop=[tokenizer.eos_token_id])
    assert written == [tokenizer.decode(x, skip_special_tokens=True).partition(".")[0] for x in expected]


def test_peft_trains_saves_and_merges_an_adapter(folder, tokenizer, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")
    torch.manual_seed(0)
    adapter = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    net = peft.get_peft_model(load(folder), adapter)
    before = {name: p.clone() for name, p in net.named_parameters()}
    one_step(net, tokenizer, 4, 2, True, tmp_path / "t", activation_checkpointing=True, learning_rate=0.1)
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    batch = tokenizer.pad(rows(True), return_tensors="pt")
    expected = net.eval()(**batch).logits
    net.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval()
    torch.testing.assert_close(again(**batch).logits, expected)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-3, atol=1e-3)
    merged.save_pretrained(tmp_path / "merged")
    logits = load_folder(tmp_path / "merged")(batch["input_ids"][:1]).logits
    torch.testing.assert_close(logits, expected[:1], rtol=1e-3, atol=1e-3)
