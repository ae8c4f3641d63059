"""Validation loss during training: logged, displayed, and without effect on the numbers."""

import json
import math
from copy import deepcopy
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.small import RUN, changed
from titans_core.presets import preset
from titans_platform.cli.live import progress_line
from titans_platform.config import RunConfig
from titans_platform.data import prepare
from titans_platform.errors import StorageError, UsageError
from titans_platform.evals import evaluate
from titans_platform.objectives import OBJECTIVES, build_objective
from titans_platform.objectives.next_token import NextToken
from titans_platform.runs.execute import Worker
from titans_platform.runs.load import find_checkpoint, load_checkpoint, read_config, spec_for
from titans_platform.runs.spec import Tracking
from titans_platform.tracking import open_store
from titans_platform.training import checkpoint
from titans_platform.training.checkpoint import saved, step_of, write_manifest

NUMBERS = ("columns", "final_train_loss", "telemetry")


def run_on(book: Path, variant: str = "lmm", **evaluation) -> RunConfig:
    values, source = deepcopy(RUN), {"kind": "files", "path": str(book), "validation_fraction": 0.3}
    values["data"] = {"sequence_length": 32, "sources": [source]}
    values["model"] = preset("smoke", variant, vocab_size=260).model_dump(mode="json")
    values["optim"]["steps"] = 5
    values["eval"] = {"columns": {"ppl": [{"task": "perplexity"}]}, "perplexity_tokens": 128} | evaluation
    return RunConfig.model_validate_json(json.dumps(values))


@pytest.mark.parametrize("variant", ["lmm", "mag"])
def test_it_changes_no_number_and_no_name(book, tmp_path, variant):
    plain, watched = run_on(book, variant), run_on(book, variant, every=2)
    prepare(plain.data, tmp_path)
    specs = [spec_for(cfg, tmp_path) for cfg in (plain, watched)]
    assert specs[0].name == specs[1].name
    named = (("a", plain), ("b", watched))
    results = [Worker(spec_for(cfg, tmp_path, name=name)).run() for name, cfg in named]
    assert [getattr(results[0], key) for key in NUMBERS] == [getattr(results[1], key) for key in NUMBERS]


def test_it_is_logged_and_progress_line(book, tmp_path):
    cfg = run_on(book, every=2)
    prepare(cfg.data, tmp_path)
    store = open_store(tmp_path)
    spec = spec_for(cfg, tmp_path, tracking=Tracking(store.uri, "watched"))
    result = Worker(spec).run()
    history = store.client.get_metric_history(str(result.mlflow_run_id), "validation_loss")
    curve = [(point.step, point.value) for point in history]
    # every second step, and the last one
    assert [step for step, _ in curve] == [2, 4, 5]
    assert math.exp(curve[-1][1]) == pytest.approx(result.columns["ppl"], rel=1e-6)
    assert f"validation {curve[-1][1]:.3f}" in progress_line(spec.folder.progress())


@pytest.mark.parametrize(("best", "every", "due"), [(True, 1, 1), (False, 1, 1), (True, 3, 100)])
def test_checkpoint_of_the_lowest_loss_is_kept_when_not_due(book, tmp_path, monkeypatch, best, every, due):
    cfg = changed(run_on(book, every=every), checkpoint={"every": due, "keep": 1, "best": best})
    prepare(cfg.data, tmp_path)
    losses = [math.nan, 2.0, 3.0, 2.0, 4.0] if every == 1 else [2.0, 3.0]
    monkeypatch.setattr(Worker, "_validation_loss", Mock(side_effect=losses))
    spec = spec_for(cfg, tmp_path)
    result, step = Worker(spec).run(), 2 if every == 1 else 3
    assert (result.best_step, result.best_validation_loss) == ((step, 2.0) if best else (None, None))
    assert {step_of(path) for path in saved(spec.folder.path / "checkpoints")} == ({step, 5} if best else {5})


def test_best_weights_are_measured_and_training_may_end_without_better_ones(book, tmp_path, monkeypatch):
    cfg = run_on(book, every=1, at="best", patience=2)
    prepare(cfg.data, tmp_path)
    # a fifth is never requested
    monkeypatch.setattr(Worker, "_validation_loss", Mock(side_effect=[5.0, 2.0, 3.0, 4.0]))
    spec = spec_for(cfg, tmp_path)
    result = Worker(spec).run()
    assert (result.best_step, result.tokens) == (2, 4 * cfg.tokens_per_step)
    assert result.final_train_loss > 0
    # the run name resolves to the weights that were measured
    point = find_checkpoint(spec.name, tmp_path)
    assert step_of(point) == 2
    model, _, objective = load_checkpoint(point, read_config(point))
    data, length = objective.open(tmp_path), cfg.data.sequence_length
    assert evaluate(model, data, cfg.eval, length)["columns"] == result.columns
    newest, _, _ = load_checkpoint(saved(point.parent)[0], cfg)
    assert evaluate(newest, data, cfg.eval, length)["columns"] != result.columns


