"""Size of the code base: `python tools/counts.py`.

Prints, for each package, files, lines, and lines of code (lines less docstrings, comments, blank lines and
imports); then the modules of the three packages that exactly one other module imports, and the private
functions that are called once. Budgets stand beside the counts; the exit code is 1 where one is exceeded.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "kernels": ROOT / "kernels/titans_kernels",
    "titans_core": ROOT / "titans_core",
    "platform": ROOT / "platform/titans_platform",
    "benchmarks": ROOT / "benchmarks",
    "tests": ROOT / "tests",
}
BUDGETS = {"platform": {"code": 11_000, "files": 95}, "tests": {"lines": 17_000}}
SINGLE_IMPORTERS = 12


def lines_of_code(path: Path) -> int:
    """Lines without docstrings, comments, blank lines and imports."""
    source = path.read_text("utf-8")
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and n not in left_out for n, line in lines)


def module_name(path: Path) -> str:
    """The dotted name of a file of one of the packages."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("kernels", "platform"):
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def single_importers() -> list[tuple[str, str]]:
    """Modules that exactly one other module imports, with that module.

    A line of a `Registry`, "module:Class", imports that module too. `__init__.py` files do not count, nor do
    modules that only their own package imports or that only a registry names.
    """
    files = [p for name in ("kernels", "titans_core", "platform") for p in PACKAGES[name].rglob("*.py")]
    modules = {module_name(path): path for path in files}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        text = path.read_text("utf-8")
        for module in (set(re.findall(r'"([\w.]+):\w+"', text)) & modules.keys()) - {name}:
            importers[module].add("a registry")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                # `from package import module` imports the module, `from module import name` does too
                imported = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            else:
                continue
            for target in {t for t in imported if t in modules and t != name}:
                importers[target].add(name)
    found = []
    for name, by in importers.items():
        if (
            len(by) == 1
            and modules[name].name != "__init__.py"
            and (importer := next(iter(by))) not in ("a registry", name.rpartition(".")[0])
        ):
            found.append((name, importer))
    return sorted(found)


def private_called_once() -> int:
    """Private functions and methods of the platform whose name occurs once outside its definition."""
    text = {path: path.read_text("utf-8") for path in PACKAGES["platform"].rglob("*.py")}
    words = Counter(word for source in text.values() for word in re.findall(r"\b_[a-z]\w*", source))
    defined = Counter(
        node.name
        for source in text.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and node.name[1] != "_"
    )
    return sum(times == 1 and words[name] == 2 for name, times in defined.items())


def main() -> int:
    """Print the counts; 1 if a budget is exceeded."""
    exceeded = []
    print(f"{'package':<12}{'files':>8}{'lines':>9}{'code':>9}")
    for name, folder in PACKAGES.items():
        files = sorted(folder.rglob("*.py"))
        lines = sum(len(path.read_text("utf-8").splitlines()) for path in files)
        counted = {"files": len(files), "lines": lines, "code": sum(map(lines_of_code, files))}
        budget = BUDGETS.get(name, {})
        exceeded += [f"{name}: {counted[k]:,} {k}, budget {v:,}" for k, v in budget.items() if counted[k] > v]
        print(f"{name:<12}{counted['files']:>8,}{counted['lines']:>9,}{counted['code']:>9,}")
    single = single_importers()
    print(f"\nmodules with a single importer: {len(single)} (budget {SINGLE_IMPORTERS})")
    for module, importer in single:
        print(f"  {module} <- {importer}")
    if len(single) > SINGLE_IMPORTERS:
        exceeded.append(f"{len(single)} modules with a single importer, budget {SINGLE_IMPORTERS}")
    print(f"private functions of the platform called once: {private_called_once()}")
    print(*(f"over budget: {line}" for line in exceeded), sep="\n")
    return bool(exceeded)


if __name__ == "__main__":
    sys.exit(main())
