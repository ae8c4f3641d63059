"""The five walks of docs/extending.md, applied to a copy of the source: each extension works.

By import path their classes are trained and measured in test_outside.py, test_objectives.py and
test_outside_variant.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small import RUN

TOP = Path(__file__).parents[2]
SOURCE = ("kernels", "titans_core", "platform")
PATHS = ("kernels", ".", "platform")
BLOCK = re.compile(r"^`([\w./]+)`\n\n```(python|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def walks() -> dict[str, list[tuple[str, str, str]]]:
    """By heading, the blocks of a walk: the file each is for, python or diff, and its text."""
    text = (TOP / "docs/extending.md").read_text(encoding="utf-8")
    section = text.partition("\n## Five walks\n")[2].partition("\n## ")[0]
    headings = re.split(r"^### (.*)\n", section, flags=re.MULTILINE)[1:]
    return {heading: BLOCK.findall(body) for heading, body in zip(headings[::2], headings[1::2], strict=True)}


def patched(text: str, diff: str) -> str:
    """``text`` after a diff whose hunks are divided by `@@` and found by their lines, each in one place."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(before) == 1, f"{text.count(before)} places have these lines:\n{before}"
        text = text.replace(before, after)
    return text


CHECKS = {
    "A model variant": """
        skip = ["impossible_retrieval", "state_growth", "time_growth", "long_inputs"]
        report = audit(variant_factory("shift", 16), length=24, skip=skip)
        assert not report.of("fail"), report.of("fail")
        assert not {"packed", "pieces", "decoding"} & {result.check for result in report.of("not applicable")}
        assert LanguageModel(preset("smoke", "shift")).state_bytes(20) == 32 * 4
    """,
    "A memory rule": """
        assert find_rule("lp(p=2.5)").p == 2.5
        memory = MemoryConfig(rule="lp(p=2.5)", heads=2, chunk_size=8)
        LanguageModel(ModelConfig(vocab_size=8, d_model=8, n_layers=1, memory=memory))
    """,
    "An objective": """
        options = {"sines": 200, "horizon": 2, "delta": 0.5}
        objective = build_objective(config(objective={"kind": "huber", "options": options}))
        objective.check(objective.prepare(Path("root")))
    """,
    "A kind of cluster": """
        Path("lab.yaml").write_text("kind: tunnel\\nhost: gate\\naddress: http://head:8265\\nport: 9000\\n")
        cluster = load_cluster("./lab.yaml")
        assert cluster.jobs().connected
        assert run(["cluster", "up", "./lab.yaml", "--dry-run"]) == 0
        (forward,) = cluster.jobs().access_steps()
        assert "ssh -N -L 9000:head:8265 gate" in forward.shown
    """,
    "An evaluation task": """
        task = {"task": "sums", "options": {"largest": 3}, "lengths": [1, 2]}
        source = {"kind": "task", "rows": 8, "tasks": [{"task": "sums", "options": {"largest": 90}}]}
        measure = {"columns": {"c": [task]}, "items": 4}
        cfg = config(data={"sequence_length": 16, "sources": [source]}, eval=measure)
        objective = build_objective(cfg)
        objective.check(objective.prepare(Path("root")))
    """,
}
SCRIPT = """
import json, textwrap, traceback
from pathlib import Path

import torch

import titans_core
from titans_core import LanguageModel, MemoryConfig, ModelConfig
from titans_core.audit import audit, variant_factory
from titans_core.presets import preset
from titans_kernels import find_rule
from titans_platform.cli import run
from titans_platform.clusters import load_cluster
from titans_platform.config import RunConfig
from titans_platform.objectives import build_objective

assert Path(titans_core.__file__).is_relative_to(Path.cwd())
SMALL = json.loads(Path("small.json").read_text())

def config(**parts):
    return RunConfig.model_validate_json(json.dumps(SMALL | parts))

done = {}
for walk, check in json.loads(Path("checks.json").read_text()).items():
    try:
        exec(textwrap.dedent(check), dict(globals()))
        done[walk] = ""
    except BaseException:
        done[walk] = traceback.format_exc()
Path("done.json").write_text(json.dumps(done))
"""


@pytest.fixture(scope="module")
def applied(tmp_path_factory) -> dict[str, str]:
    """Apply all walks and return the error of each check, empty for one that passed."""
    tree = tmp_path_factory.mktemp("walks")
    for root in SOURCE:
        shutil.copytree(TOP / root, tree / root)
    for blocks in walks().values():
        for name, kind, text in blocks:
            path = tree / name
            if kind == "python":
                assert not path.exists()
                path.write_text(text, encoding="utf-8")
            else:
                path.write_text(patched(path.read_text(encoding="utf-8"), text), encoding="utf-8")
    (tree / "checks.json").write_text(json.dumps(CHECKS))
    small = RUN | {"data": {"sequence_length": 16}, "eval": {"columns": {}}}
    (tree / "small.json").write_text(json.dumps(small))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / root) for root in PATHS)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tree / "done.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("walk", CHECKS)
def test_walk_touches_two_files_at_most_and_what_it_adds_works(walk, applied):
    files = [name for name, _, _ in walks()[walk]]
    assert 1 <= len(files) <= 2
    assert len(set(files)) == len(files)
    assert not applied[walk], applied[walk]


def test_every_walk_is_tested():
    assert walks().keys() == CHECKS.keys()
