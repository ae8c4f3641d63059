"""Every row exactly once per epoch, for any reader and across kills and resumes."""

import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.data.small import drawing
from titans_platform.data.shards import MANIFEST, Manifest, SourceRows, SplitInfo, SplitWriter, signed
from titans_platform.data.stream import RowStream

COUNTS = (1, 2, 3, 8)
BATCH, LENGTH = 24, 15


def written(folder: Path, shards: int, weight: float) -> SourceRows:
    """A source of equal shards of 1,024 random tokens, of one document each."""
    folder.mkdir()
    writer = SplitWriter(folder, "train", 256, 1024)
    writer.add(np.random.default_rng(0).integers(0, 256, 1024, np.uint32), np.arange(1024) > 0)
    (first,) = writer.close().shards
    infos = [first]
    for i in range(1, shards):
        copy = shutil.copyfile(folder / first.file, folder / f"train-{i:05d}.arrow")
        infos.append(first.model_copy(update={"file": copy.name, "mtime_ns": copy.stat().st_mtime_ns}))
    manifest = Manifest(
        schema_version=1, label="bench", content="bench", validation=SplitInfo(shard_tokens=1024),
        train=SplitInfo(tokens=shards * 1024, shard_tokens=1024, shards=tuple(infos)),
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(signed(manifest))
    return SourceRows(folder, manifest, LENGTH, 0, weight, True)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[SourceRows]:
    """One of 20 shards, and one of 3: 60 and 40 of 100 rows."""
    folder = tmp_path_factory.mktemp("sources")
    return [written(folder / str(shards), shards, weight) for shards, weight in ((20, 0.6), (3, 0.4))]


def test_rows_of_many_shards_are_shuffled_as_a_whole_anew_in_each_epoch(sources):
    assert [len(source.train) for source in sources] == [(n * 1024 - 1) // LENGTH for n in (20, 3)]
    stream = RowStream(sources[:1], drawing(455, 5))
    first, second = (
        np.concatenate([stream.drawn(step)[1] for step in steps]) for steps in ((0, 1, 2), (3, 4, 5))
    )
    assert sorted(first) == sorted(second) == list(range(1365))
    assert (first != second).mean() > 0.9
    assert len(set((first[:455] * LENGTH // 1024).tolist())) == 20


@pytest.mark.parametrize("seed", range(12))
def test_killed_and_resumed_on_another_number_of_readers(sources, seed):
    """Ranks and loader workers change at each kill; what loaders had read ahead is lost with them."""
    rng, steps = random.Random(seed), -(-len(sources[0].train) * 100 // 60 // BATCH) * 2
    step, drawn = 0, Counter[tuple[int, int]]()
    while step < steps:
        ranks, workers = rng.choice(COUNTS), rng.choice(COUNTS)
        killed_at = min(steps, step + rng.randint(1, steps // 3))
        for rank in range(ranks):
            # a loader worker has a stream of its own, and takes every so-manieth step
            loaders = [RowStream(sources, drawing(BATCH, seed), rank, ranks) for _ in range(workers)]
            for ahead in range(killed_at, killed_at + workers):
                loaders[ahead % workers].batch(ahead)
            for at in range(step, killed_at):
                source_ids, rows = loaders[at % workers].drawn(at)
                drawn.update([*zip(source_ids.tolist(), rows.tolist(), strict=True)][rank::ranks])
        step = killed_at
    for s, share in enumerate((60, 40)):
        epochs, more = divmod(steps * BATCH * share // 100, len(sources[s].train))
        times = Counter(times for (source, _), times in drawn.items() if source == s)
        rows = len(sources[s].train)
        off = abs(times[epochs + 1] - more) + abs(times[epochs] - (rows - more) * (epochs > 0))
        assert off <= 2, "exact but for the part of a cycle at the end"
        assert set(times) <= {epochs, epochs + 1}
