"""Commands that do not train start fast: they import none of the large libraries."""

import json
import subprocess
import sys

import pytest

from titans_platform.cli import COMMANDS

LARGE = ["torch", "numpy", "pandas", "pyarrow", "datasets", "ray", "mlflow", "scipy", "matplotlib"]
LIGHT = [
    ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["init", "run.yaml"],
    ["init", "own.yaml", "--preset", "smoke"], ["cluster", "list"],
    ["cluster", "up", "nodes", "--dry-run"], ["cluster", "up", "kuberay", "--dry-run"],
    ["runs", "list"], ["sweep", "list"], ["sweep", "status"],
]  # fmt: skip
# one process for all: what one command imported would be seen again, so each is asked for what is new
SCRIPT = """
import contextlib, io, json, sys
from titans_platform.cli import run

large, commands = json.loads(sys.argv[1])
seen = set()
for command in commands:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = run(command)
        except SystemExit as stop:
            code = stop.code or 0
    new = [name for name in large if name in sys.modules and name not in seen]
    seen.update(new)
    print(json.dumps([command, code, new, out.getvalue()[-500:]]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Of each light command: its exit code, the large libraries that it imported, what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([[*LARGE, "pydantic"], LIGHT])],
        cwd=tmp_path_factory.mktemp("start"), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {tuple(line[0]): line[1:] for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("command", LIGHT, ids=" ".join)
def test_command_that_trains_nothing_imports_no_large_library(answers, command):
    code, imported, printed = answers[tuple(command)]
    assert code == 0, printed
    # the configs' library is small enough for all but the list of commands, which comes first
    assert not set(imported) - ({"pydantic"} if command != ["--help"] else set())
