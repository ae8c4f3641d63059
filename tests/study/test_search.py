"""A search: no trial runs twice, and the best trial becomes a row."""

import json
import math
import shutil
from dataclasses import replace

import pytest

from tests.small import RUN, texts
from titans_platform import cli
from titans_platform.data import prepare
from titans_platform.errors import UsageError
from titans_platform.study.grid import StudyRun, load_study, resolve
from titans_platform.study.plan import check_space
from titans_platform.study.search import Trial, set_line
from titans_platform.study.spec import Parameter, Search

STUDY = {
    "name": "hunt", "columns": {"loss": {"title": "Loss", "higher_is_better": False, "decimals": 3}},
    "base": RUN
    | {
        "data": {"sequence_length": 32, "sources": [{"kind": "files", "path": "texts"}]},
        "optim": {"steps": 27, "global_batch_size": 4, "lr": 1e-5},
        "eval": {"perplexity_tokens": 512, "columns": {"loss": [{"task": "loss"}]}},
    }, "scales": {"small": {"seeds": [0, 1]}}, "rows": [{"name": "default"}],
    "search": {
        "metric": "loss", "trials": 6,
        "space": {
            "optim.lr": {"low": 1e-4, "high": 3e-2, "log": True},
            "model.memory.eta_bias": {"low": -1, "high": 1}, "model.d_model": {"choices": [16, 24]},
        },
    },
}  # fmt: skip


@pytest.fixture
def hunt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TITANS_HOME", str(tmp_path / "runs"))
    lines = [f"line {i} of {i * i} words, {i % 7}\n" for i in range(40 * 80)]
    texts(tmp_path / "texts", *("".join(lines[i : i + 80]) for i in range(0, len(lines), 80)))
    (tmp_path / "hunt.yaml").write_text(json.dumps(STUDY))
    return tmp_path


LINE = ["sweep", "run", "hunt.yaml", "--scale", "small"]


def searched(folder):
    return StudyRun(load_study("hunt.yaml"), "small", folder / "runs", "c0ffee").with_search().search


def written(folder) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("runs/cells/*/result.json")}


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_search_finds_a_better_row_and_runs_no_trial_twice(hunt, capsys, answer):
    table = answer(*LINE)
    default, result = (row["columns"]["loss"]["mean"] for row in table["rows"])
    assert [row["row"] for row in table["rows"]] == ["default", "found"]
    assert result < default - 0.1
    before = searched(hunt)
    assert before.over
    assert len(before.trials) == 6
    assert {trial.state for trial in before.trials} == {"done", "stopped"}
    assert before.tokens < before.tokens_of_grid
    cells = written(hunt)
    assert len(cells) == 4 + sum(trial.state == "done" for trial in before.trials)
    # the same again runs nothing; one trial lost and two more wanted runs three
    assert cli.run(LINE) == 0
    assert set_line(before.best.params) in capsys.readouterr().out.replace("\n", " ")
    lost = next(trial for trial in before.trials if trial != before.best)
    shutil.rmtree(hunt / "runs" / "cells" / lost.cell)
    (hunt / "hunt.yaml").write_text(json.dumps({**STUDY, "search": {**STUDY["search"], "trials": 8}}))
    assert cli.run(LINE) == 0
    after = searched(hunt)
    assert [trial.params for trial in after.trials[:6]] == [trial.params for trial in before.trials]
    assert len({json.dumps(trial.params) for trial in after.trials}) == 8
    kept = set(cells) - {lost.cell}
    assert {name: written(hunt)[name] for name in kept} == {name: cells[name] for name in kept}
    (status,) = answer("sweep", "status")
    assert status["search"]["set"] == set_line(after.best.params)
    # trials of another config are not this search's
    longer = STUDY["base"] | {"optim": STUDY["base"]["optim"] | {"steps": 30}}
    (hunt / "hunt.yaml").write_text(json.dumps(STUDY | {"base": longer}))
    assert searched(hunt).trials == ()


@pytest.mark.parametrize(("space", "message"), [
    ({"optim.lr": {"low": 1e-3}}, "needs low and high"),
    ({"optim.lr": {"low": 2.0, "high": 1.0}}, "should be below"),
    ({"optim.steps": {"choices": [1, 2]}}, "cannot be searched"),
    ({"data.seed": {"choices": [1, 2]}}, "data.seed cannot be searched"),
    ({"optim.lrr": {"low": 1e-3, "high": 1e-2}}, "did you mean lr?"),
    ({"model.d_model": {"choices": [16, 15]}}, "search.space at model.d_model=15"),
])  # fmt: skip
def test_corners_of_a_search_space_are_checked(hunt, space, message):
    (hunt / "hunt.yaml").write_text(json.dumps({**STUDY, "search": {**STUDY["search"], "space": space}}))
    with pytest.raises(UsageError) as error:
        check_space(StudyRun(load_study("hunt.yaml"), "small", hunt, "c0ffee").with_search())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("hunt")
def test_dry_run_shows_the_search(answer):
    plan = answer(*LINE, "--dry-run")["search"]
    assert plan["rungs"] == [3, 9, 27]
    assert (plan["tokens_least"], plan["tokens_at_most"]) == (6 * 3 * 128, 6 * 27 * 128)


@pytest.mark.parametrize(("steps", "rungs", "milestones"), [
    (90, 3, [10, 30, 90]), (100, 3, [11, 33, 100]), (2, 3, [1, 2]), (5, 1, [5]),
])  # fmt: skip
def test_milestones_are_those_of_asha(steps, rungs, milestones):
    search = Search(metric="loss", rungs=rungs, space={"optim.lr": Parameter(low=1e-4, high=1e-2)})
    assert search.milestones(steps) == milestones


@pytest.mark.parametrize("field", ["seed", "rungs", "reduction"])
def test_trials_of_another_search_do_not_count(hunt, field):
    key = searched(hunt).key
    (hunt / "hunt.yaml").write_text(json.dumps({**STUDY, "search": {**STUDY["search"], field: 7}}))
    assert searched(hunt).key != key
    (hunt / "hunt.yaml").write_text(json.dumps({**STUDY, "search": {**STUDY["search"], "trials": 7}}))
    assert searched(hunt).key == key


@pytest.mark.usefixtures("hunt")
def test_trials_of_other_data_do_not_count_and_nan_is_not_the_best(hunt):
    before = searched(hunt)
    assert before.data is None
    config = load_study("hunt.yaml")
    prepared = prepare(resolve(config, "small", config.rows[0]).data, hunt / "runs")
    after = searched(hunt)
    assert (after.data, after.key == before.key) == (prepared.fingerprint, False)
    trials = [Trial(f"{i}", i, {}, "done", 27, value) for i, value in enumerate((math.nan, 2.0, 1.0))]
    assert replace(after, trials=tuple(trials)).best == trials[2]
