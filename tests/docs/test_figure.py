"""docs/designs.svg and the loop of docs/method.md, which is the textbook's."""

import inspect
import re

from titans_core import textbook
from tools import figure_designs


def test_designs_and_equations_are_named():
    written = {text.get_text() for ax in figure_designs.figure().axes for text in ax.texts}
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
