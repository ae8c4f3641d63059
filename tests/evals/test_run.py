"""`evaluate`: an oracle scores 1, a guesser chance; items are unseen, the same for every model."""

import json
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.evals.small import BYTE, Oracle, config, prepared
from tests.small import texts
from titans_core import LanguageModel
from titans_platform.config import DataConfig, EvalConfig, TaskConfig
from titans_platform.data import Batch, prepare
from titans_platform.errors import UsageError
from titans_platform.evals import evaluate
from titans_platform.tasks import Item, build_generated


class Guesser(nn.Module):
    """Says one of `alphabet` at random."""

    def __init__(self, alphabet: str):
        super().__init__()
        self.ids = torch.tensor([ord(c) for c in alphabet])
        self.rng = torch.Generator().manual_seed(0)

    def forward(self, tokens, document_starts=None):
        picks = self.ids[torch.randint(len(self.ids), tokens.shape, generator=self.rng)]
        return SimpleNamespace(logits=nn.functional.one_hot(picks, BYTE.vocab_size).float())


def solve_needle(text):
    asked = re.search(r"\?([A-Z]):(\w*)$", text)
    if not asked:
        return None
    key, prefix = asked.groups()
    value = re.search(rf"{key}:(\w+);", text)
    return value.group(1)[len(prefix)] if value and len(prefix) < len(value.group(1)) else None


def solve_recall(text):
    before = text[:-1].rfind(text[-1:]) if text[-1:].isupper() else -1
    return text[before + 1] if before >= 0 else None


COMPACT = {"style": "compact"}
SOLVED = [
    ("needle", {**COMPACT, "kind": "uuid", "needles": 3, "queries": 2}, solve_needle, "0123456789abcdef"),
    ("recall", {"values": 16, "rebind": 0.5}, solve_recall, "0123456789abcdef"),
]


@pytest.mark.parametrize(("task", "options", "solve", "alphabet"), SOLVED)
def test_oracle_is_right_every_time_and_a_guesser_at_chance(task, options, solve, alphabet):
    right = evaluate(Oracle(solve), prepared(), config(task, options, (1.0, 2.0), items=12), 48)
    assert right["columns"] == {"col": 1.0}
    assert [(t["items"], t["stderr"]) for t in right["tasks"].values()] == 2 * [(12, 0)]
    guessed = evaluate(Guesser(alphabet), prepared(), config(task, options, items=600), 64)
    chance, ((_, measured),) = guessed["chance"]["col"], guessed["tasks"].items()
    assert measured["floor"] >= measured["chance"] == chance
    assert (measured["heuristic"] is None) == (measured["floor"] == chance)
    p = measured["value"]
    assert abs(p - chance) < 4 * math.sqrt(chance * (1 - chance) / 600)
    # with several answers an item, items and not answers are what is drawn
    assert measured["stderr"] <= math.sqrt(p * (1 - p) / 600) + 1e-12


def test_answer_with_a_wrong_token_is_wrong_and_standard_errors_are_binomial():
    def half(text):
        token = solve_needle(text)
        return "x" if token and not text.endswith(":") else token

    result = evaluate(Oracle(half), prepared(), config("needle", COMPACT, items=5), 48)
    assert result["columns"]["col"] == 0.0
    calls = iter(range(10**6))
    sometimes = lambda text: (answer := solve_recall(text)) and (answer if next(calls) % 3 else None)  # noqa: E731
    recall = config("recall", {"pairs": 1, "queries": 1}, items=30)
    result = evaluate(Oracle(sometimes), prepared(), recall, 24)
    (measured,) = result["tasks"].values()
    p = measured["value"]
    assert 0 < p < 1
    assert measured["stderr"] == pytest.approx(math.sqrt(p * (1 - p) / 30), rel=1e-12)


def test_result_is_json_and_a_function_of_the_seed_from_one_forward_a_batch():
    def run(seed):
        return evaluate(Guesser("0123"), prepared(), config("recall", {}, items=40, seed=seed), 64)

    assert json.dumps(run(1)) == json.dumps(run(1))
    assert run(1) != run(2)
    oracle = Oracle(solve_needle)
    evaluate(oracle, prepared(), config("needle", COMPACT, items=10, batch_tokens=4 * 48), 48)
    assert oracle.shapes == [(4, 47), (4, 47), (2, 47)]


