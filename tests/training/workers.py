"""One worker of a process group on CPUs, as a program: `python workers.py FOLDER RANK WORLD_SIZE`.

Writes its results to FOLDER/worker-RANK.json. The test that starts it also imports it, to get the numbers of
a run without a process group.
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from titans_core import AttentionConfig, LanguageModel, MemoryConfig, ModelConfig
from titans_platform.config import EvalConfig, OptimConfig, TaskConfig
from titans_platform.data import Batch, load_tokenizer
from titans_platform.data.stream import StreamBatch
from titans_platform.evals import Request, Scorer, evaluate
from titans_platform.training import checkpoint
from titans_platform.training.loop import Hooks, Trainer, deterministic

LENGTH, ROWS, STEPS = 16, 8, 20
BYTE = load_tokenizer("byte")
MODEL = ModelConfig(
    variant="lmm", vocab_size=BYTE.vocab_size, d_model=16, n_layers=2,
    memory=MemoryConfig(heads=2, chunk_size=8), attention=AttentionConfig(heads=2),
)  # fmt: skip


def rows(key: str, count: int) -> Batch:
    """Random rows; every third has a single target."""
    generator = torch.Generator().manual_seed(random.Random(key).randrange(2**32))
    tokens = torch.randint(64, (count, LENGTH + 1), generator=generator)
    starts = torch.zeros(count, LENGTH + 1, dtype=torch.bool)
    starts[:, 0] = True
    loss = torch.ones(count, LENGTH, dtype=torch.bool)
    loss[::3, :-1] = False
    return Batch(tokens, starts, loss)


class Stream:
    """A worker's share of random rows seeded by the step."""

    def __init__(self, rank: int = 0, world_size: int = 1):
        self.share = slice(rank, None, world_size)

    def batch(self, step: int) -> Batch:
        return Batch(*(part[self.share] for part in rows(f"step {step}", ROWS)))


class CarriedStream(Stream):
    """A worker's share of the streams; some are reset at each step."""

    def batch(self, step: int) -> StreamBatch:
        tokens, _, loss = rows(f"step {step}", ROWS)
        reset = torch.rand(ROWS, generator=torch.Generator().manual_seed(step)) < (0.2 if step else 2)
        return StreamBatch(*(part[self.share] for part in (tokens, loss, reset)))


def trainer(parallel: str, rank: int = 0, world_size: int = 1, stream=Stream, **optim: Any) -> Trainer:
    cfg = OptimConfig(steps=STEPS, global_batch_size=ROWS, micro_batch_size=2, lr=3e-3, grad_clip=0.5)
    groups = {"stream_groups": 2} if stream is CarriedStream else {}
    cfg = cfg.model_copy(update={"parallel": parallel} | groups | optim)
    # replicas with other initial weights must be synchronised to rank 0
    torch.manual_seed(rank)
    return Trainer(LanguageModel(MODEL), cfg, stream(rank, world_size), sequence_length=LENGTH)


def losses(of: Trainer, until: int = STEPS) -> list[float]:
    """The loss of each step, inspecting the memory at every fifth."""
    collected: list[float] = []
    of.run(Hooks(on_step=lambda step, metrics: collected.append(metrics["loss"]), telemetry_every=5), until)
    return collected


def measured(model: torch.nn.Module, speed: bool = False) -> dict[str, Any]:
    """Tasks of every kind, with batch counts that two workers cannot split evenly."""

    def validation(count: int) -> Iterator[Batch]:
        return (rows(f"validation {i}", count) for i in range(5))

    prepared = SimpleNamespace(tokenizer=BYTE, item_hashes=frozenset(), validation=validation)
    columns = {
        "recall": (TaskConfig(task="recall", options={"pairs": 2}, lengths=(1.0, 2.0)),),
        "lm": (TaskConfig(task="perplexity"), TaskConfig(task="loss")),
    }
    if speed:
        columns["speed"] = (TaskConfig(task="throughput", options={"rows": 2, "repeats": 1}),)
    config = EvalConfig(columns=columns, items=7, perplexity_tokens=10**6, batch_tokens=3 * LENGTH)
    result = evaluate(model, prepared, config, LENGTH)
    requests = [Request(list(range(n)), [n, n + 1]) for n in (3, 9, 1, 12, 7)]
    with torch.no_grad():
        scores = Scorer(model, BYTE, torch.device("cpu"), 24).score(requests, LENGTH)
    return result | {"scores": scores}


def train_in_groups(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """HSDP, two groups of two, with activation checkpointing: losses; leaves a checkpoint in the folder."""
    of = trainer("hsdp", rank, world_size, shard_workers=2, recompute=True)
    result = losses(of, STEPS // 2)
    with checkpoint.Saver(folder / "hsdp", of) as saver:
        saver.save()
    weight: Any = next(of.model.blocks.parameters())
    return {"hsdp": result, "placements": [type(p).__name__ for p in weight.placements]}


def carry(folder: Path, rank: int, world_size: int, kinds=("ddp", "fsdp", "sequence")) -> dict[str, Any]:
    """Streams, resumed from the checkpoint in the folder, or writing one there for other world sizes."""
    result: dict[str, Any] = {}
    for kind in kinds:
        shard = (0, 1) if kind == "sequence" else (rank, world_size)
        of = trainer(kind, *shard, CarriedStream)
        checkpoint.restore(folder / f"carried-{kind}", of)
        first = losses(of, max(of.progress.step, STEPS // 2))
        if first:
            with checkpoint.Saver(folder / f"carried-{kind}", of) as saver:
                saver.save()
        result[kind] = first + losses(of)
    return result


def train_and_evaluate(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """DDP and FSDP2: losses of twenty steps, losses after a resume, and an evaluation in between.

    Leaves the checkpoint from the middle in the folder, for other world sizes.
    """
    actual: dict[str, Any] = {}
    for kind in ("ddp", "fsdp"):
        straight = trainer(kind, rank, world_size)
        first = losses(straight, STEPS // 2)
        actual[f"{kind} measured"] = measured(straight.model, speed=True)
        with checkpoint.Saver(folder / kind, straight) as saver:
            saver.save()
        actual[kind] = first + losses(straight)
        resumed = trainer(kind, rank, world_size)
        checkpoint.restore(folder / kind, resumed)
        actual[f"{kind} resumed"] = first + losses(resumed)
    return actual


def fail_alone(rank: int) -> str:
    """An evaluation in which only the second worker raises."""

    class Failing(torch.nn.Module):
        def forward(self, tokens: torch.Tensor, document_starts: Any = None) -> Any:
            if rank == 1:
                raise ValueError("out of memory")
            return SimpleNamespace(logits=torch.zeros(*tokens.shape, BYTE.vocab_size))

    try:
        measured(Failing())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main() -> None:
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    with deterministic(0, threads=1):
        if world_size == 4:
            result = train_in_groups(folder, rank, world_size)
        elif world_size == 3:
            result = carry(folder, rank, world_size, ("ddp",))
        else:
            result = {"trained": train_and_evaluate(folder, rank, world_size), "failed": fail_alone(rank)}
            result["carried"] = carry(folder, rank, world_size)
    (folder / f"worker-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    # gloo and checkpoint threads occasionally abort the process at interpreter shutdown
    os._exit(0)


if __name__ == "__main__":
    main()
