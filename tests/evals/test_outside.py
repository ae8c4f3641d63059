"""A task outside the package, named by its import path, in evaluation and as a source of training rows."""

import pytest

from tests.data import small
from titans_core import LanguageModel
from titans_platform.config import EvalConfig, TaskConfig
from titans_platform.data import prepare
from titans_platform.errors import UsageError
from titans_platform.evals import evaluate
from titans_platform.tasks import build_task


@pytest.fixture
def task(sums) -> TaskConfig:
    return TaskConfig(task=sums)


@pytest.fixture
def data(sums, tmp_path):
    return prepare(small.config({"kind": "task", "rows": 12, "tasks": [{"task": sums}]}, length=16), tmp_path)


def test_equal_tasks_of_two_columns_are_measured_once(task, data, tiny_run, monkeypatch):
    asked, kind = [], type(build_task(task))
    measure = kind.measure
    monkeypatch.setattr(kind, "measure", lambda *args: (asked.append(args[1].length), measure(*args))[1])
    longer = task.model_copy(update={"lengths": (1.0, 2.0)})
    config = EvalConfig(columns={"one": (task,), "mean": (task, longer)}, items=4)
    result = evaluate(LanguageModel(tiny_run.model), data, config, 16)
    tasks = result["tasks"]
    assert (tasks["one/sums@16"]["items"], result["chance"]["one"]) == (4, 1 / 10)
    assert asked == [16, 32]
    assert tasks["one/sums@16"] == tasks["mean/sums@16"] == tasks["mean/sums-2@16"]


@pytest.mark.usefixtures("sums")
def test_import_path_that_is_no_task_is_refused():
    """Other mistakes in such a path: tests/kernels/test_rules.py, of the same registry."""
    says = "^task: my_lab.tasks:SumOptions is not a subclass of titans_platform.tasks"
    with pytest.raises(UsageError, match=says):
        build_task(TaskConfig(task="my_lab.tasks:SumOptions"))
