"""`titans data prepare` as a job on several Ray nodes: its driver is killed, and then one of them."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.test_parts import files
from tests.small import until
from titans_platform.config import DataConfig
from titans_platform.data import by_processes, open_prepared, prepare, sources
from titans_platform.runs.ray_session import ADDRESS
from tools.chaos.cluster import Nodes, nodes

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

FILES, DOCUMENTS = 12, 15_000
"""Parts of half a second each: some are made when the driver is lost, some when the node is."""

DRIVER = """
import sys
from titans_platform.cli import main
from titans_platform.data import sources
sources.PART_BYTES = 500
main(sys.argv[1:])
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """Files, each a part."""
    (tmp_path / "texts").mkdir()
    for i in range(FILES):
        lines = [json.dumps({"text": f"document {j} of file {i}, some words"}) for j in range(DOCUMENTS)]
        (tmp_path / "texts" / f"{i}.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sources, "PART_BYTES", 500)
    source = {"kind": "files", "path": str(tmp_path / "texts")}
    return DataConfig.model_validate_json(json.dumps({"sources": [source], "sequence_length": 16}))


@pytest.fixture
def cluster() -> Iterator[Nodes]:
    with nodes() as made:
        yield made


def start(data: DataConfig, root: Path, address: str) -> subprocess.Popen[str]:
    """Run the command as a job of the cluster does."""
    (file := root.with_suffix(".yaml")).write_text(json.dumps({"data": data.model_dump(mode="json")}))
    command = [sys.executable, "-c", DRIVER, "data", "prepare", str(file), "--root", str(root)]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | {ADDRESS: address}, **said)


def made(root: Path) -> dict[str, int]:
    """Return the finished parts with the times of their manifests."""
    # one that is being written is in a folder of its own, `*.partial`, which may be renamed at any moment
    manifests = (path for path in root.glob("data/*/*/manifest.json") if path.parent.suffix != ".partial")
    return {path.parent.name: path.stat().st_mtime_ns for path in manifests}


@pytest.mark.nightly
def test_the_driver_and_a_node_lost_the_shards_are_those_of_one_process(data, cluster, tmp_path):
    root, address = tmp_path / "nodes", cluster.cluster.address
    first = start(data, root, address)
    try:
        until(lambda: len(made(root)) >= 2, first)
    finally:
        first.kill()
        first.communicate()
    before = made(root)
    second = start(data, root, address)
    try:
        until(lambda: len(made(root)) >= len(before) + 2, second)
        assert len(made(root)) < FILES - 2
        cluster.lose(random.Random(0))
        said, _ = second.communicate(timeout=120)
    finally:
        second.kill()
    assert second.returncode == 0, said
    assert before.items() <= made(root).items()
    alone = prepare(data, tmp_path / "alone", run=by_processes(1))
    actual = open_prepared(data, root, verify=True)
    assert (files(actual), actual.fingerprint) == (files(alone), alone.fingerprint)
