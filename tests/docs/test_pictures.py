"""Pictures in docs/, the figure of the designs, and the loop of docs/method.md equal their sources."""

import inspect
import re

import pytest
from PIL import Image

from titans_core import textbook
from titans_platform.report.table import tally
from tools import figure_designs, pictures


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return {name: pictures.built(name, tmp_path_factory.mktemp(name)) for name in pictures.STUDIES}


@pytest.mark.parametrize("path", sorted(pictures.DOCS.glob("*.png")), ids=lambda path: path.name)
def test_picture_shows_the_numbers_of_today(path, reports):
    report = reports.get(path.stem, reports[pictures.PAGE])
    assert path.stem in reports or path.name in pictures.SCREENS
    with Image.open(path) as image:
        assert image.info[pictures.KEY] == pictures.fingerprint(report), "run: python -m tools.pictures"


def test_pages_print_the_verdicts_of_the_pictures(reports):
    verdict = tally(reports[pictures.PAGE].comparisons)
    assert verdict in " ".join((pictures.DOCS / "results.md").read_text("utf-8").split())


def test_readme_has_the_verdict_of_ten_seeds():
    """experiments/paper/test_ablation.py recomputes it from the cells."""
    page = (pictures.TOP / "experiments/paper/README.md").read_text("utf-8").partition("## Ten seeds")[2]
    (verdict,) = re.findall(r"of (\d+) comparisons (\d+) agree, (\d+) disagree, (\d+) are not resolved", page)
    readme = " ".join((pictures.TOP / "README.md").read_text("utf-8").split())
    before, _, after = readme.partition(" differences from the LMM")
    assert (before.split()[-1], *re.findall(r"(\d+) (?:agree|disagree|are not resolved)", after)) == verdict


def test_pages_name_pictures_that_are_there_and_no_others():
    pages = [pictures.TOP / "README.md", *pictures.DOCS.glob("*.md")]
    named = {name for page in pages for name in re.findall(r"[\w-]+\.png", page.read_text("utf-8"))}
    assert {path.name for path in pictures.DOCS.glob("*.png")} <= named


def test_committed_figure_is_what_the_script_draws(tmp_path, monkeypatch):
    committed = figure_designs.TARGET.read_text("utf-8")
    monkeypatch.setattr(figure_designs, "TARGET", tmp_path / "designs.svg")
    figure_designs.main()
    drawn = figure_designs.TARGET.read_text("utf-8")
    # matplotlib writes each text as a comment before its outlines, which depend on its version
    assert re.findall(r"<!-- (.*) -->", drawn) == re.findall(r"<!-- (.*) -->", committed)


def test_method_page_prints_the_loop_of_the_textbook():
    page = (figure_designs.TARGET.parent / "method.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(def memory.*?)```", page, re.DOTALL)
    assert code == re.sub(r'    """.*?"""\n', "", inspect.getsource(textbook.memory), flags=re.DOTALL)
