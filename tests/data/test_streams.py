"""Continuous streams: the tokens of each step and the resets, for any world size."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.small import config, documents, drawing
from titans_platform.data import PreparedData, prepare
from titans_platform.data.stream import RowTable, Streams, document_starts
from titans_platform.errors import UsageError

BOS = 256


def prepared(folder: Path, *sources: dict, **fields) -> PreparedData:
    return prepare(config(*sources, **{"rows": "streams"} | fields), folder / "root")


def streams_of(data: PreparedData, *given, **optim) -> Streams:
    return Streams(data.sources, drawing(*given, order="streams", **optim))


def needles(**fields) -> dict:
    task = {"task": "needle", "options": {"style": "compact", "kind": "passkey"}}
    return {"kind": "task", "rows": 6, "item_length": 64, "tasks": [task]} | fields


DOCUMENTS = [chr(97 + i) * n for i, n in enumerate((30, 7, 8, 41, 1, 90, 16, 23))]


@pytest.mark.parametrize(("packing", "groups"), [("borders", 1), ("plain", 1), ("borders", 3), ("plain", 2)])
def test_stream_reads_on_and_every_token_is_predicted_once(tmp_path, packing, groups):
    data = prepared(tmp_path, documents(tmp_path / "t.jsonl", *DOCUMENTS), packing=packing)
    streams = streams_of(data, 3, 1, stream_groups=groups)
    table, count = streams.tables[0], 3 * groups
    steps = len(table) // count * groups
    predicted: Counter[int] = Counter()
    previous: dict[int, tuple] = {}
    for step in range(steps):
        batch, rows = streams.batch(step), streams.rows(step)
        before, last = previous.get(step % groups, (None, None))
        for b, row in enumerate(rows.tolist()):
            first, length = int(table.first[row]), int(table.length[row])
            span = data.sources[0].train.read(first, first + length + 1)
            assert batch.tokens[b, : length + 1].tolist() == span.tokens.tolist()
            assert (batch.tokens[b, length + 1 :] == data.tokenizer.pad).all()
            assert batch.loss[b].tolist() == [*span.loss[1:].tolist(), *[False] * (8 - length)]
            predicted.update(range(first + 1, first + 1 + length))
            if before is not None and last is not None and not batch.reset[b]:
                assert row == before[b] + 1
                assert batch.tokens[b, 0] == last[b, 8], "a row begins with the token the last one ended on"
        previous[step % groups] = rows, batch.tokens
    assert max(predicted.values()) == 1
    # what is left out is less than a row for each stream
    total = data.sources[0].train.info.tokens
    assert len(table) - 3 * steps < count
    assert sum(predicted.values()) > total - len(DOCUMENTS) - count * 8


def test_documents_and_long_items_begin_on_rows_of_their_own(tmp_path):
    data = prepared(tmp_path, documents(tmp_path / "t.jsonl", *DOCUMENTS))
    source = data.sources[0]
    starts = document_starts(source.train)
    assert starts.tolist() == np.cumsum([0, *(len(d) + 1 for d in DOCUMENTS)])[:-1].tolist()
    table = RowTable.of(source, 8)
    assert table.first[table.begins].tolist() == starts.tolist()
    streams = streams_of(data, 2)
    for step in range(1, 40):
        batch = streams.batch(step)
        assert batch.reset.tolist() == (batch.tokens[:, 0] == BOS).tolist()
        assert not (batch.tokens[:, 1:] == BOS).any()
    plain = prepared(tmp_path, documents(tmp_path / "t.jsonl", *DOCUMENTS), packing="plain")
    assert RowTable.of(plain.sources[0], 8).begins.sum() == 1
    assert len({plain.fingerprint, data.fingerprint}) == 2
    data = prepared(tmp_path, needles())
    streams = streams_of(data, 2, 3)
    assert streams.tables[0].unit == 8
    answers = 0
    for step in range(24):
        batch = streams.batch(step)
        assert batch.reset.tolist() == [step % 8 == 0] * 2
        answers += int(batch.loss.sum())
    assert answers == int(data.sources[0].train.read(0, 6 * 64).loss.sum()) > 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_workers_share_the_streams(tmp_path, world_size):
    data = prepared(tmp_path, documents(tmp_path / "t.jsonl", *DOCUMENTS, weight=0.6), needles(weight=0.4))
    cfg = drawing(5, 7, "streams", reset_probability=0.3, stream_groups=2)
    whole = Streams(data.sources, cfg)
    assert Counter(whole.source.tolist()) == {0: 3, 1: 2}
    for step in (0, 1, 9, 100):
        for rank in range(world_size):
            mine = Streams(data.sources, cfg, rank, world_size).batch(step)
            for part, all_rows in zip(mine, whole.batch(step), strict=True):
                assert torch.equal(part, all_rows[rank::world_size])


def test_batch_is_a_function_of_seed_and_step_and_resets_come_by_chance(tmp_path):
    data = prepared(tmp_path, documents(tmp_path / "t.jsonl", *DOCUMENTS))
    one, other = streams_of(data, 3), streams_of(data, 3, 4)
    late = one.batch(31)
    one.batch(2)
    assert all(torch.equal(a, b) for a, b in zip(late, one.batch(31), strict=True))
    assert not torch.equal(one.batch(0).tokens, other.batch(0).tokens)
    data = prepared(tmp_path, documents(tmp_path / "t.jsonl", "x" * 4000), packing="plain")
    streams = streams_of(data, 20, reset_probability=0.25)
    result = np.stack([streams.resets(step) for step in range(400)])
    assert result[0].all()
    assert abs(result[1:].mean() - 0.25) < 0.02
    never = streams_of(data, 20)
    for step in range(1, 60):  # where the text ends it begins again
        assert (never.resets(step) == (never.rows(step) == 0)).all()
    assert never.resets(0).all()


def test_refusals(tmp_path):
    data = prepared(tmp_path, documents(tmp_path / "t.jsonl", *DOCUMENTS))
    with pytest.raises(UsageError, match=r"data\.sources\.0: 30 rows of 8 tokens cannot be divided among 40"):
        streams_of(data, 40)
    mixed = prepared(tmp_path, documents(tmp_path / "t.jsonl", *DOCUMENTS, weight=0.95), needles(weight=0.05))
    with pytest.raises(UsageError, match=r"data\.sources\.1\.weight: 0\.05 gives the source none of the 4"):
        streams_of(mixed, 4)
    error = r"sources\.0\.item_length: items of 64 tokens do not fit in rows of 8"
    with pytest.raises(ValueError, match=error):
        prepared(tmp_path, needles(), rows="shuffled")
