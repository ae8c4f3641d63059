"""The protocol of long-term forecasting: splits by hand, scaling, leaks, every test window, files by name."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.small import drawing
from tests.objectives.test_series import line, when
from tests.small import changed, run_name
from titans_core.forecasting.linear import RLinear
from titans_platform.config import RunConfig
from titans_platform.errors import UsageError
from titans_platform.evals import evaluate
from titans_platform.objectives import build_objective, files
from titans_platform.objectives.files import DATASETS, Dataset, SeriesTable, read_dataset
from titans_platform.objectives.regression import Parts, SeriesData
from titans_platform.runs.execute import Worker
from titans_platform.runs.load import spec_for
from titans_platform.study.grid import expand, load_study


def test_parts_of_ett_are_months_of_thirty_days_and_others_shares_rounded_down():
    data = SeriesData(line(17_420), 96, 96, 0.2, DATASETS["ETTh1"].split)
    assert data.parts == (8640, 2880, 2880)
    assert data.windows == 8640 - 96 - 96 + 1 == 8449
    for part, first in (("validation", 8640), ("test", 11_520)):
        batches = list(data.held_out(96, 12_000, 1000, part))
        assert sum(len(batch.inputs) for batch in batches) == 2785
        begins, ends = batches[0], batches[-1]
        assert when(data, begins.inputs)[0, [0, -1]].tolist() == [first - 96, first - 1]
        assert when(data, begins.targets)[0, [0, -1]].tolist() == [first, first + 95]
        assert when(data, ends.targets)[-1, -1] == first + 2879
    assert Parts.of(69_680, DATASETS["ETTm1"].split) == (34_560, 11_520, 11_520)
    for name, parts in (
        ("Weather", (36_887, 5270, 10_539)), ("ECL", (18_412, 2632, 5260)), ("Traffic", (12_280, 1756, 3508)),
    ):  # fmt: skip
        assert Parts.of(DATASETS[name].steps, DATASETS[name].split) == parts
        assert sum(parts) == DATASETS[name].steps


def test_test_part_decides_no_number_of_training_or_validation():
    generator = np.random.default_rng(0)
    table = SeriesTable(generator.standard_normal((200, 2)), ("a", "b"))
    other = SeriesTable(table.values_NC.copy(), table.channels)
    other.values_NC[150:] = 1e3 * generator.standard_normal((50, 2))
    one, two = (SeriesData(each, 8, 4, 0.2, (100, 50, 50)) for each in (table, other))
    streams = [data.train_stream(drawing(16)) for data in (one, two)]
    pairs = [tuple(stream.batch(step) for stream in streams) for step in range(10)]
    pairs += zip(one.held_out(8, 99, 7), two.held_out(8, 99, 7), strict=True)
    for a, b in pairs:
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
    assert one.fingerprint != two.fingerprint
    torch.testing.assert_close(one.values_NC[:100].mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    (last,) = one.held_out(8, 1000, 1000, "test")
    assert len(last.inputs) == 47


def test_split_that_does_not_fit_or_is_missing_is_refused():
    for split, says in (
        ((100, 50, 51), "split: 201 steps are more than the 200"),
        ((100, 50, 3), "split: 3 test steps are too few for a horizon of 4"),
        ((0.97, 0.01, 0.02), "split: 2 validation steps are too few for a horizon of 4"),
    ):
        with pytest.raises(UsageError, match=says):
            SeriesData(line(200), 8, 4, 0.2, split)
    with pytest.raises(UsageError, match=r"options\.part: the series has no test part"):
        next(SeriesData(line(200), 8, 4, 0.2).held_out(8, 1, 1, "test"))


OPTIONS = {"dataset": "Tiny", "horizon": 4, "forecaster": "rlinear"}


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """A benchmark of 60 steps and 2 channels, in ``tmp_path``."""
    rows = "\n".join(f"2020-01-01 {t // 24:02}:00:00,{t % 7},{t % 5 + t / 30}" for t in range(60))
    text = f"date,a,b\n{rows}\n"
    checksum = hashlib.sha256(text.encode()).hexdigest()
    dataset = Dataset("tiny.csv", 60, 2, (0.6, 0.2, 0.2), "its authors", checksum)
    monkeypatch.setitem(files.DATASETS, "Tiny", dataset)
    (tmp_path / "tiny.csv").write_text(text)
    return tmp_path


def config(folder: Path | None, **options: Any) -> RunConfig:
    given = OPTIONS | {"folder": folder and str(folder)} | options
    columns = {"mse": [{"task": "mse", "options": {"part": "test"}}]}
    run = {
        "data": {"sequence_length": 8}, "objective": {"kind": "regression", "options": given},
        "optim": {"steps": 12, "global_batch_size": 8, "lr": 1e-2},
        "eval": {"items": 500, "every": 3, "at": "best", "columns": columns},
    }  # fmt: skip
    return RunConfig.model_validate_json(json.dumps(run))


def test_benchmark_is_found_by_name_and_checked(tiny):
    def refused(folder: Path | None, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            read_dataset("Tiny", folder and str(folder))

    assert read_dataset("Tiny", str(tiny)).channels == ("a", "b")
    refused(None, r"options\.folder: dataset Tiny needs the folder of tiny\.csv, from")
    refused(tiny / "elsewhere", r"no tiny\.csv \(or \.gz, \.xz\) in .*; it is from its authors")
    with (tiny / "tiny.csv").open("a") as file:
        file.write("60,1,2\n")
    refused(tiny, r"is not the standard file: its sha256 is .*; get it from its auth")
    files.DATASETS["Tiny"] = DATASETS["Tiny"]._replace(sha256=None)
    refused(tiny, "has 61 steps of 2 channels, Tiny has 60 of 2")


def test_run_is_tested_on_every_window_and_named_by_its_forecaster(tiny):
    cfg = config(tiny)
    objective = build_objective(cfg)
    objective.check(objective.prepare(tiny / "root"))
    result = Worker(spec_for(cfg, tiny / "root")).run()
    assert (result.tasks["mse/mse@8"].items, result.best_step % 3) == (12 - 4 + 1, 0)
    assert result.columns["mse"] != pytest.approx(result.best_validation_loss)
    (tiny / "moved").mkdir()
    (tiny / "moved" / "tiny.csv").write_bytes((tiny / "tiny.csv").read_bytes())

    named = lambda folder, **options: run_name(config(folder, **options), tiny / "root")  # noqa: E731
    assert named(tiny) == named(tiny / "moved") == named(tiny, forecaster_options={})
    own = [named(tiny, **each) for each in ({"forecaster": None}, {"forecaster_options": {"dropout": 0.2}})]
    assert len({*own, named(tiny)}) == 3


OWN = """
from titans_core.forecasting.linear import RLinear

