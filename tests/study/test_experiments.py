"""The working tree's experiments are found by name and by folder; cells: experiments/test_studies.py."""

from pathlib import Path

import pytest

from titans_platform.errors import UsageError
from titans_platform.study.grid import find_study, known_studies, load_study, place_of


def test_experiment_is_found_by_name_and_by_folder(tmp_path, monkeypatch):
    (tmp_path / "experiments/mine").mkdir(parents=True)
    study = tmp_path / "experiments/mine/study.yaml"
    study.write_text("name: mine\nlike: ablation\n")
    monkeypatch.chdir(tmp_path)
    assert find_study("mine") == study
    for given in ("experiments/mine", "experiments/mine/"):
        assert find_study(given) == Path("experiments/mine/study.yaml")
    assert place_of(study).as_posix() == "experiments/mine/study.yaml"
    assert load_study("mine").name == "mine"
    with pytest.raises(UsageError, match="no file experiments/yours"):
        find_study("experiments/yours")


def test_study_of_the_paper_hides_an_experiment_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "experiments/ablation").mkdir(parents=True)
    (tmp_path / "experiments/ablation/study.yaml").write_text("name: other\nlike: ablation\n")
    monkeypatch.chdir(tmp_path)
    assert place_of(find_study("ablation")).as_posix() == "sweeps/ablation.yaml"
    assert load_study("experiments/ablation").name == "other"
    names = list(known_studies())
    assert names.index("grid") < names.index("carried")
