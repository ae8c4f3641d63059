import json
import socket

import pytest

from tests.small import study
from titans_platform import cli
from titans_platform.runs import check
from titans_platform.runs.check import training_flops
from titans_platform.study.grid import expand, load_study
from titans_platform.tracking import open_store

SCALES = {
    "small": {"seeds": [0, 1]}, "huge": {"resources": {"cpus_per_worker": 100000}},
    "gpu": {
        "resources": {"workers": 2, "gpus_per_worker": 1}, "gpus": "2xH100",
        "model": {"memory": {"chunk_size": 16}}, "optim": {"precision": "bf16"},
    },
}  # fmt: skip
STUDY = study(steps=4, scales=SCALES, columns={"reasoning": {"title": "Reasoning [all]", "unit": "%"}})


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TITANS_HOME", str(tmp_path / "runs"))
    path = tmp_path / "sweeps" / "tiny.yaml"
    path.parent.mkdir()
    path.write_text(json.dumps(STUDY))
    return tmp_path


def call(*arguments: str) -> int:
    return cli.run(["sweep", *arguments])


def test_list_and_show(tiny, capsys, answer):
    assert call("list") == 0
    assert "tiny" in capsys.readouterr().out
    shown = answer("sweep", "show", "tiny", "--scale", "small")
    assert (shown["rows"]["Linear Memory"]["model"]["memory"]["depth"], shown["seeds"]) == (1, [0, 1])
    assert call("show", "tiny", "--scale", "small") == 0
    assert "Reasoning [all]" in capsys.readouterr().out


def test_dry_run_shows_the_plan_and_writes_nothing(tiny, capsys, answer):
    arguments = ("run", "tiny", "--scale", "small", "--dry-run", "--seeds", "0,2-3", "--concurrency", "1")
    plan = answer("sweep", *arguments)
    assert [(c["row"], c["seed"], c["state"]) for c in plan["cells"]] == [
        (row, seed, "missing") for seed in (0, 2, 3) for row in ("LMM", "Linear Memory")
    ]
    assert (len(plan["cells"]), plan["to_run"], plan["concurrency"]) == (6, 6, 1)
    assert plan["cells"][0]["tokens"] == 4 * 4 * 32
    assert plan["cells"][0]["parameters"] > plan["cells"][1]["parameters"] > 1000
    assert plan["estimate_seconds"] > 0
    assert call(*arguments) == 0
    assert "6 of 6 cells to run, 1 at once" in capsys.readouterr().out
    # resources that are not there are an error behind the plan
    assert call("run", "tiny", "--scale", "huge", "--dry-run") == 2
    out, err = capsys.readouterr()
    assert "2 of 2 cells to run, 0 at once" in out
    assert "CPU missing" in err
    assert [path.name for path in tiny.iterdir()] == ["sweeps"]


@pytest.mark.parametrize(("arguments", "message"), [
    (("run", "tinny"), "did you mean tiny"), (("run", "tiny", "--scale", "smal"), "did you mean small"),
    (("run", "tiny", "--scale", "small", "--rows", "LMN"), "did you mean LMM"),
    (("run", "tiny", "--scale", "small", "--set", "optim.stepz=3"), "did you mean steps"),
    (("run", "tiny", "--scale", "small", "--seeds", "x"), "--seeds x"),
    (("run", "tiny", "--scale", "small", "--concurrency", "999"), "--concurrency 999"),
    (("run", "tiny", "--scale", "huge"), "a run takes 100000 CPU"),
    (("run", "tiny", "--scale", "small", "--seeds", "3-1"), "names no seed"),
    (("run", "tiny", "--scale", "small", "--rows", ""), "give the name of a row"),
    (("status", "tiny", "--scale", "small"), "start with titans sweep run"),
    (("report", "tiny", "--scale", "small"), "start with titans sweep run"),
])  # fmt: skip
def test_bad_input_is_one_line_and_writes_nothing(tiny, refused, arguments, message):
    assert message in refused("sweep", *arguments)
    assert [path.name for path in tiny.iterdir()] == ["sweeps"]


@pytest.mark.parametrize(("change", "message"), [
    ("eval.columns.reasoning.0.lengths=[1, 0.1]", "row 'LMM': eval.columns.reasoning.0.lengths: an item of"),
    ("eval.columns.reasoning=[{task: perplexity}]", "validation"),
    ("data.sequence_length=8", "row 'LMM': data.sources.0.tasks.0.lengths: an item of"),
])  # fmt: skip
def test_errors_that_need_the_data_are_raised_before_a_cell_starts(tiny, refused, change, message):
    assert message in refused("sweep", "run", "tiny", "--scale", "small", "--set", change)
    assert not {"cells", "mlflow.db"} & {path.name for path in (tiny / "runs").glob("*")}


