"""The order of rows: exact weights, one counter, the same for any world size."""

from collections import Counter

import numpy as np
import pytest
import torch

from tests.data.small import config, documents, drawing
from titans_platform.data import PreparedData, open_prepared, prepare
from titans_platform.data.encode import interleave
from titans_platform.data.shards import Split, SplitWriter
from titans_platform.data.stream import shuffled
from titans_platform.errors import UsageError


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> PreparedData:
    """Two sources whose rows tell where they are from, weights 3 to 1."""
    folder = tmp_path_factory.mktemp("mixed")
    texts = lambda a, n, count: [chr(a + i % 26) * (20 + i % n) for i in range(count)]  # noqa: E731
    one = documents(folder / "upper.jsonl", *texts(65, 7, 40), weight=0.75)
    other = documents(folder / "lower.jsonl", *texts(97, 5, 20), weight=0.25)
    return prepare(config(one, other), folder / "root")


def test_rows_starts_and_loss_by_hand(tmp_path):
    text = documents(tmp_path / "t.jsonl", "abc", "defgh", "ij")
    prepared = prepare(config(text, length=4), tmp_path / "root")
    source = prepared.sources[0]
    # bos a b c | bos d e f | g h bos i | j: three rows, each with the first token of the next
    bos, want = 256, ["_abc_", "_defg", "gh_ij"]
    assert len(source.train) == 3
    stream = prepared.train_stream(drawing(3))
    batch = stream.batch(0)
    for row, tokens, starts, loss in zip(stream.drawn(0)[1].tolist(), *batch, strict=True):
        text = want[row]
        assert tokens.tolist() == [bos if c == "_" else ord(c) for c in text]
        assert starts.tolist() == [i == 0 or c == "_" for i, c in enumerate(text)]
        assert loss.tolist() == [c != "_" for c in text[1:]]
    assert (batch.tokens.dtype, batch.starts.dtype, batch.loss.dtype) == (torch.int64, torch.bool, torch.bool)


def test_documents_may_follow_each_other_as_one_text(mixed):
    root = mixed.sources[0].files.parents[1]
    plain = open_prepared(mixed.config.model_copy(update={"packing": "plain"}), root)
    assert plain.fingerprint != mixed.fingerprint
    ours, theirs = (prepared.train_stream(drawing(8)).batch(2) for prepared in (plain, mixed))
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.loss, theirs.loss)
    assert theirs.starts[:, 1:].any()
    assert ours.starts[:, 0].all()
    assert not ours.starts[:, 1:].any()


def test_batch_is_a_function_of_seed_and_step_with_exact_shares(mixed):
    first = mixed.train_stream(drawing(8, 3))
    late = first.batch(50)
    first.batch(0)
    for a, b, c in zip(late, mixed.train_stream(drawing(8, 3)).batch(50), first.batch(50), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert not torch.equal(late.tokens, mixed.train_stream(drawing(8, 4)).batch(50).tokens)
    stream = mixed.train_stream(drawing(8))
    for step in range(20):
        assert Counter(stream.drawn(step)[0].tolist()) == {0: 6, 1: 2}


@pytest.mark.parametrize("world_size", [1, 2, 4, 3])
def test_workers_share_the_same_global_batch(mixed, world_size):
    for step in (0, 1, 37):
        whole = mixed.train_stream(drawing(8, 1)).batch(step)
        for rank in range(world_size):
            mine = mixed.train_stream(drawing(8, 1), rank, world_size).batch(step)
            for part, all_rows in zip(mine, whole, strict=True):
                assert torch.equal(part, all_rows[rank::world_size])


def test_interleaving_spreads_weights_and_shuffling_is_fixed():
    order = interleave([1.0, 1.0, 2.0])
    assert ([order.count(i) for i in range(3)], order[0]) == ([1, 1, 2], 2)
    assert order[1:3] != [2, 2]
    assert 1 in interleave([1.0, 1e-7]), "a small share is rounded up, not away"
    assert len(interleave([0.123456789, 0.987654321])) <= 10_001
    order = shuffled(1000, "key")
    assert sorted(order.tolist()) == list(range(1000))
    assert not np.array_equal(order, shuffled(1000, "other key"))
    # what a checkpoint of an earlier version relies on
    assert shuffled(8, "0/0/0").tolist() == [3, 7, 4, 2, 1, 0, 5, 6]


def test_validation_is_every_row_once_in_fixed_order(tmp_path):
    texts = (f"{i * 7919} is document {i}" for i in range(60))
    source = documents(tmp_path / "t.jsonl", *texts, validation_fraction=0.5)
    prepared = prepare(config(source, length=16), tmp_path / "root")
    batches = list(prepared.validation(batch_size=3))
    again = list(prepared.validation(batch_size=5))
    rows = torch.cat([batch.tokens for batch in batches])
    assert torch.equal(rows, torch.cat([batch.tokens for batch in again]))
    source = prepared.sources[0]
    starts = range(0, 16 * len(source.validation), 16)
    expected = {tuple(source.validation.read(i, i + 17).tokens) for i in starts}
    assert {tuple(row) for row in rows.tolist()} == expected
    assert len(rows) == len(expected) > 10


def test_shards_read_across_their_borders(tmp_path):
    """Shards of 10 tokens: every span equals the whole sequence's, at every bit offset."""
    writer, rng = SplitWriter(tmp_path, "train", 260, shard_tokens=10), np.random.default_rng(0)
    documents = [rng.integers(0, 256, n) for n in (3, 14, 1, 25, 4)]
    masks = [rng.random(len(document)) < 0.5 for document in documents]
    for document, mask in zip(documents, masks, strict=True):
        writer.add(document, mask)
    info = writer.close()
    split = Split(tmp_path, info)
    tokens, loss = np.concatenate(documents), np.concatenate(masks)
    begins = np.isin(np.arange(47), [0, 3, 17, 18, 43])
    assert (info.tokens, len(info.shards), info.documents) == (47, 5, 5)
    for start in range(47):
        for stop in range(start + 1, 48):
            span = split.read(start, stop)
            assert np.array_equal(span.tokens, tokens[start:stop])
            assert np.array_equal(span.starts, begins[start:stop])
            assert np.array_equal(span.loss, loss[start:stop])


def test_tokens_are_read_in_place_and_weights_of_zero_refused(mixed, tmp_path):
    tokens = mixed.sources[0].train.read(5, 25).tokens
    assert tokens.dtype == np.uint16
    assert not tokens.flags.owndata
    assert not tokens.flags.writeable
    info_small = SplitWriter(tmp_path, "small", 2**16)
    writer = SplitWriter(tmp_path, "large", 2**16 + 4)
    writer.add(np.array([1, 70_000, 3]), np.array([False, True, True]))
    read = Split(tmp_path, writer.close()).read(0, 3).tokens
    assert (read.tolist(), info_small.shard_tokens) == ([1, 70_000, 3], 2 * writer.shard_tokens)
    text = documents(tmp_path / "t.jsonl", *["some text that is long enough"] * 3, weight=0.0)
    silent = prepare(config(text), tmp_path / "root")
    with pytest.raises(UsageError, match=r"data\.sources: every weight is 0"):
        silent.train_stream(drawing(4))
