"""The counts of `tools/counts.py` see what is added; tests/test_counts.py holds its budgets."""

import shutil

from tools import counts

ADDED = {
    "MemoryConfig, fields": ("titans_core/config.py", "class MemoryConfig(Frozen):", "\n    extra: int = 0"),
    "neural_memory, arguments":
        ("kernels/titans_kernels/memory/op.py", "def neural_memory(", "\n    extra: int,"),
    "tests, lines": ("tests/test_counts.py", '"""The budgets', "\n\n"),
    "platform, lines of code": ("platform/titans_platform/errors.py", '"""Errors that', '"""\nX = 1\n"""'),
    "README.md, lines": ("README.md", "# Titans", "\n"),
    "lines to read for the method": ("docs/method.md", "\n## ", "\n"),
    "lines to read for a training run": ("platform/titans_platform/runs/spec.py", '"""', "\n"),
    "Markdown lines over 140 characters":
        ("docs/index.md", "# titans", "\n" + 141 * "x" + "\n| " + 141 * "x"),
    "docstrings that begin with What, How, Whether, Where":
        ("tools/pictures.py", '"""', 'Whether it is.\n"""\n"""'),
    "lines with that of, those of, those that":
        ("docs/index.md", "# titans", "\n" + "of ".join(("that ", "those ", "a line"))),
    "lines with None where": ("docs/index.md", "# titans", "\nNone" + " where there is none"),
    "assignments to a variable `found`": ("titans_core/textbook.py", "# fmt: off", "\nfound = 1"),
}  # fmt: skip


def test_counts_see_what_is_added(tmp_path, monkeypatch):
    copy, before = tmp_path, counts.measure(counts.Tree(counts.ROOT))
    for folder in {*(path.split("/")[0] for path in counts.PACKAGES.values()), "docs"}:
        shutil.copytree(counts.ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for page in counts.ROOT.glob("*.md"):
        shutil.copy(page, copy)
    assert before.keys() == counts.BUDGETS.keys()
    for path, after, text in ADDED.values():
        source = (copy / path).read_text("utf-8")
        assert after in source
        (copy / path).write_text(source.replace(after, after + text, 1), "utf-8")
    (copy / "docs/added.csv").write_text("1")
    (copy / "docs/added.md").write_text("")
    now = counts.measure(counts.Tree(copy))
    grown = {name for name in now if now[name] > before[name]}
    assert ADDED.keys() | {"docs, CSV files", "docs, pages"} <= grown
    monkeypatch.setattr(counts, "BUDGETS", {name: (n, n) for name, n in before.items()})
    (line,) = [line for line in counts.exceeded(now) if line.startswith("MemoryConfig")]
    fields = before["MemoryConfig, fields"]
    assert line == f"MemoryConfig, fields: {fields + 1}, budget {fields}"


def test_tightened_budgets_go_down_to_the_counts_and_not_below_their_goals(tmp_path, monkeypatch):
    table = tmp_path / "counts.py"
    table.write_text('BUDGETS = {\n    "a": (2_000, 1_000),\n    "b": (9, 5),\n    "c": (3, 0),\n}\n')
    monkeypatch.setattr(counts, "__file__", str(table))
    monkeypatch.setattr(counts, "BUDGETS", {"a": (2_000, 1_000), "b": (9, 5), "c": (3, 0)})
    counts.tighten({"a": 1_500, "b": 4, "c": 7})
    lines = '    "a": (1_500, 1_000),', '    "b": (5, 5),', '    "c": (3, 0),'
    assert table.read_text().splitlines() == ["BUDGETS = {", *lines, "}"]
