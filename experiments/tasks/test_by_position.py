"""The task gives the gain and perplexities of reading by hand, and refuses what it cannot measure."""

import json
import math

import pytest
import torch

from tests.evals.test_by_position import BYTE, scorer
from tests.small import RUN, texts
from titans_core import LanguageModel
from titans_platform.config import DataConfig, EvalConfig, RunConfig, TaskConfig
from titans_platform.data import prepare
from titans_platform.errors import UsageError
from titans_platform.evals import evaluate
from titans_platform.evals.by_position import long_texts, read_by_position
from titans_platform.objectives import build_objective
from titans_platform.tasks import build_task

TASK = "experiments.tasks.by_position:ByPositionTask"


@pytest.fixture
def prepared(tmp_path):
    contents = (f"text number {part:02d}; " * 60 for part in range(20))
    source = texts(tmp_path / "texts", *contents, validation_fraction=0.3)
    fields = RUN["data"] | {"sources": [source]}
    return prepare(DataConfig.model_validate_json(json.dumps(fields)), tmp_path)


def columns(lengths=(8.0,), **options):
    return {"col": (TaskConfig(task=TASK, options=options, lengths=lengths),)}


def test_by_position_task_measures_gain_and_perplexities(prepared):
    def measured(**options):
        config = EvalConfig(columns=columns(**options), perplexity_tokens=1024)
        return evaluate(model, prepared, config, 32)

    torch.manual_seed(0)
    model = LanguageModel(RunConfig.model_validate({"model": RUN["model"]}).model)
    with torch.no_grad():
        by_hand = read_by_position(scorer(model.eval()), long_texts(prepared, 8, 1024), 32)
    gain = measured(windows=[1, 2])
    task = gain["tasks"]["col/by_position-gain@256"]
    assert (task["value"], task["stderr"]) == pytest.approx(by_hand.gain())
    assert task["chance"] == 0
    assert task["items"] == sum(text.counts[32:].sum() for text in long_texts(prepared, 8, 1024))
    buckets = gain["buckets"]["col/by_position-gain@256"]
    assert {key.partition(" ")[0].partition("-")[0] for key in buckets} == {"carried", "fresh", "window"}
    assert buckets["fresh 129-256"] == pytest.approx(math.exp(by_hand.loss("fresh", 129, 256)[0]))
    measurement = measured(measure="carried", from_row=3, to_row=4)
    task = measurement["tasks"]["col/by_position-carried-3-4@256"]
    loss, stderr = by_hand.loss("carried", 65, 128)
    assert task["value"] == pytest.approx(math.exp(loss))
    assert task["stderr"] == pytest.approx(math.exp(loss) * stderr)
    assert task["chance"] == BYTE.vocab_size
    buckets = measurement["buckets"]["col/by_position-carried-3-4@256"]
    assert {key.partition(" ")[0] for key in buckets} == {"carried"}
    assert json.loads(json.dumps(gain)) == gain


BAD = [
    ({"lengths": (1.0,)}, "lengths: 32 tokens are less than two training rows of 32; raise it"),
    ({"lengths": (200.0,)}, r"lengths: 200 training rows of 32 tokens make 6,400 .* text has 5,765; ask for "
     r"at most 180 rows or raise a text source's validation_fraction"),
    ({"to_row": 9}, "to_row: 9 is beyond the 8 rows of a text; raise lengths"),
    ({"from_row": 4, "to_row": 3}, "to_row: 3 is below from_row 4"),
    ({"measure": "window", "windows": []}, "windows: measure window needs at least one"),
    ({"measure": "window", "windows": [7, 8]}, "windows: 7 rows before another are all that 8 rows have"),
    ({"measure": "carry"}, "measure: "),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD)
def test_unmeasurable_options_are_refused_before_training(prepared, tiny_run, options, message):
    fields = {"data": prepared.config, "eval": EvalConfig(columns=columns(**options))}
    with pytest.raises(UsageError, match=message):
        build_objective(tiny_run.model_copy(update=fields)).check(prepared)


def test_data_without_held_out_text_raise_usage_error(tiny_run, tmp_path):
    items = prepare(tiny_run.data, tmp_path)
    with pytest.raises(UsageError, match="longest held-out text has 0; raise a text source's"):
        build_task(columns()["col"][0]).texts(items, 256)
