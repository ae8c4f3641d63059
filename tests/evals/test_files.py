"""Tasks that read files: bAbI, and the adapter to lm-evaluation-harness."""

import gzip
import json
import math
import random
import re
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from tests.evals.small import BYTE, Oracle, config, prepared
from titans_platform.config import TaskConfig
from titans_platform.errors import UsageError
from titans_platform.evals import Scorer, evaluate
from titans_platform.evals.lm_harness import MISSING, HarnessModel
from titans_platform.evals.scoring import encode_pair
from titans_platform.tasks import build_generated, build_task, encode_item
from titans_platform.tasks.items import load_prose

BABI = """1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? \tbathroom\t1
4 Daniel went back to the hallway.
5 Sandra moved to the garden.
6 Where is Daniel? \thallway\t4
1 Sandra travelled to the office.
2 Sandra went to the bathroom.
3 Where is Sandra? \tbathroom\t2
"""


class Likes(nn.Module):
    """Gives `good` bytes a high probability after anything."""

    def __init__(self, good: str):
        super().__init__()
        self.row = torch.zeros(BYTE.vocab_size)
        self.row[list(good.encode())] = 5.0

    def forward(self, tokens, document_starts=None):
        return SimpleNamespace(logits=self.row.expand(*tokens.shape, -1))


def parrot(text: str) -> Oracle:
    """Goes on with ``text`` after its start."""
    return Oracle(lambda before: text.removeprefix(before)[:1] if text.startswith(before) else None).eval()


# --- bAbI


def babi_at(form, folder):
    name = "tasks/en/qa1_single-supporting-fact_train.txt"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text(BABI)
    if form in ("zip", "gztar"):
        return shutil.make_archive(str(folder / "babi"), form, folder, "tasks")
    return folder / ("tasks" if form == "folder" else name)


@pytest.mark.parametrize("form", ["folder", "file", "zip", "gztar"])
def test_babi_questions_come_with_the_story_up_to_them(form, tmp_path):
    task = build_generated(TaskConfig(task="babi", options={"path": str(babi_at(form, tmp_path))}))
    assert {task.item(random.Random(i), 200, BYTE).text for i in range(50)} == {
        "Mary moved to the bathroom.\nJohn went to the hallway.\nWhere is Mary? bathroom",
        "Mary moved to the bathroom.\nJohn went to the hallway.\nDaniel went back to the hallway.\n"
        "Sandra moved to the garden.\nWhere is Daniel? hallway",
        "Sandra travelled to the office.\nSandra went to the bathroom.\nWhere is Sandra? bathroom",
    }
    assert task.chance == 1 / 2


def test_babi_pads_short_stories_and_leaves_out_long_ones(tmp_path):
    task = build_generated(TaskConfig(task="babi", options={"path": str(babi_at("zip", tmp_path))}))
    drawn = {task.item(random.Random(i), 90, BYTE) for i in range(50)}
    assert len(drawn) == 2
    for item in drawn:
        tokens, answers = encode_item(item, BYTE, 90)
        assert tokens[0] == BYTE.bos
        assert BYTE.decode([t for t, a in zip(tokens, answers, strict=True) if a]) == " bathroom"
    with pytest.raises(UsageError, match=r"no story of qa1 .* fits in 20 tokens"):
        task.item(random.Random(0), 20, BYTE)


@pytest.mark.parametrize(("options", "message"), [
    ({"kind": "qa9"}, "no qa9_"), ({"path": "{}/qa1_train.txt"}, "qa1_train.txt, line 2"),
])  # fmt: skip
def test_missing_babi_file_or_question_is_named(options, message, tmp_path):
    (tmp_path / "qa1_train.txt").write_text("1 A went.\nWhere?\n")
    given = {key: value.format(tmp_path) for key, value in options.items()}
    task = build_task(TaskConfig(task="babi", options={"path": str(babi_at("zip", tmp_path)), **given}))
    with pytest.raises(UsageError, match=message):
        _ = task.chance


# --- text and JSON lines