def test_store_that_cannot_be_opened_is_reported_before_data_are_prepared(tiny, tiny_yaml, refused):
    (tiny / "runs" / "mlflow.db").mkdir(parents=True)
    assert "mlflow.db: cannot be opened" in refused("sweep", "run", "tiny", "--scale", "small")
    assert [path.name for path in (tiny / "runs").iterdir()] == ["mlflow.db"]
    assert "mlflow.db: cannot be opened" in refused("train", tiny_yaml)
    assert not (tiny / "runs" / "cells").exists()


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_running_some_rows_keeps_the_whole_table(tiny, capsys, answer, monkeypatch):
    rows = answer("sweep", "run", "tiny", "--scale", "small", "--rows", "LMM", "--seeds", "0")["rows"]
    counts = [(row["row"], row["columns"]["reasoning"]["seeds"], len(row["cells"])) for row in rows]
    assert counts == [("LMM", 1, 2), ("Linear Memory", 0, 2)]
    # a seed more than the scale's own joins the table, and stays in it
    assert call("run", "tiny", "--scale", "small", "--rows", "lin*", "--seeds", "0,7") == 0
    capsys.readouterr()
    assert call("report", "tiny", "--scale", "small", "--rows", "LMM", "--json") == 4
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["columns"]["reasoning"]["seeds"], len(row["cells"])) for row in rows] == [(1, 2), (2, 3)]
    table = (tiny / "runs" / "studies" / "tiny-small" / "table.md").read_text()
    assert "| Linear Memory |" in table
    assert "2 cells have no result yet" in table
    # another table than the file's own has a folder of its own
    change = ("--set", "optim.steps=5", "--seeds", "0", "--rows", "LMM")
    assert call("run", "tiny", "--scale", "small", *change) == 0
    assert (tiny / "runs" / "studies" / "tiny-small" / "table.md").read_text() == table
    # from another folder, without the study's file
    (tiny / "sweeps" / "tiny.yaml").unlink()
    monkeypatch.chdir("/")
    capsys.readouterr()
    status = answer("sweep", "status", "tiny", "--scale", "small")
    assert status["counts"] == {"done": 3, "running": 0, "failed": 0, "interrupted": 0, "missing": 2}
    assert call("status") == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny-small")]) == 2


def test_dry_run_plans_for_the_gpus_of_the_scale_and_prices_them(tiny, capsys, answer):
    arguments = ("run", "tiny", "--scale", "gpu", "--dry-run", "--price", "1e9")
    plan = answer("sweep", *arguments)
    assert (plan["concurrency"], plan["machine"]["gpu"]["name"]) == (1, "H100")
    assert [cost["row"] for cost in plan["costs"]] == ["LMM", "Linear Memory"]
    for cost, cell in zip(plan["costs"], plan["cells"], strict=True):
        config = expand(load_study("tiny"), "gpu", rows=[cost["row"]])[0].config
        flops = training_flops(config) / config.row_tokens
        assert cost["tokens_per_second"] == pytest.approx(0.15 * 2 * 989e12 / flops)
        assert cost["hours"] * 3600 * cost["tokens_per_second"] == pytest.approx(cell["tokens"])
        assert cost["gpu_hours"] == pytest.approx(2 * cost["hours"])
    wider = answer("sweep", *arguments, "--for", "16xA100")
    assert wider["concurrency"] == 8
    slower = wider["costs"][0]["tokens_per_second"] / plan["costs"][0]["tokens_per_second"]
    assert slower == pytest.approx(312 / 989)
    assert call(*arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[: lines.index(next(x for x in lines if "MFU" in x)) + 1])) <= 80
    (heading,) = (line for line in lines if "GiB a GPU" in line)
    assert heading.split()[1:6] == ["GiB", "a", "GPU", "state,", "MB"]
    assert "assumed MFU of 15%" in " ".join(lines)
    dollars = 1e9 * sum(cost["gpu_hours"] for cost in plan["costs"])
    assert next(line for line in lines if "GPU hours," in line).endswith(f" ${dollars:,.0f}.")
    assert [path.name for path in tiny.iterdir()] == ["sweeps"]


@pytest.mark.parametrize(("arguments", "message"), [
    (("--dry-run", "--for", "1xH100"), "resources: a run takes 2 CPU and 2 GPU on 2 workers"),
    (("--dry-run", "--for", "8xH10"), "--for: 'H10' is not a known GPU; did you mean H100?"),
    (("--dry-run", "--for", "H100"), "--for: 'H100' is not a number of GPUs of a kind; give e.g. 8xH100"),
    (("--for", "8xH100"), "--for: works only with --dry-run"),
    (("--dry-run", "--set", "model.memory.chunk_size=256"), "model.memory.chunk_size: 256 is not one of the"),
    (("--dry-run", "--set", "model.memory.backend=native"), "model.memory.backend: native does not support"),
    (("--dry-run", "--set", "model.memory.backend=online"), "model.memory.backend: online does not support"),
    (("--dry-run", "--set", "data.sequence_length=16384", "--set", "optim.global_batch_size=32768"),
     "16384 is too large; give 2048, or set optim.recompute: true"),
])  # fmt: skip
def test_what_the_gpus_cannot_hold_is_refused_in_one_line(tiny, refused, monkeypatch, arguments, message):
    # bytes a token of a block, in place of a trace of seconds
    monkeypatch.setattr(check, "saved_bytes_per_token", lambda config, *shape, **options: 28 * config.d_model)
    assert message in refused("sweep", "run", "tiny", "--scale", "gpu", *arguments)


@pytest.mark.slow
def test_ui_refuses_a_wrong_store_a_port_in_use_and_a_dead_server(tiny, capsys, refused, monkeypatch):
    database = tiny / "runs" / "mlflow.db"
    assert "mlflow.db" in refused("ui")
    database.parent.mkdir()
    database.write_text("not a database, but longer than the header of one" * 9)
    assert "mlflow.db" in refused("ui", "--dry-run")
    database.unlink()
    store = open_store(tiny / "runs")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port {port}: " in refused("ui", "--port", port)
    assert cli.run(["ui", "--dry-run", "--port", "5123"]) == 0
    out = capsys.readouterr().out
    assert store.uri in out
    assert "--port 5123" in out
    monkeypatch.setenv("TITANS_MLFLOW", "http://127.0.0.1:9")
    assert "no answer" in refused("ui")