def test_items_of_the_training_rows_are_never_asked():
    options = {"style": "compact", "digits": 1}
    made = build_generated(TaskConfig(task="needle", options=options))
    # so short that a quarter of all items is in training
    seen = {made.item(random.Random(i), 14, BYTE).hash for i in range(2000)}
    asked: list[str] = []

    class Listener(Guesser):
        def forward(self, tokens, document_starts=None):
            asked.extend(BYTE.decode(row) for row in tokens.tolist())
            return super().forward(tokens)

    evaluate(Listener("0"), prepared(seen), config("needle", options, items=200), 14)
    assert len(asked) == len(set(asked)) == 200
    assert not {made.item(random.Random(i), 14, BYTE).text[:-1] for i in range(2000)} & set(asked)


def test_task_that_training_used_up_and_missing_rows_are_refused():
    everything = type("Everything", (frozenset,), {"__contains__": lambda *_: True})()
    with pytest.raises(UsageError, match=r"every item of needle-passkey at 48 tokens occurs in training"):
        evaluate(Guesser("0"), prepared(everything), config("needle", COMPACT), 48)
    for batches, lengths, message in (
        ((), (1.0,), "no validation rows"),
        ([text_batch("^abc")], (2.0,), "validation rows have 3 tokens"),
    ):
        with pytest.raises(UsageError, match=message):
            evaluate(Bigram(), prepared(batches=batches), config("perplexity", {}, lengths), 3)


def test_modes_are_restored_after_a_failure_and_bad_tasks_fail_before_measuring():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[0].eval()
    with pytest.raises(TypeError):
        evaluate(model, prepared(), config("needle", COMPACT, items=1), 48)
    assert [m.training for m in model.modules()] == [True, False, True]
    columns = {"a": (TaskConfig(task="recall"),), "b": (TaskConfig(task="recal"),)}
    oracle = Oracle(solve_recall)
    with pytest.raises(UsageError, match="did you mean recall"):
        evaluate(oracle, prepared(), EvalConfig(columns=columns), 48)
    assert not oracle.shapes


def test_columns_are_means_of_tasks_and_their_names_differ():
    options = COMPACT, COMPACT | {"digits": 1}, COMPACT | {"kind": "number", "needles": 2}
    twice, *once = (TaskConfig(task="needle", options=each) for each in options)
    long = twice.model_copy(update={"lengths": (1.0, 2.0)}), *once
    columns = {"long": long, "recall": (TaskConfig(task="recall"),)}
    result = evaluate(Guesser("0123456789"), prepared(), EvalConfig(columns=columns, items=50), 48)
    names = ["needle-passkey@48", "needle-passkey@96", "needle-passkey-2@48", "needle-number-2-keys@48"]
    assert list(result["tasks"]) == [f"long/{name}" for name in names] + ["recall/recall@48"]
    values = [result["tasks"][f"long/{name}"]["value"] for name in names]
    assert result["columns"]["long"] == pytest.approx((sum(values[:2]) / 2 + values[2] + values[3]) / 3)
    assert result["chance"] == {"long": pytest.approx((0.01 + 0.1 + 0.01) / 3), "recall": 1 / 16}


class Bigram(nn.Module):
    """Gives the byte after `a` as `b` with probability 3/4; everything else is uniform."""

    def __init__(self):
        super().__init__()
        self.starts: list[torch.Tensor | None] = []

    def forward(self, tokens, document_starts=None):
        self.starts.append(document_starts)
        logits = torch.zeros(*tokens.shape, BYTE.vocab_size)
        logits[tokens == ord("a")] = math.log(0.25 / (BYTE.vocab_size - 1))
        logits[..., ord("b")][tokens == ord("a")] = math.log(0.75)
        return SimpleNamespace(logits=logits)


def text_batch(text, rows=1):
    """A batch whose `^` are document starts."""
    tokens = torch.tensor([[BYTE.bos if c == "^" else ord(c) for c in text]] * rows)
    starts = tokens == BYTE.bos
    return Batch(tokens, starts, ~starts[:, 1:])


def test_perplexity_by_hand():
    model = Bigram()
    result = evaluate(model, prepared(batches=[text_batch("^xab^abcd")]), config("perplexity", {}), 8)
    uniform, sure = math.log(BYTE.vocab_size), -math.log(0.75)
    # targets x a b . a b c d: two sure ones, five uniform ones, the document start not counted
    assert result["columns"]["col"] == pytest.approx(math.exp((2 * sure + 5 * uniform) / 7), rel=1e-5)
    assert (result["chance"]["col"], result["tasks"]["col/perplexity@8"]["items"]) == (BYTE.vocab_size, 7)
    assert model.starts[0].tolist() == [[c == "^" for c in "^xab^abc"]]