@pytest.mark.parametrize(("content", "message"), [
    ("{", r"p\.jsonl: .* line 1"), ("[]", r"cannot read .*p\.jsonl"), ("", "holds no text"),
    ("{}", "holds no text"),
])  # fmt: skip
def test_bad_records_name_file_and_fault(content, message, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        load_prose(str(path))


def test_prose_and_contexts_have_single_spaces(tmp_path):
    path = tmp_path / "p.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in ("It  rained.", "The\nship sailed."))
    assert load_prose(str(path)) == "It rained. The ship sailed. "
    request = encode_pair("Answer: ", "yes", BYTE)
    assert (BYTE.decode(request.context), BYTE.decode(request.continuation)) == ("Answer:", " yes")


# --- lm-evaluation-harness


def instances(*args):
    return [SimpleNamespace(args=arg) for arg in args]


def harness(model, max_length=50):
    return HarnessModel(Scorer(model, BYTE, torch.device("cpu"), 200), max_length)


@torch.inference_mode()
def test_harness_scores_continuations_and_whole_texts():
    asked = instances(("the", " cat"), ("the", " dog"))
    (first, greedy), (second, not_greedy) = harness(parrot("the cat")).loglikelihood(asked)
    assert (greedy, not_greedy) == (True, False)
    assert first == pytest.approx(0, abs=1e-4)
    assert second < -20
    text = "abcdefghijklmnopqrstuvwxyz"
    a_token = -math.log(BYTE.vocab_size - 26 + 26 * math.exp(5)) + 5
    for length in (4, 5, 26, 27, 28, 100):
        (total,) = harness(Likes(text), length).loglikelihood_rolling(instances((text,)))
        assert total == pytest.approx(26 * a_token, rel=1e-5), length
    assert harness(Likes(text)).loglikelihood_rolling(instances(("",))) == [0.0]


LM_EVAL = config("lm_eval", {"names": ["piqa", "arc_easy"], "metric": "acc"}, items=7)


def test_without_the_extra_the_error_names_its_requirement(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(UsageError, match=f"^{re.escape(MISSING)}$"):
        evaluate(Likes("q"), prepared(), LM_EVAL, 50)
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"pip install '{extras['optional-dependencies']['lm-eval'][0]}'" in MISSING


@pytest.fixture
def fake_lm_eval(monkeypatch):
    """The four names of lm_eval the adapter touches; `asked` is what simple_evaluate was given."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks")
    modules, asked = {name: ModuleType(name) for name in names}, {}

    def simple_evaluate(**arguments):
        asked.update(arguments)
        asked["answers"] = arguments["model"].loglikelihood(instances(("a", "q"), ("a", "b")))
        results = {
            "piqa": {"acc,none": 0.5, "acc_stderr,none": 0.3, "alias": "piqa"},
            "arc_easy": {"acc,none": 0.3, "acc_stderr,none": "N/A", "acc_norm,none": 0.9},
        }
        return {"results": results, "n-samples": {name: {"effective": 7} for name in results}}

    modules["lm_eval"].simple_evaluate = simple_evaluate
    modules["lm_eval.api.model"].LM = type("LM", (), {})
    manager = SimpleNamespace(all_tasks=["piqa", "arc_easy"])
    modules["lm_eval.tasks"].TaskManager = lambda include_path: manager
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return asked


def test_harness_results_become_a_measurement(fake_lm_eval):
    (measured,) = evaluate(Likes("q"), prepared(), LM_EVAL, 50)["tasks"].values()
    levels = {"chance": 0.375, "floor": None, "heuristic": None}
    assert measured == {"value": 0.4, "stderr": 0.15, "items": 14, **levels}
    assert (fake_lm_eval["limit"], fake_lm_eval["tasks"]) == (7, ["piqa", "arc_easy"])
    (good, _), (bad, _) = fake_lm_eval["answers"]
    assert good > bad
    assert isinstance(fake_lm_eval["model"], sys.modules["lm_eval.api.model"].LM)


@pytest.mark.parametrize(("options", "message"), [
    ({"names": ["piqa"], "metric": "f1", "chance": 0.5}, "piqa has no f1; it has acc"),
    ({"names": ["mmlu"]}, "options.chance: give it for mmlu"),
    ({"names": ["arc_esy"], "chance": 0.25}, "no task 'arc_esy'; did you mean arc_easy"),
])  # fmt: skip
def test_harness_options_that_do_not_fit_are_named(options, message, fake_lm_eval):
    with pytest.raises(UsageError, match=message):
        evaluate(Likes("q"), prepared(), config("lm_eval", options), 50)


def test_harness_is_checked_before_training_and_a_perplexity_has_no_chance():
    options = {"names": ["wikitext"], "metric": "word_perplexity"}
    task = build_task(TaskConfig(task="lm_eval", options=options))
    assert math.isnan(task.chance)
    task.check(None, 50, None)
    with pytest.raises(UsageError, match=f"^{re.escape(MISSING)}$"):
        task.check(None, 50, prepared())
    unknown = build_task(TaskConfig(task="lm_eval", options={"names": ["mmlu"]}))
    with pytest.raises(UsageError, match=r"options\.chance: give it for mmlu"):
        unknown.check(None, 50, None)
