"""`titans bench data`: what it reads is what was written, and it says what it measured."""

from __future__ import annotations

import json

import pytest

from titans_platform import data_benchmark
from titans_platform.cli import run
from titans_platform.errors import TitansError

pytestmark = pytest.mark.slow


def test_each_length_beside_datasets_memory_and_opening(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data_benchmark, "SHARD_TOKENS", 2**14)
    monkeypatch.setattr(data_benchmark, "BATCH_TOKENS", 2**12)
    monkeypatch.setattr(data_benchmark, "SECONDS", 0.05)
    command = ["bench", "data", "--lengths", "64,1024", "--rounds", "1", "--shards", "20", "--json"]
    assert run([*command, "--folder", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["length"] for row in result["rows"]] == [64, 1024]
    assert all(row["ours"] > 0 and row["datasets"] > 0 for row in result["rows"])
    assert result["opened_shards"] == 20
    assert result["tokens"] > 14 * 2**14
    assert not list(tmp_path.iterdir())


def test_rows_that_are_not_those_written_are_not_timed(tmp_path, monkeypatch):
    source = data_benchmark.write_source(tmp_path / "source", 2, 2**12)
    data_benchmark.check(source, 64)
    read = data_benchmark.SourceRows.fill

    def spoiled(self, rows, numbers, into, out):
        read(self, rows, numbers, into, out)
        out.tokens[0, 0] += 1

    monkeypatch.setattr(data_benchmark.SourceRows, "fill", spoiled)
    with pytest.raises(TitansError, match="is not what was written"):
        data_benchmark.check(source, 64)
