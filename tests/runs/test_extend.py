"""Runs started from another run's weights, and runs extended by more steps: exact, or a one-line error."""

import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.small import RUN
from titans_platform.config import OptimConfig, RunConfig
from titans_platform.data import prepare
from titans_platform.errors import UsageError
from titans_platform.runs.execute import Worker
from titans_platform.runs.folder import CHECKPOINTS, Result
from titans_platform.runs.load import check_start, checkpoint_of_shorter, load_run, located, spec_for
from titans_platform.runs.spec import RunSpec, Tracking
from titans_platform.tracking import open_store
from titans_platform.training.checkpoint import at_step
from titans_platform.training.optim import equal_steps

NUMBERS = ("columns", "tasks", "final_train_loss", "telemetry", "tokens")


def run_of(steps: int = 8, **optim) -> RunConfig:
    values = deepcopy(RUN)
    values["optim"] |= {"steps": steps, "schedule": "constant", "warmup_steps": 2} | optim
    return RunConfig.model_validate_json(json.dumps(values))


def spec_of(cfg: RunConfig, root: Path, commit: str = "one", **fields) -> RunSpec:
    return spec_for(located(cfg, root), root, commit=commit, **fields)


def train(spec: RunSpec) -> Result:
    with spec.folder.hold():
        spec.folder.begin(spec.commit)
        return Worker(spec).run()


def resumed(spec: RunSpec, shorter: RunConfig) -> RunSpec:
    """The run, to start from a checkpoint of ``shorter``."""
    return replace(spec, start=checkpoint_of_shorter(spec, spec_of(shorter, spec.root).folder))


@pytest.fixture
def root(tmp_path) -> Path:
    prepare(run_of().data, tmp_path)
    return tmp_path


@pytest.mark.parametrize(("first", "then", "step"), [
    (run_of(8), run_of(30), 8),
    # decays after step 12 of 15; the checkpoint before the decay is kept beside the last two
    (run_of(15, schedule="wsd"), run_of(30, schedule="wsd"), 12),
    # may also continue at a constant rate: only the learning rates so far have to agree
    (run_of(15, schedule="wsd"), run_of(30), 12),
])  # fmt: skip
def test_more_steps_end_in_the_numbers_of_a_run_from_the_start(root, tmp_path_factory, first, then, step):
    train(spec_of(first, root))
    spec = resumed(spec_of(then, root), first)
    assert spec.start == at_step(spec_of(first, root).folder.path / CHECKPOINTS, step)
    extended, elsewhere = train(spec), tmp_path_factory.mktemp("straight")
    prepare(then.data, elsewhere)
    straight = train(spec_of(then, elsewhere))
    assert [getattr(extended, key) for key in NUMBERS] == [getattr(straight, key) for key in NUMBERS]
    ours, expected = (load_run(spec.name, where)[0].state_dict() for where in (root, elsewhere))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("first", "then", "why"), [
    (run_of(8, schedule="cosine"), run_of(30, schedule="cosine"), "keeps no checkpoint of its first 3 steps"),
    (run_of(8, warmup_steps=None, warmup_fraction=0.25), run_of(30, warmup_steps=None, warmup_fraction=0.25),
     "it keeps no checkpoint of its first 0 steps, which are equal; give optim.schedule"),
    (run_of(8), run_of(30, lr=1e-3), "its optim.lr is 0.003, this run's 0.001; leave it out to"),
])  # fmt: skip
def test_run_that_cannot_be_resumed_is_refused_with_the_reason(root, first, then, why):
    train(spec_of(first, root))
    spec = spec_of(then, root)
    with pytest.raises(UsageError, match=re.escape(why)) as refused:
        resumed(spec, first)
    assert str(refused.value).startswith(f"--resume-from {spec_of(first, root).name}: ")
    assert "\n" not in str(refused.value)
    assert not spec.folder.path.exists()


def test_run_of_other_code_is_not_resumed_and_a_damaged_checkpoint_passed_over(root):
    train(spec_of(run_of(8), root))
    spec = spec_of(run_of(30), root, commit="two")
    with pytest.raises(UsageError, match="other code trained it"):
        resumed(spec, run_of(8))
    assert not spec.folder.path.exists()
    train(first := spec_of(run_of(8), root))
    file = next(first.folder.path.glob("checkpoints/step-00000008/*.distcp"))
    file.write_bytes(bytes(100) + file.read_bytes()[100:])
    assert resumed(spec_of(run_of(30), root), run_of(8)).start.name == "step-00000007"


def test_curve_in_mlflow_is_whole(root):
    store = open_store(root)
    train(spec_of(run_of(8), root, tracking=Tracking(store.uri, "short")))
    then = spec_of(run_of(30), root, tracking=Tracking(store.uri, "long"))
    run_id = str(train(resumed(then, run_of(8))).mlflow_run_id)
    assert [point.step for point in store.client.get_metric_history(run_id, "loss")] == [*range(1, 31)]
    assert {point.step for point in store.client.get_metric_history(run_id, "reasoning")} == {30}


def test_run_begins_with_the_weights_of_another_which_are_part_of_its_name(root):
    parent = spec_of(run_of(8), root)
    train(parent)
    weights, _, _ = load_run(parent.name, root)
    plain = run_of(1, lr=1e-12, weight_decay=0.0)
    names, points = {spec_of(plain, root).name}, parent.folder.path / "checkpoints"
    for given in (points / "step-00000007", parent.name, parent.folder.path, points / "step-00000008"):
        child = spec_of(plain.model_copy(update={"start_from": str(given)}), root)
        names.add(child.name)
    assert len(names) == 3
    check_start(child.config)
    assert train(child).config["start_from"] == str(points / "step-00000008")
    begun, _, _ = load_run(child.name, root)
    for ours, expected in zip(begun.state_dict().values(), weights.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=0)
    # after a restart it resumes from its own checkpoint
    (child.folder.path / "result.json").unlink()
    assert train(replace(child, labels={"row": "again"})).tokens == 4 * 32


def test_start_that_does_not_fit_is_one_line(root):
    parent = spec_of(run_of(1), root)
    train(parent)
    model = run_of().model.model_copy(update={"d_model": 32})
    wider = run_of(1).model_copy(update={"model": model, "start_from": parent.name})
    with pytest.raises(UsageError, match=r"^start_from: .*embedding\.weight is \(260, 16\) in the"):
        check_start(located(wider, root))
    with pytest.raises(UsageError, match=r"^start_from: nobody: no such run under"):
        located(run_of().model_copy(update={"start_from": "nobody"}), root)
    (root / "empty").mkdir()
    with pytest.raises(UsageError, match=r"^start_from: .*has no checkpoint; train it first"):
        located(run_of().model_copy(update={"start_from": str(root / "empty")}), root)
    with pytest.raises(UsageError, match=r"^start_from: elsewhere is not a checkpoint"):
        run_of().model_copy(update={"start_from": "elsewhere"}).fingerprint("data", "eval")


def test_the_last_tenth_of_a_run_with_several_windows_is_its_own():
    short, long = (OptimConfig(steps=steps, schedule="constant", warmup_steps=2) for steps in (100, 200))
    assert equal_steps(short, long, seed=0) == 100
    short, long = (run.model_copy(update={"windows": (8, 16, 32)}) for run in (short, long))
    # the longest may also be the one that is drawn
    assert 90 <= equal_steps(short, long, seed=0) <= 92
