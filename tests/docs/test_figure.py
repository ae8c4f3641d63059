"""docs/designs.svg and the loop of docs/method.md, which is the textbook's."""

import inspect
import re
from itertools import combinations

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from titans_core import textbook
from tools import figure_designs


@pytest.fixture
def boxes():
    """The extents in pixels of every text of the figure and of the figure."""
    with matplotlib.rc_context(figure_designs.STYLE):
        fig = figure_designs.figure()
        renderer = FigureCanvasAgg(fig).get_renderer()
        texts = [text for ax in fig.axes for text in ax.texts if text.get_text()]
        return [(text.get_text(), text.get_window_extent(renderer)) for text in texts], fig.bbox


def test_texts_lie_in_the_figure_apart_and_name_designs_and_equations(boxes):
    texts, whole = boxes
    assert [name for name, box in texts if not (whole.contains(*box.min) and whole.contains(*box.max))] == []
    assert [(a, b) for (a, one), (b, other) in combinations(texts, 2) if one.overlaps(other)] == []
    written = {name for name, _ in boxes[0]}
    assert {"MAC", "MAG", "MAL"} <= written
    numbers = {int(n) for name in written for n in re.findall(r"\((\d+)\)", name)}
    assert numbers == {12, 13, 14, 15, 16, 19, *range(21, 32)}


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