def test_weights_of_an_early_stop_are_kept(book, tmp_path, monkeypatch):
    cfg = changed(run_on(book, every=1, patience=2), checkpoint={"every": 100})
    prepare(cfg.data, tmp_path)
    monkeypatch.setattr(Worker, "_validation_loss", Mock(side_effect=[5.0, 2.0, 3.0, 4.0]))
    spec = spec_for(cfg, tmp_path)
    assert Worker(spec).run().tokens == 4 * cfg.tokens_per_step
    assert step_of(find_checkpoint(spec.name, tmp_path)) == 4


def test_best_weights_are_written_though_a_write_fails(book, tmp_path, monkeypatch):
    cfg, failed = run_on(book, every=1, at="best"), []

    def once(path, progress):
        if progress.step == 2 and not failed:
            failed.append(path)
            raise StorageError("disk full")
        write_manifest(path, progress)

    prepare(cfg.data, tmp_path)
    monkeypatch.setattr(Worker, "_validation_loss", Mock(side_effect=[5.0, 2.0, 3.0, 4.0, 3.0]))
    monkeypatch.setattr(checkpoint, "write_manifest", once)
    spec = spec_for(cfg, tmp_path)
    assert Worker(spec).run().best_step == 2
    assert failed
    assert step_of(find_checkpoint(spec.name, tmp_path)) == 2


def test_streams_name_where_the_best_is_looked_for_and_are_refused_elsewhere(book):
    names = {run_on(book, every=n, **at).fingerprint("d", "e") for n in (1, 2) for at in ({}, {"at": "best"})}
    assert len(names) == 3
    with pytest.raises(ValueError, match=r"eval\.at: best needs eval\.every"):
        run_on(book, at="best")
    with pytest.raises(ValueError, match=r"optim\.bptt_rows: 2 has no effect on shuffled rows"):
        RunConfig.model_validate_json('{"optim": {"bptt_rows": 2}}')
    assert [name for name, kind in OBJECTIVES.items() if kind.carries] == ["next_token"]


def test_without_held_out_rows_or_such_a_loss_it_is_refused_by_name(tiny_run, tmp_path):
    watched, data = changed(tiny_run, eval={"every": 5}), prepare(tiny_run.data, tmp_path)
    build_objective(tiny_run).check(data)
    with pytest.raises(UsageError, match=r"^data\.sources: 0 validation tokens"):
        build_objective(watched).check(data)

    class Mine(NextToken):
        validation_task = None

    with pytest.raises(UsageError, match=r"^eval\.every: objective next_token has no validation_task"):
        Mine(watched, Mine.Options()).check()


@pytest.mark.parametrize(("data", "optim", "expected"), [
    ({}, {}, 64), ({"rows": "streams"}, {}, 500 * 64), ({"rows": "streams"}, {"bptt_rows": 2}, 500 * 128),
    # of 32 * 500 * 0.05 stretches the longest is about ln(800) / 0.05 rows
    ({"rows": "streams"}, {"reset_probability": 0.05}, 134 * 64),
])  # fmt: skip
def test_how_far_training_carries_a_state(data, optim, expected):
    config = {"data": {"sequence_length": 64} | data, "optim": {"steps": 500} | optim}
    assert RunConfig.model_validate_json(json.dumps(config)).trained_context == expected


EXACT = {"heads": 2, "depth": 1, "chunk_size": 1, "momentum": False, "surprise_bound": None}


@pytest.mark.parametrize(("changed", "message"), [
    ({"variant": "transformer", "attention": {"heads": 2}}, "data.rows: the state of variant transformer"),
    ({"variant": "hyena"}, None), ({"memory": {"heads": 2, "chunk_size": 16, "backend": "triton"}}, None),
    ({"memory": {**EXACT, "rule": "gated_delta", "backend": "online"}}, None),
    ({"memory": {"heads": 2, "chunk_size": 24}},
     "data.sequence_length: streams are reset between rows of 32"),
])  # fmt: skip
def test_streams_need_a_state_that_can_be_carried(changed, message, monkeypatch):
    monkeypatch.setattr("titans_kernels.memory.forms.triton.refusal.INTERPRETED", False)
    fields = {"model": RUN["model"] | changed, "data": RUN["data"] | {"rows": "streams"}}
    cfg = RunConfig.model_validate_json(json.dumps(RUN | fields))
    if message is None:
        return build_objective(cfg).check()
    with pytest.raises(UsageError, match=f"^{message}"):
        build_objective(cfg).check()
