"""Two pitfalls of the layout: source roots that become packages, and names that shadow others."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.counts import lines_of_code

ROOT = Path(__file__).parents[1]
# the packages import their parts when they are asked for
OPERATORS = "import titans_kernels as k; [getattr(k, name) for name in k.__all__]"
ALL = f"{OPERATORS}; import titans_core as c; [getattr(c, name) for name in c.__all__]"


@pytest.mark.parametrize("folder", ["platform", "kernels", "tests", "tests/platform", "sweeps", "clusters"])
def test_source_roots_are_no_packages(folder):
    assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py shadows another module"


def test_the_standard_library_s_platform_is_found_from_the_repository_root():
    code = "import platform, uuid, asyncio; print(platform.python_implementation())"
    found = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert found.strip() == sys.implementation.name.replace("cpython", "CPython")


@pytest.mark.slow
@pytest.mark.parametrize(("imports", "blocked"), [
    (ALL, ["ray", "mlflow", "pyarrow", "datasets", "titans_platform"]),
    (OPERATORS, ["titans_core", "pydantic"]),
], ids=["models", "operators"])  # fmt: skip
def test_a_package_imports_without_those_above_it(imports, blocked):
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); {imports}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_imports_go_down_and_in_no_circle():
    """The contracts of import-linter in pyproject.toml: floors, and no modules that need each other."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_no_module_has_outgrown_its_frame():
    files = [*(ROOT / "platform").rglob("*.py"), *(ROOT / "titans_core").rglob("*.py")]
    long = {path.name: lines for path in files if (lines := lines_of_code(path)) > 300}
    assert not long