class Negated(RLinear):
    def predict(self, x_BTC):
        return -super().predict(x_BTC)
"""


def test_forecaster_of_ones_own_file(tiny, monkeypatch):
    (tiny / "own_forecaster.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tiny))
    objective = build_objective(config(tiny, forecaster="own_forecaster:Negated", forecaster_options={}))
    data = objective.prepare(tiny / "root")
    objective.check(data)
    (batch,) = data.held_out(8, 500, 500, "test")
    cfg, model = objective.cfg, objective.build_model().eval()
    result = evaluate(model, data, cfg.eval, 8)["columns"]["mse"]
    negated = RLinear.predict(model, batch.inputs)
    assert result == pytest.approx((-negated - batch.targets).square().mean().item())
    before = run_name(cfg, tiny / "root")
    (tiny / "own_forecaster.py").write_text(OWN + "\n")
    assert run_name(cfg, tiny / "root") != before


@pytest.mark.parametrize(("options", "says"), [
    ({"dataset": "Tini"}, r"objective\.options\.dataset: 'Tini' is unknown; did you mean Tiny"),
    ({"path": "a.csv"}, r"objective\.options\.path: give the file of a series, or sines"),
    ({"forecaster": "rliner"}, r"objective\.options\.forecaster: 'rliner' is not one of .*mean rlinear"),
    ({"forecaster_options": {"drop": 0}}, r"forecaster_options\.drop: unknown key; did you mean dropout"),
    ({"forecaster": "dlinear", "forecaster_options": {"kernel": 4}},
     r"^objective\.options\.forecaster_options\.kernel: 4 is not odd"),
    ({"patch": 2}, r"objective\.options\.patch: forecasters cut windows by themselves"),
    ({"forecaster": None, "forecaster_options": {"a": 1}}, r"forecaster_options: give the forecaster"),
    ({"split": [0.5, 0.2, 0.2]}, r"objective\.options\.split: shares add up to 0\.9, not to 1"),
    ({"forecaster": "patchtst"}, r"forecaster_options\.patch: 16 steps are more than the 8"),
    ({"lengths": [1.0, 2.0]}, r"mse\.0\.lengths: a forecaster reads 8 steps, not 16"),
])  # fmt: skip
def test_wrong_config_is_named(tiny, options, says):
    lengths = {"lengths": options.get("lengths", [1.0])}
    cfg = config(tiny, **{key: value for key, value in options.items() if key not in lengths})
    task = cfg.eval.model_dump(mode="json")["columns"]["mse"][0]
    with pytest.raises(UsageError, match=says):
        build_objective(changed(cfg, eval={"columns": {"mse": [task | lengths]}})).check()


def test_study_runs_each_model_once_a_dataset_and_horizon():
    study = load_study("forecasting")
    cells = expand(study, "paper", seeds=[0])
    rows = {row.as_line().name for row in study.rows_at("paper")}
    assert len(cells) == 7 * 4 * len(rows)
    assert {cell.config.data.sequence_length for cell in cells} == {96}
    for cell in cells:
        options = cell.config.objective.options
        parts = Parts.of(DATASETS[options["dataset"]].steps, DATASETS[options["dataset"]].split)
        # no fewer than there are test or validation windows; ten epochs
        assert cell.config.eval.items > max(parts[1:]) - options["horizon"]
        batches = -(-(parts.training - 96 - 96 + 1) // 32)
        assert (cell.config.optim.steps, cell.config.eval.every) == (10 * batches, batches)
    assert len(expand(study, "laptop", seeds=[0])) == 2 * 4 * len(rows)
