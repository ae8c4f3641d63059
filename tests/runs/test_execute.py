"""A cell, real model and data: its files, its refusals, and a kill that leaves no trace in the numbers."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from titans_platform.config import RunConfig
from titans_platform.data import prepare
from titans_platform.errors import UsageError
from titans_platform.objectives import build_objective
from titans_platform.runs.execute import Tracked, cell_name, check, run_cell
from titans_platform.runs.folder import RunFolder
from titans_platform.tracking import open_store
from titans_platform.training.checkpoint import load_model, newest

# what is measured by a clock, or named by the store, differs between two runs of one cell
UNLIKE = {"train_seconds", "eval_seconds", "mlflow_run_id"}


def changed(cfg: RunConfig, **parts) -> RunConfig:
    values = cfg.model_dump(mode="json")
    for part, fields in parts.items():
        values[part] |= fields
    return RunConfig.model_validate_json(json.dumps(values))


def weights_hash(cfg: RunConfig, folder: RunFolder) -> str:
    model = build_objective(cfg).build_model()
    point = newest(folder.path / "checkpoints")
    assert point is not None
    assert load_model(point, model) == cfg.optim.steps
    tensors = (value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(b"".join(tensors)).hexdigest()


def test_a_cell_leaves_its_result_and_is_not_run_again(tiny_run, tmp_path):
    data = prepare(tiny_run.data, tmp_path)
    seen: list[dict] = []
    result = run_cell(tiny_run, tmp_path, extra={"row": "lmm"}, on_progress=seen.append)
    folder = RunFolder(tmp_path, cell_name(tiny_run, data))
    assert folder.result() == json.loads(json.dumps(result))
    assert result["cell"] == folder.name
    assert result["row"] == "lmm"
    assert result["tokens"] == 20 * 4 * 32
    assert result["tasks"]["reasoning/recall@32"]["items"] == 8
    assert 0 < result["final_train_loss"] < 6
    assert {"surprise", "alpha_mean", "theta_mean"} <= result["telemetry"].keys()
    assert [s["phase"] for s in seen][-2:] == ["evaluate", "done"]
    before = (folder.path / "result.json").stat().st_mtime_ns
    assert run_cell(tiny_run, tmp_path) == folder.result()
    assert (folder.path / "result.json").stat().st_mtime_ns == before


def test_the_model_learns_its_batch(tiny_run, tmp_path):
    cfg = changed(tiny_run, optim={"steps": 120, "lr": 1e-2})
    prepare(cfg.data, tmp_path)
    losses: list[float] = []
    run_cell(cfg, tmp_path, on_progress=lambda state: losses.append(state.get("loss", 9.9)))
    assert losses[-1] < 3.0


KILLED = """
import sys
from pathlib import Path
from titans_platform.config import RunConfig
from titans_platform.runs.execute import Tracked, run_cell
cfg = RunConfig.model_validate_json(sys.argv[1])
run_cell(cfg, Path(sys.argv[2]), tracked=Tracked(*sys.argv[3:5]), checkpoint_every=7)
"""


def kill_when(process: subprocess.Popen, path: Path) -> None:
    """SIGKILL the process as soon as there is a file at ``path``."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_killed_and_restarted_it_ends_with_the_same_weights_and_numbers(tiny_run, tmp_path):
    cfg = changed(tiny_run, optim={"steps": 120})
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    data = prepare(cfg.data, straight)
    prepare(cfg.data, broken)
    name = cell_name(cfg, data)
    expected = run_cell(cfg, straight)

    store = open_store(broken)
    tracked = Tracked(store.uri, store.cell_run(name, "killed"))
    folder = RunFolder(broken, name)
    command = [sys.executable, "-c", KILLED, cfg.model_dump_json(), str(broken), tracked.uri, tracked.run_id]
    kill_when(subprocess.Popen(command), folder.path / "checkpoints" / "step-00000014")
    assert folder.result() is None
    result = run_cell(cfg, broken, tracked=tracked)

    assert {k: v for k, v in result.items() if k not in UNLIKE} == {
        k: v for k, v in expected.items() if k not in UNLIKE
    }
    assert weights_hash(cfg, folder) == weights_hash(cfg, RunFolder(straight, name))
    steps = [m.step for m in store.client.get_metric_history(tracked.run_id, "loss")]
    assert len(steps) == len(set(steps))
    assert max(steps) == 120
    assert store.client.get_run(tracked.run_id).info.status == "FINISHED"


def test_a_failed_run_is_marked_in_the_store(tiny_run, tmp_path, monkeypatch):
    name = cell_name(tiny_run, prepare(tiny_run.data, tmp_path))
    store = open_store(tmp_path)
    tracked = Tracked(store.uri, store.cell_run(name, "fails"))
    monkeypatch.setattr("titans_platform.runs.execute.evaluate", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_cell(tiny_run, tmp_path, tracked=tracked)
    assert store.client.get_run(tracked.run_id).info.status == "FAILED"
    assert RunFolder(tmp_path, name).result() is None
    # the training is not lost: only the evaluation is run again
    monkeypatch.undo()
    trained = newest(tmp_path / "cells" / name / "checkpoints")
    monkeypatch.setattr("titans_platform.training.loop.Trainer.step", lambda *a, **k: pytest.fail("trained"))
    assert run_cell(tiny_run, tmp_path, tracked=tracked)["cell"] == name
    assert trained is not None


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"model": {"vocab_size": 100}}, r"model\.vocab_size: 100 is less than the 260"),
        ({"model": {"variant": "lm"}}, r"model\.variant: 'lm' is not one of"),
        ({"eval": {"columns": {"x": [{"task": "recal"}]}}}, r"eval\.columns\.x\.0\.task: .*recall"),
        ({"eval": {"columns": {"x": [{"task": "perplexity"}]}}}, r"data\.sources: 0 validation tokens"),
        (
            {"optim": {"global_batch_size": 1}},
            r"optim\.global_batch_size: 1 rows cannot be shared by 2 workers",
        ),
    ],
)
def test_what_would_fail_after_training_is_found_before(tiny_run, tmp_path, parts, line):
    data = prepare(tiny_run.data, tmp_path)
    check(tiny_run, data, workers=2)
    with pytest.raises(UsageError, match=line):
        check(changed(tiny_run, **parts), data, workers=2)


def test_data_that_is_not_prepared_is_refused(tiny_run, tmp_path):
    with pytest.raises(UsageError, match="titans data prepare"):
        run_cell(tiny_run, tmp_path)
    assert not (tmp_path / "cells").exists()


def test_a_checkpoint_of_another_shape_is_refused(tiny_run, tmp_path):
    prepare(tiny_run.data, tmp_path)
    run_cell(changed(tiny_run, optim={"steps": 2}), tmp_path, "cell")
    (tmp_path / "cells" / "cell" / "result.json").unlink()
    wider = changed(tiny_run, model={"d_model": 32})
    with pytest.raises(
        UsageError, match=r"embedding\.weight is \(260, 16\) in the checkpoint and \(260, 32\)"
    ):
        run_cell(wider, tmp_path, "cell")


def test_threads_and_determinism_are_put_back(tiny_run, tmp_path):
    prepare(tiny_run.data, tmp_path)
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    run_cell(changed(tiny_run, optim={"steps": 1}), tmp_path)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
