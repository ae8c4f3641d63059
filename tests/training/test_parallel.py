"""One worker, two with DDP or FSDP2, four with HSDP: same losses, bitwise equal evaluation."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from torch import nn
from torch.distributed import HashStore

from tests.training import workers
from titans_core import BLOCKS, LanguageModel, MemoryConfig, ModelConfig
from titans_core.sequence_parallel import row_parts
from titans_kernels import accelerate, forms_used
from titans_platform.errors import UsageError
from titans_platform.training import checkpoint, parallel
from titans_platform.training.loop import deterministic

pytestmark = pytest.mark.slow
HALF = workers.STEPS // 2


def together(folder: Path, count: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(workers.__file__), str(folder), str(count)]
    with subprocess.Popen(command, stderr=PIPE, text=True, start_new_session=True) as process:
        try:
            _, error = process.communicate(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, error
    return [json.loads((folder / f"worker-{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder with the checkpoints of two workers, and the results of each."""
    folder = tmp_path_factory.mktemp("two")
    return folder, together(folder, 2)


@pytest.fixture(scope="module")
def one() -> list[float]:
    with deterministic(0, threads=1):
        losses, frozen = (workers.losses(workers.trainer("ddp", **lr)) for lr in ({}, {"lr": 1e-30}))
    assert sum(losses) < sum(frozen) - 0.2
    return losses


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_workers_train_like_one(both, one, kind):
    _, (first, second) = both
    assert (result := first["trained"]) == second["trained"]
    assert result[kind] == pytest.approx(one, rel=2e-6)
    assert result[f"{kind} resumed"] == result[kind]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_workers_evaluate_to_the_bit_like_one(both, kind, monkeypatch):
    folder, (first, _) = both
    if kind == "fsdp":
        # logits of all positions, as of a sharded model, round otherwise than of the scored ones alone
        monkeypatch.setattr("titans_platform.evals.scoring.sharded_modules", lambda model: [model])
    # as the trainer's model is; the plain one rounds otherwise
    model = accelerate(LanguageModel(workers.MODEL))
    # also: one worker can load what two saved, sharded or not
    assert checkpoint.load_model(folder / kind / f"step-{HALF:08}", model) == HALF
    with deterministic(0, threads=1):
        alone = json.loads(json.dumps(workers.measured(model)))
    together = first["trained"][f"{kind} measured"]
    assert together["columns"].pop("speed") > 0
    assert together["tasks"].pop("speed/throughput@16")["items"] == 32
    assert alone["scores"] == together["scores"]
    for part in ("tasks", "buckets", "columns"):
        assert alone[part] == together[part]


@pytest.mark.nightly
def test_two_groups_of_two_train_like_one_worker_and_leave_a_whole_checkpoint(tmp_path, one):
    actual = together(tmp_path, 4)
    assert all(each == actual[0] for each in actual)
    assert actual[0]["placements"] == ["Replicate", "Shard"]
    assert actual[0]["hsdp"] == pytest.approx(one[:HALF], rel=2e-6)
    with deterministic(0, threads=1):
        alone = workers.trainer("ddp")
        checkpoint.restore(tmp_path / "hsdp", alone)
        assert workers.losses(alone) == pytest.approx(one[HALF:], rel=5e-6)


def test_error_of_one_worker_ends_the_evaluation_of_all(both):
    _, (first, second) = both
    assert second["failed"] == "ValueError: out of memory"
    assert first["failed"] == "TitansError: evaluation failed on rank 1: out of memory"


def test_error_of_one_worker_is_distinguished_from_an_error_of_all(monkeypatch):
    store = HashStore()
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel.dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(parallel, "world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(parallel, "rank", lambda rank=rank: rank)
        assert parallel.all_left(timedelta(seconds=0.1)) == (rank == 1)


def test_numbers_of_workers_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr("titans_platform.training.parallel.dist.broadcast", lambda *_: None)
    monkeypatch.setattr("titans_platform.training.parallel.world_size", lambda: 4)
    with pytest.raises(UsageError, match=r"optim\.shard_workers: 3 does not divide 4 workers"):
        workers.trainer("hsdp", shard_workers=3)
    config = ModelConfig(vocab_size=8, d_model=16, memory=MemoryConfig(heads=2, chunk_size=8))
    assert row_parts(64, 3, config) == [0, 16, 40, 64]
    with pytest.raises(ValueError, match="16 tokens have no part of 8 tokens for each of 3 workers"):
        row_parts(16, 3, config)


@pytest.fixture(scope="module")
def carried() -> list[float]:
    """All steps of streams on one worker."""
    with deterministic(0, threads=1):
        return workers.losses(workers.trainer("ddp", stream=workers.CarriedStream))


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "sequence"])
def test_two_workers_carry_the_state_like_one_and_one_goes_on_from_theirs(both, carried, kind):
    folder, (first, second) = both
    assert first["carried"] == second["carried"]
    assert first["carried"][kind] == pytest.approx(carried, rel=2e-6)
    with deterministic(0, threads=1):
        alone = workers.trainer(kind, stream=workers.CarriedStream)
        checkpoint.restore(folder / f"carried-{kind}", alone)
        assert workers.losses(alone) == pytest.approx(carried[HALF:], rel=5e-6)


@pytest.fixture(scope="module")
def three(tmp_path_factory, carried) -> list[dict[str, Any]]:
    """Results of three workers, in whose folder one has left a checkpoint of its streams."""
    folder = tmp_path_factory.mktemp("three")
    with deterministic(0, threads=1):
        alone = workers.trainer("ddp", stream=workers.CarriedStream)
        assert workers.losses(alone, HALF) == carried[:HALF]
    with checkpoint.Saver(folder / "carried-ddp", alone) as saver:
        saver.save()
    return together(folder, 3)


def test_three_workers_resume_the_streams_of_one(three, carried):
    for each in three:
        assert each["ddp"] == pytest.approx(carried[HALF:], rel=5e-6)


def test_three_workers_that_share_each_row_have_the_numbers_of_one(three):
    """`parallel: sequence`, every variant in float64: losses, gradients and the carried state."""
    result = three[0]["differences"]
    assert result.keys() > BLOCKS.keys()
    assert {variant: off for variant, off in result.items() if max(off.values()) > 1e-12} == {}


# the compiler looks at .grad of a block's input and hides what torch says of that, unless it is an error
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("options", "backend"), [
    ({"recompute": True}, ""), ({"micro_batch_size": None}, ""),
    ({"recompute": "selective", "compile": True}, "eager"),
    pytest.param({"recompute": "selective", "compile": True}, "aot_eager", marks=pytest.mark.nightly),
], ids=str)  # fmt: skip
def test_same_state_is_carried_however_a_step_is_computed(carried, options, backend, monkeypatch):
    # the compiler's front end; code of its back end takes a minute to make
    compiled = partialmethod(nn.Module.compile, backend=backend)
    monkeypatch.setattr("titans_core.blocks.Block.compile", compiled)
    forms_used(forget=True)
    with deterministic(0, threads=1):
        of = workers.trainer("ddp", stream=workers.CarriedStream, **options)
        assert workers.losses(of, 4) == pytest.approx(carried[:4], rel=2e-6)
    assert ("blocks: compiled" in forms_used()) == ("compile" in options)
