"""A task outside the package, named by its import path, in evaluation and as a source of training rows."""

import json

import pytest

from titans_core import LanguageModel
from titans_platform.config import DataConfig, EvalConfig, TaskConfig
from titans_platform.data import prepare
from titans_platform.errors import UsageError
from titans_platform.evals import evaluate
from titans_platform.tasks import build_generated, build_task, eval_version

TASKS = '''
import random
from titans_core.config import Frozen
from titans_platform.tasks import GeneratedTask, Item

class SumOptions(Frozen):
    largest: int = 4

class Sums(GeneratedTask):
    """The sum of two digits."""

    name = "sums"
    version = 3
    Options = SumOptions

    @property
    def chance(self):
        return 1 / (2 * self.options.largest + 1)

    def item(self, rng: random.Random, length: int, tokenizer) -> Item:
        a, b = (rng.randint(0, self.options.largest) for _ in range(2))
        return Item(((f"{a}+{b}=".rjust(length - 2), False), (str(a + b), True)))

def not_a_task():
    pass
'''


@pytest.fixture
def sums(tmp_path, monkeypatch) -> TaskConfig:
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return TaskConfig(task="my_lab.tasks:Sums")


def test_it_is_trained_on_and_measured_and_its_version_counts(sums, tiny_run, tmp_path, monkeypatch):
    source = {"kind": "task", "rows": 12, "tasks": [sums.model_dump(mode="json")]}
    data = DataConfig.model_validate_json(json.dumps({"sequence_length": 16, "sources": [source]}))
    prepared = prepare(data, tmp_path)
    assert prepared.sources[0].manifest.train.documents == 12
    config = EvalConfig(columns={"col": (sums,)}, items=4)
    found = evaluate(LanguageModel(tiny_run.model), prepared, config, 16)
    assert found["tasks"]["col/sums@16"]["items"] == 4
    assert found["chance"]["col"] == 1 / 9
    before = eval_version(config)
    monkeypatch.setattr(type(build_generated(sums)), "version", 4)
    assert eval_version(config) != before


@pytest.mark.usefixtures("sums")
def test_what_is_no_task_is_refused_by_name():
    """Other mistakes in such a path: tests/kernels/test_rules.py, of the same registry."""
    says = "^task: my_lab.tasks:not_a_task is not a subclass of titans_platform.tasks"
    with pytest.raises(UsageError, match=says):
        build_task(TaskConfig(task="my_lab.tasks:not_a_task"))


def test_what_two_columns_ask_alike_is_measured_once(sums, tiny_run, tmp_path, monkeypatch):
    source = {"kind": "task", "rows": 12, "tasks": [sums.model_dump(mode="json")]}
    data = DataConfig.model_validate_json(json.dumps({"sequence_length": 16, "sources": [source]}))
    prepared, kind = prepare(data, tmp_path), type(build_task(sums))
    asked, measure = [], kind.measure
    monkeypatch.setattr(kind, "measure", lambda *args: (asked.append(args[1].length), measure(*args))[1])
    longer = sums.model_copy(update={"lengths": (1.0, 2.0)})
    config = EvalConfig(columns={"one": (sums,), "mean": (sums, longer)}, items=4)
    found = evaluate(LanguageModel(tiny_run.model), prepared, config, 16)
    assert asked == [16, 32]
    assert found["tasks"]["one/sums@16"] == found["tasks"]["mean/sums@16"] == found["tasks"]["mean/sums-2@16"]
