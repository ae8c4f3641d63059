"""Count what must not grow, and compare it with its budgets: `python tools/counts.py`, part of `make check`.

Lines of code are lines less docstrings, comments, blank lines and imports. The exit code is 1 if a budget is
exceeded. `--tighten` lowers the budgets of this file to the counts of today, but not below their goals.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# name: (budget, goal). A budget above its goal is the count of the day it was set, and only goes down.
BUDGETS = {
    "textbook.py, lines": (150, 150),
    "mac.py, lines": (150, 150),
    "neural_memory, arguments": (14, 14),
    "Form, fields": (8, 8),
    "FORMS, entries": (6, 6),
    "MemoryConfig, fields": (24, 24),
    "platform, lines of code": (11_244, 11_000),
    "platform, files": (85, 85),
    "tests, lines": (18_191, 18_000),
    "docs, pages": (12, 12),
    "docs, CSV files": (0, 0),
    "lines to read for the method": (1_500, 1_500),
    "lines to read for a training run": (1_500, 1_500),
    "README.md, lines": (160, 160),
    "CONTRIBUTING.md, bytes": (6_144, 6_144),
    "modules with a single importer": (12, 12),
    "Markdown lines over 140 characters": (0, 0),
    "docstrings that begin with What, How, Whether, Where": (0, 0),
    "lines with that of, those of, those that": (2, 0),
    "lines with None where": (0, 0),
    "assignments to a variable `found`": (0, 0),
}

PACKAGES = {
    "kernels": "kernels/titans_kernels",
    "titans_core": "titans_core",
    "platform": "platform/titans_platform",
    "benchmarks": "benchmarks",
    "experiments": "experiments",
    "examples": "examples",
    "tools": "tools",
    "tests": "tests",
}
LIBRARY = ("kernels", "titans_core", "platform")


class Tree:
    """The Python and Markdown files of a checkout, read once."""

    def __init__(self, root: Path):
        self.root = root
        self.python = {
            name: {path: path.read_text("utf-8") for path in sorted((root / folder).rglob("*.py"))}
            for name, folder in PACKAGES.items()
        }
        files = {path: text for files in self.python.values() for path, text in files.items()}
        self.parsed = {path: list(ast.walk(ast.parse(text))) for path, text in files.items()}
        pages = [*root.glob("*.md"), *(p for folder in root.iterdir() for p in markdown_in(folder))]
        self.pages = {path: path.read_text("utf-8") for path in sorted(pages)}

    def lines(self, package: str) -> int:
        """Lines of a package."""
        return sum(len(text.splitlines()) for text in self.python[package].values())

    def code(self, package: str) -> int:
        """Lines of code of a package."""
        return sum(lines_of_code(text, self.parsed[path]) for path, text in self.python[package].items())

    def nodes(self, *packages: str) -> Iterator[ast.AST]:
        """Nodes of the syntax trees of packages, of all if none is named."""
        for package in packages or PACKAGES:
            for path in self.python[package]:
                yield from self.parsed[path]

    def named(self, package: str, kind: type, name: str) -> ast.AST:
        """Return the one definition of a name in a package. Raises ValueError: there is none, or several."""
        definitions = [
            n for n in self.nodes(package) if isinstance(n, kind) and getattr(n, "name", "") == name
        ]
        if len(definitions) != 1:
            raise ValueError(f"{package}: {len(definitions)} definitions of {name}; edit tools/counts.py")
        return definitions[0]

    def fields(self, package: str, name: str) -> int:
        """Return the number of fields of a class."""
        return sum(isinstance(node, ast.AnnAssign) for node in self.named(package, ast.ClassDef, name).body)

    def arguments(self, package: str, name: str) -> int:
        """Return the number of arguments of a function."""
        signature = self.named(package, ast.FunctionDef, name).args
        return len(signature.posonlyargs + signature.args + signature.kwonlyargs)

    def entries(self, package: str, name: str) -> int:
        """Count the entries of a tuple that a module assigns to a name. Raises ValueError: there is none."""
        for node in self.nodes(package):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return len(getattr(node.value, "elts", ()))
        raise ValueError(f"{package}: no tuple {name}; edit tools/counts.py")

    def strings(self) -> Iterator[str]:
        """Docstrings of modules, classes, functions and attributes."""
        for node in self.nodes():
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                yield str(node.value.value)

    def written(self, pattern: str) -> int:
        """Lines of sources and pages in which a pattern occurs, but for `tools`, which has the patterns."""
        sources = [text for name, files in self.python.items() if name != "tools" for text in files.values()]
        texts = [*sources, *self.pages.values()]
        return sum(bool(re.search(pattern, line)) for text in texts for line in text.splitlines())


def markdown_in(folder: Path) -> Iterator[Path]:
    """Markdown files of a folder of the repository, templates of reports aside."""
    if folder.is_dir() and not folder.name.startswith(".") and folder.name not in ("site", "titans-runs"):
        yield from (path for path in folder.rglob("*.md") if path.parent.name != "templates")


def lines_of_code(source: str, nodes: Iterable[ast.AST] | None = None) -> int:
    """Count lines without docstrings, comments, blank lines and imports; ``nodes`` may be given."""
    left_out: set[int] = set()
    for node in nodes or ast.walk(ast.parse(source)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and n not in left_out for n, line in lines)


def long_lines(page: str) -> int:
    """Count lines of Markdown of more than 140 characters, tables and the targets of links aside."""
    lines = (re.sub(r"\]\([^)]*\)|https?://\S+", "]", line) for line in page.splitlines())
    return sum(len(line) > 140 and not line.lstrip().startswith("|") for line in lines)


def single_importers(tree: Tree) -> list[tuple[str, str]]:
    """Modules that exactly one other module imports, with that module.

    A line of a `Registry`, "module:Class", imports that module too. `__init__.py` files do not count, nor do
    modules that only their own package imports or that only a registry names.
    """
    modules = {}
    for package in LIBRARY:
        base = (tree.root / PACKAGES[package]).parent
        for path, text in tree.python[package].items():
            parts = path.relative_to(base).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path, text
    importers: dict[str, set[str]] = defaultdict(set)
    for name, (path, text) in modules.items():
        for module in (set(re.findall(r'"([\w.]+):\w+"', text)) & modules.keys()) - {name}:
            importers[module].add("a registry")
        for node in tree.parsed[path]:
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                # `from package import module` imports the module, `from module import name` does too
                imported = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            else:
                continue
            for target in {t for t in imported if t in modules and t != name}:
                importers[target].add(name)
    single = []
    for name, by in importers.items():
        if len(by) == 1 and modules[name][0].name != "__init__.py":
            (importer,) = by
            if importer not in ("a registry", name.rpartition(".")[0]):
                single.append((name, importer))
    return sorted(single)


def private_called_once(tree: Tree) -> int:
    """Private functions and methods of the platform whose name occurs once outside its definition."""
    sources = tree.python["platform"].values()
    words = Counter(word for source in sources for word in re.findall(r"\b_[a-z]\w*", source))
    defined = Counter(
        node.name
        for node in tree.nodes("platform")
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and node.name[1] != "_"
    )
    return sum(times == 1 and words[name] == 2 for name, times in defined.items())


def to_read(tree: Tree) -> tuple[int, int]:
    """Count the lines of the files in the two lists of docs/architecture.md: the method, a training run."""
    page = (tree.root / "docs/architecture.md").read_text("utf-8")
    section = page.partition("\n## In what order to read\n")[2].partition("\n## ")[0]
    lists = section.split("\nA training run,")
    files = [[tree.root / "docs" / target for target in re.findall(r"\]\(([^)]*)\)", part)] for part in lists]
    method, run = (sum(len(file.read_text("utf-8").splitlines()) for file in part) for part in files)
    return method, run


def measure(tree: Tree) -> dict[str, int]:
    """Count everything that has a budget."""
    lines = lambda path: len((tree.root / path).read_text("utf-8").splitlines())  # noqa: E731
    stored = [n for n in tree.nodes() if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    docs = tree.root / "docs"
    method, run = to_read(tree)
    return {
        "textbook.py, lines": lines("titans_core/textbook.py"),
        "mac.py, lines": lines("titans_core/blocks/mac.py"),
        "neural_memory, arguments": tree.arguments("kernels", "neural_memory"),
        "Form, fields": tree.fields("kernels", "Form"),
        "FORMS, entries": tree.entries("kernels", "FORMS"),
        "MemoryConfig, fields": tree.fields("titans_core", "MemoryConfig"),
        "platform, lines of code": tree.code("platform"),
        "platform, files": len(tree.python["platform"]),
        "tests, lines": tree.lines("tests"),
        "docs, pages": len(list(docs.glob("*.md"))),
        "docs, CSV files": len(list(docs.rglob("*.csv"))),
        "lines to read for the method": method,
        "lines to read for a training run": run,
        "README.md, lines": lines("README.md"),
        "CONTRIBUTING.md, bytes": (tree.root / "CONTRIBUTING.md").stat().st_size,
        "modules with a single importer": len(single_importers(tree)),
        "Markdown lines over 140 characters": sum(map(long_lines, tree.pages.values())),
        "docstrings that begin with What, How, Whether, Where": sum(
            bool(re.match(r"\s*(What|How|Whether|Where)\b", text)) for text in tree.strings()
        ),
        "lines with that of, those of, those that": tree.written(r"\b([Tt]hat of|[Tt]hose (of|that))\b"),
        "lines with None where": tree.written(r"\bNone where\b"),
        "assignments to a variable `found`": sum(n.id == "found" for n in stored),
    }


def exceeded(counts: dict[str, int]) -> list[str]:
    """Return one line for each budget that is exceeded."""
    return [
        f"{name}: {counts[name]:,}, budget {most:,}"
        for name, (most, _) in BUDGETS.items()
        if counts[name] > most
    ]


def tighten(counts: dict[str, int]) -> None:
    """Lower the budgets in this file."""
    path = Path(__file__)
    text = path.read_text("utf-8")
    for name, (most, goal) in BUDGETS.items():
        lowest = max(goal, min(most, counts[name]))
        text = text.replace(f'"{name}": ({most:_}, {goal:_})', f'"{name}": ({lowest:_}, {goal:_})')
    path.write_text(text, "utf-8")


def main(arguments: list[str]) -> int:
    """Print the counts; 1 if a budget is exceeded."""
    tree = Tree(ROOT)
    print(f"{'package':<12}{'files':>8}{'lines':>9}{'code':>9}")
    for name, files in tree.python.items():
        print(f"{name:<12}{len(files):>8,}{tree.lines(name):>9,}{tree.code(name):>9,}")
    print("\nmodules with a single importer:")
    for module, importer in single_importers(tree):
        print(f"  {module} <- {importer}")
    print(f"private functions of the platform called once: {private_called_once(tree)}")
    counts = measure(tree)
    print(f"\n{'':<54}{'count':>8}{'budget':>8}{'goal':>8}")
    for name, (most, goal) in BUDGETS.items():
        print(f"{name:<54}{counts[name]:>8,}{most:>8,}{goal:>8,}")
    if "--tighten" in arguments:
        tighten(counts)
    over = exceeded(counts)
    print(*(f"over budget: {line}" for line in over), sep="\n")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
