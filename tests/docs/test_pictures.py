"""Pictures of the report in docs/ show the numbers of the committed cells, and pages print their verdicts."""

import re

import pytest
from PIL import Image

from titans_platform.report.table import tally
from tools import pictures


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
    readme = " ".join((pictures.TOP / "README.md").read_text("utf-8").split())
    before, _, after = readme.partition(" comparisons with the LMM")
    numbers = [before.split()[-1], *re.findall(r"(\d+) (?:agree|disagree|are not resolved)", after)]
    assert numbers == re.findall(r"\d+", verdict)


def test_pages_name_pictures_that_are_there_and_no_others():
    pages = [pictures.TOP / "README.md", *pictures.DOCS.glob("*.md")]
    named = {name for page in pages for name in re.findall(r"[\w-]+\.png", page.read_text("utf-8"))}
    assert {path.name for path in pictures.DOCS.glob("*.png")} <= named
