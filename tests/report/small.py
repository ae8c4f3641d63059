"""Results of cells that were never run, and a strict reader of pages."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from titans_platform.files import write_json
from titans_platform.study.grid import Cell

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "circle", "rect", "use", "image"}


def save(root: Path, cell: Cell, **fields: Any) -> None:
    """Write the result of a cell."""
    result = {"cell": cell.name, "seed": cell.seed, "commit": "c0ffee"} | fields
    write_json(cell.folder(root).path / "result.json", result)


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text by tag; wrong nesting fails."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append((self.open[-1] if self.open else "", data))