def test_perplexity_keeps_to_its_budget_and_cuts_rows():
    batches = [text_batch("^abababab", rows=2), text_batch("^xxxxxxxx", rows=2)]
    result = evaluate(Bigram(), prepared(batches=batches), config("perplexity", {}, perplexity_tokens=16), 8)
    assert result["tasks"]["col/perplexity@8"]["items"] == 16
    half = evaluate(Bigram(), prepared(batches=batches), config("perplexity", {}, (0.5,)), 8)
    assert half["tasks"]["col/perplexity@4"]["items"] == 16
    asked = []

    def validation(rows):
        asked.append(rows)
        return iter([text_batch("^xxxx^xxx", rows=rows)] * 3)

    data = SimpleNamespace(tokenizer=BYTE, item_hashes=frozenset(), validation=validation)
    # a pass holds ten rows of eight targets, one of them a document start, which does not count
    for budget, rows, tokens in ((16, 2, 14), (17, 3, 21), (80, 10, 70), (100, 10, 140)):
        budgeted = config("perplexity", {}, perplexity_tokens=budget, batch_tokens=80)
        result = evaluate(Bigram(), data, budgeted, 8)
        assert (asked.pop(), result["tasks"]["col/perplexity@8"]["items"]) == (rows, tokens)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_under_the_precision_of_training(precision):
    oracle = Oracle(solve_needle)
    evaluate(oracle, prepared(), config("needle", COMPACT, items=2), 64, precision=precision)
    assert oracle.autocast == {precision == "bf16"}


def early(text: str) -> str | None:
    """Solves what stands in the first half of a row of 80."""
    return solve_needle(text) if re.search(r"[A-Z]:\d", text[:40]) else "x"


def test_needles_are_counted_by_depth():
    needle = config("needle", COMPACT, items=120)
    ((key, one),) = evaluate(Oracle(early), prepared(), needle, 80)["buckets"].items()
    assert key == "col/needle-passkey@80"
    assert (one["0-10%"], one["90-100%"]) == (1.0, 0.0)
    # of several questions each has a depth of its own
    several = config("needle", {**COMPACT, "needles": 2, "queries": 2}, items=120)
    ((_, both),) = evaluate(Oracle(early), prepared(), several, 80)["buckets"].items()
    assert list(one) == list(both) == [f"{10 * tenth}-{10 * tenth + 10}%" for tenth in range(10)]
    assert both["0-10%"] > both["90-100%"]
    # a bucket is no part of what an item is
    pieces = (("a", False), ("b", True))
    assert Item(pieces, ("0-10%",)).hash == Item(pieces).hash


def test_rows_beyond_the_budget_of_a_pass_give_what_one_pass_gives(tiny_run, monkeypatch):
    monkeypatch.setattr("titans_platform.evals.scoring.PREFILL_TOKENS", 200)
    monkeypatch.setattr("titans_platform.evals.scoring.MAX_PARALLEL_ROWS", 2)
    torch.manual_seed(0)
    model, passes = LanguageModel(tiny_run.model), []
    model.register_forward_pre_hook(lambda _, args: passes.append(args[0].shape))
    whole = evaluate(model, prepared(), config("needle", COMPACT, items=5, batch_tokens=150), 150)
    assert passes == [(1, 149)] * 5
    passes.clear()
    pieces = evaluate(model, prepared(), config("needle", COMPACT, items=5, batch_tokens=140), 150)
    assert passes == [*[(2, 100), (2, 49)] * 2, (1, 149)]
    assert pieces == whole


def test_throughput_is_a_rate_without_gradients_and_loss_the_logarithm_of_perplexity(tiny_run, tmp_path):
    contents = (f"text number {part}; " * 40 for part in range(20))
    source = texts(tmp_path / "texts", *contents, validation_fraction=0.3)
    fields = tiny_run.data.model_dump(mode="json") | {"sources": [source]}
    data = prepare(DataConfig.model_validate_json(json.dumps(fields)), tmp_path)
    torch.manual_seed(0)
    model = LanguageModel(tiny_run.model)
    speed = TaskConfig(task="throughput", options={"rows": 2, "repeats": 2}, lengths=(1.0, 2.0))
    columns = {"speed": (speed,), "ppl": (TaskConfig(task="perplexity"),), "loss": (TaskConfig(task="loss"),)}
    result = evaluate(model, data, EvalConfig(columns=columns, perplexity_tokens=512), 32)
    assert result["chance"]["speed"] is None
    assert result["columns"]["speed"] > 10
    speeds = {key for key in result["tasks"] if key.startswith("speed")}
    assert speeds == {"speed/throughput@32", "speed/throughput@64"}
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    for part in ("columns", "chance"):
        assert result[part]["loss"] == pytest.approx(math.log(result[part]["ppl"]))
    assert 0 < result["tasks"]["loss/loss@32"]["stderr"] < 1
