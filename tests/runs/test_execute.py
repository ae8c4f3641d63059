"""A cell with a real model and data: its files, its errors, and a kill that changes no number."""

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.small import RUN, changed
from titans_platform.config import RunConfig
from titans_platform.data import prepare
from titans_platform.errors import StorageError, TitansError, UsageError
from titans_platform.objectives import build_objective
from titans_platform.runs.execute import execute
from titans_platform.runs.folder import Busy, RunFolder
from titans_platform.runs.load import spec_for
from titans_platform.runs.spec import Tracking
from titans_platform.tracking import open_store
from titans_platform.training.checkpoint import load_model, newest

# timings and ids of the store differ between two runs of the same cell
UNLIKE = {"train_seconds", "eval_seconds", "peak_rss_bytes", "mlflow_run_id", "finished"}


def run(cfg: RunConfig, root: Path, **fields) -> dict:
    return execute(spec_for(cfg, root, **fields))


def weights_hash(cfg: RunConfig, folder: RunFolder) -> str:
    model, point = build_objective(cfg).build_model(), newest(folder.path / "checkpoints")
    assert load_model(point, model) == cfg.optim.steps
    tensors = (value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(b"".join(tensors)).hexdigest()


def test_cell_leaves_its_result_and_is_not_run_again(tiny_run, tmp_path):
    prepare(tiny_run.data, tmp_path)
    result = run(tiny_run, tmp_path, labels={"row": "lmm"})
    folder = spec_for(tiny_run, tmp_path).folder
    assert (folder.result(), result.cell, result.row) == (result, folder.name, "lmm")
    assert (result.tokens, result.tasks["reasoning/recall@32"].items) == (20 * 4 * 32, 8)
    assert 0 < result.final_train_loss < 6
    assert 10 * 2**20 < result.peak_rss_bytes < 2**40
    assert {"surprise", "alpha_mean", "theta_mean"} <= result.telemetry.keys()
    assert folder.progress()["phase"] == "done"
    attempt = folder.record()["attempt"]
    assert result.seconds <= attempt["ended"] - attempt["began"]
    before = (folder.path / "result.json").stat().st_mtime_ns
    assert run(tiny_run, tmp_path) == folder.result()
    assert (folder.path / "result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_failed_run_is_marked_in_the_store(tiny_run, tmp_path, monkeypatch):
    prepare(tiny_run.data, tmp_path)
    store = open_store(tmp_path)
    spec = spec_for(tiny_run, tmp_path, tracking=Tracking(store.uri, "fails"))
    monkeypatch.setattr("titans_platform.runs.execute.evaluate", lambda *a, **k: 1 / 0)
    with pytest.raises((ZeroDivisionError, TitansError), match="division by zero"):
        execute(spec)
    logged = store.client.get_run(store.find("titans.cell", spec.name))
    assert (logged.info.status, spec.folder.state()) == ("FAILED", "failed")
    wanted = {"titans.commit": spec.commit, "titans.last_failure": "division by zero"}
    assert logged.data.tags.items() >= wanted.items()
    assert "division by zero" in spec.folder.failure()["reason"]
    # training is not repeated; only the evaluation is
    monkeypatch.undo()
    monkeypatch.setattr("titans_platform.training.loop.Trainer.step", lambda *a, **k: pytest.fail("trained"))
    assert execute(spec).cell == spec.name
    assert spec.folder.failure() is None


def full(*arguments, **options):
    raise StorageError("No space left on device")


@pytest.mark.slow
def test_records_that_have_no_room_do_not_replace_the_error_of_the_run(tiny_run, tmp_path, monkeypatch):
    prepare(tiny_run.data, tmp_path)
    monkeypatch.setattr("titans_platform.runs.execute.evaluate", lambda *a, **k: 1 / 0)
    for record in ("record_failure", "record_attempt"):
        monkeypatch.setattr(RunFolder, record, full)
    with pytest.raises((ZeroDivisionError, TitansError), match="division by zero"):
        run(tiny_run, tmp_path)


def test_run_of_another_process_is_left_alone_and_unprepared_data_refused(tiny_run, tmp_path):
    with pytest.raises(UsageError, match="titans data prepare"):
        run(tiny_run, tmp_path)
    assert not (tmp_path / "cells").exists()
    prepare(tiny_run.data, tmp_path)
    spec = spec_for(tiny_run, tmp_path)
    with spec.folder.hold(), pytest.raises(Busy, match="another process works on it"):
        execute(spec, wait=0.1)
    assert spec.folder.failure() is None


def test_a_memory_without_kernels_on_a_gpu_is_refused_before_training(tiny_run, tmp_path, monkeypatch):
    prepare(tiny_run.data, tmp_path)
    monkeypatch.setattr(sys.modules[execute.__module__], "gpu_arch", lambda device: 90)
    with pytest.raises(UsageError, match=r"^model\.memory\.chunk_size: 8 is not one of the kernels'"):
        run(tiny_run, tmp_path)
    named = changed(tiny_run, model={"memory": RUN["model"]["memory"] | {"backend": "chunked"}})
    assert "neural_memory: chunked" in run(named, tmp_path).forms


def test_error_of_all_workers_is_returned_and_of_one_alone_raised(monkeypatch):
    module, ended = sys.modules[execute.__module__], iter([True, False])
    monkeypatch.setattr("ray.train.torch.get_device", lambda: "cpu")
    monkeypatch.setattr(module, "die_with_parent", lambda: None)
    monkeypatch.setattr(module, "all_left", lambda: next(ended))
    monkeypatch.setattr(module, "Worker", full)
    task = {"spec": SimpleNamespace(resources=SimpleNamespace(several=True))}
    assert isinstance(module.run_worker(task), StorageError)
    with pytest.raises(StorageError):
        module.run_worker(task)
