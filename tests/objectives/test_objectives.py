"""Objectives through the CLI: a series is trained, resumed, evaluated and reported like tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import small
from tests.small import run_name
from titans_platform import cli
from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.files import read_json
from titans_platform.loading import load_config
from titans_platform.objectives import build_objective
from titans_platform.runs import check
from titans_platform.runs.execute import execute
from titans_platform.runs.load import spec_for
from titans_platform.runs.spec import Resources

RUN: dict[str, Any] = {
    "model": {k: v for k, v in small.RUN["model"].items() if k != "vocab_size"} | {"persistent_tokens": 0},
    "data": {"sequence_length": 16},
    "objective": {"kind": "regression", "options": {"sines": 200, "channels": 2, "horizon": 3}},
    "optim": {"steps": 40, "global_batch_size": 8, "lr": 1e-2},
    "eval": {"items": 20, "columns": {"mse": [{"task": "mse"}], "mae": [{"task": "mae", "lengths": [1, 2]}]}},
}
CLOCKS = {"train_seconds", "eval_seconds", "peak_rss_bytes", "mlflow_run_id", "finished"}


def config(**options: Any) -> RunConfig:
    given = {"kind": "regression", "options": RUN["objective"]["options"] | options}
    return RunConfig.model_validate_json(json.dumps(RUN | {"objective": given}))


def sawtooth(path: Path, period: int = 7) -> Path:
    path.write_text("x\n" + "\n".join(str(t % period) for t in range(60)) + "\n")
    return path


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    return tmp_path / "run.yaml"


@pytest.mark.slow
def test_series_trains_resumes_and_is_measured_again(run_yaml, capsys, answer):
    first = answer("train", "run.yaml", "--root", "runs")
    assert first["columns"]["mse"] < 0.8 * first["chance"]["mse"]
    assert first["columns"]["mae"] < first["chance"]["mae"]
    assert first["tasks"].keys() == {"mse/mse@16", "mae/mae@16", "mae/mae@32"}
    assert (first["tasks"]["mse/mse@16"]["items"], first["tokens"]) == (20, 40 * 8 * 16)
    assert first["parameters"] > 0
    assert first["state_bytes"] > 0
    assert "surprise" in first["telemetry"]
    cell = Path("runs/cells") / first["cell"]
    assert answer("eval", first["cell"], "--root", "runs")["columns"] == first["columns"]
    (cell / "result.json").unlink()
    shutil.rmtree(cell / "checkpoints" / "step-00000040")
    assert (cell / "checkpoints" / "step-00000036").is_dir()
    assert cli.run(["train", "run.yaml", "--root", "runs"]) == 0
    assert "time steps, " in (shown := capsys.readouterr().out)
    assert "MSE" in shown
    assert read_json(cell / "result.json") | dict.fromkeys(CLOCKS) == first | dict.fromkeys(CLOCKS)


@pytest.mark.parametrize(("sets", "says"), [
    (["objective.kind=regresion"],
     "objective.kind: 'regresion' is not one of classification, next_token, regression, transfer, tune; did"),
    (["objective.options.horizn=2"], "objective.options.horizn: unknown key; did you mean horizon?"),
    (["objective.options.patch=5"], "objective.options.patch: 5 does not divide data.sequence_length 16"),
    (["data.tokenizer=x.model"], "data.tokenizer: objective regression reads objective.options.path"),
    (["eval.columns.mse.0.task=perplexity"], "eval.columns.mse.0.task: perplexity is measured on tokens"),
    (["objective.options.sines=20"], "data.sequence_length: 16 training steps are too few for a window"),
])  # fmt: skip
def test_wrong_config_is_one_line(run_yaml, refused, sets, says):
    words = (word for one in sets for word in ("--set", one))
    assert f"error: {says}" in refused("train", "run.yaml", "--root", "runs", *words)
    assert not Path("runs/cells").exists()


def test_series_and_tokens_have_commands_and_measures_of_their_own(run_yaml, refused, tiny_run):
    reason = "regression trains on series, which titans train prepares; titans data prepares text only"
    for command in ("prepare", "info"):
        assert refused("data", command, "run.yaml", "--root", "runs") == f"error: objective.kind: {reason}"
    fields = {"eval": {"columns": {"mse": [{"task": "mse"}]}}}
    cfg = RunConfig.model_validate_json(json.dumps(tiny_run.model_dump(mode="json") | fields))
    with pytest.raises(UsageError, match="mse is measured on series; objective next_token has tokens"):
        build_objective(cfg).check()


def test_only_tokens_need_memory_for_logits(tiny_run, monkeypatch):
    monkeypatch.setattr(check, "machine_memory", lambda: check.PROCESS_BYTES + 50 * 2**20)
    wide = {"model": {"vocab_size": 2**16}, "optim": {"global_batch_size": 64}}
    check.check_resources(small.changed(config(), **wide), Resources())
    with pytest.raises(UsageError, match=r"^data\.sequence_length: .* tokens at once take at least"):
        check.check_resources(small.changed(tiny_run, **wide), Resources())


def test_run_is_named_by_content_and_options_and_reads_its_file_once(tmp_path):
    for name in ("a.csv", "b.csv"):
        sawtooth(tmp_path / name)

    def of(path: str, **options: Any) -> RunConfig:
        return config(**{"sines": None, "channels": 1, "path": str(tmp_path / path)} | options)

    def named(path: str, **options: Any) -> str:
        return run_name(of(path, **options), tmp_path / "root")

    # a default written out is no other run
    assert named("a.csv") == named("b.csv") == named("a.csv", patch=1)
    assert named("a.csv") != named("a.csv", horizon=2)
    before = named("b.csv")
    sawtooth(tmp_path / "b.csv", 8)
    assert named("b.csv") != before
    objective = build_objective(of("a.csv"))
    made = objective.prepare(tmp_path / "root")
    (tmp_path / "a.csv").unlink()
    assert objective.open(tmp_path / "root").fingerprint == made.fingerprint
    with pytest.raises(UsageError, match="channels: 2, but the series has 1; set it to 1"):
        build_objective(of("a.csv", channels=2)).check(made)


def test_objective_of_ones_own_file(run_yaml, refused):
    Path("own_objective.py").write_text(small.documented("platform/titans_platform/objectives/huber.py"))
    sets = ["objective.kind=own_objective:Huber", "objective.options.delta=0.5", "optim.steps=8"]
    cfg, root = load_config(run_yaml, sets), Path("runs")
    assert len({run_name(each, root) for each in (cfg, load_config(run_yaml, sets[:1]), config())}) == 3
    result = execute(spec_for(cfg, root))
    assert result.cell == run_name(cfg, root)
    # at the same weights Huber's error is below half the squared one
    squared = execute(spec_for(load_config(run_yaml, sets[2:]), root))
    assert 0 < result.final_train_loss < 0.6 * squared.final_train_loss
    error = refused("train", "run.yaml", "--set", "objective.kind=own_objective:HuberOptions")
    assert "is not a subclass of titans_platform.objectives.base.Objective" in error
