"""The workers of a process group on CPUs, as a program: `python workers.py FOLDER WORLD_SIZE`.

Writes its results to FOLDER/worker-RANK.json. The test that starts it also imports it, to get the numbers of
a run without a process group.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from titans_core import BLOCKS, AttentionConfig, LanguageModel, MemoryConfig, ModelConfig
from titans_core.sequence_parallel import SequenceParallel
from titans_platform.config import EvalConfig, OptimConfig, TaskConfig
from titans_platform.data import Batch, load_tokenizer
from titans_platform.data.stream import StreamBatch
from titans_platform.evals import Request, Scorer, evaluate
from titans_platform.training import checkpoint
from titans_platform.training.loop import Hooks, Trainer, deterministic

LENGTH, ROWS, STEPS = 16, 8, 12
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
    """DDP and FSDP2: losses of all steps, losses after a resume, and an evaluation in between.

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


def parts_model(variant: str, window: int) -> LanguageModel:
    torch.manual_seed(0)
    hybrid = {"window": window}
    attention: dict[str, Any] = {"mac": {"segment_size": 16}, "mag": hybrid, "mal": hybrid}.get(variant, {})
    memory = MemoryConfig(**{"heads": 2, "chunk_size": 8, **BLOCKS[variant].preset_memory})
    config = ModelConfig(
        variant=variant, vocab_size=32, d_model=16, n_layers=2, memory=memory,
        attention=AttentionConfig(heads=2, **attention),
    )  # fmt: skip
    return LanguageModel(config).double()


def two_rows(call: Any, T: int = 192) -> tuple[Tensor, Any]:
    tokens = torch.randint(32, (2, 2 * T + 1), generator=torch.Generator().manual_seed(1))
    first = call(tokens[:, :T], None, targets_BT=tokens[:, 1 : T + 1])
    first.losses.mean().backward()
    reset = torch.tensor([True, False])
    second = call(tokens[:, T:-1], first.state.detach(), targets_BT=tokens[:, T + 1 :], reset_B=reset)
    second.losses.mean().backward()
    return torch.stack([first.losses, second.losses]).detach(), second.state


def differences(variant: str, window: int = 24) -> dict[str, float]:
    """Workers that share each of two rows in turn, the second with one stream reset, in float64.

    The losses, gradients and carried state of all of them together equal a single worker's, which the first
    computes.
    """
    shared, alone = parts_model(variant, window), parts_model(variant, window)
    losses, state = two_rows(SequenceParallel(shared))
    dist.all_reduce(losses)
    summed = [torch.zeros_like(p) if p.grad is None else p.grad for p in shared.parameters()]
    for grad in summed:
        dist.all_reduce(grad)
    if dist.get_rank():
        return {}
    expected, state_of_one = two_rows(alone)
    relative = []
    for grad, q in zip(summed, alone.parameters(), strict=True):
        wanted = torch.zeros_like(q) if q.grad is None else q.grad
        relative.append(((grad - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item())
    pairs = zip(tree_leaves(state), tree_leaves(state_of_one), strict=True)
    carried = [(a - b).abs().max().item() for a, b in pairs if isinstance(a, Tensor) and a.numel()]
    return {
        "losses": (losses - expected).abs().max().item(), "gradients": max(relative), "state": max(carried),
        "position": abs(state.position - state_of_one.position),
    }  # fmt: skip


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
    folder, world_size = Path(sys.argv[1]), int(sys.argv[2])
    for rank in range(world_size):
        if not os.fork():  # what is imported is imported once
            work(folder, rank, world_size)
    if any(os.wait()[1] for _ in range(world_size)):
        os.killpg(0, signal.SIGKILL)  # the others wait for the one that failed


def work(folder: Path, rank: int, world_size: int) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    with deterministic(0, threads=1):
        if world_size == 4:
            result = train_in_groups(folder, rank, world_size)
        elif world_size == 3:
            result = carry(folder, rank, world_size, ("ddp",))
            result["differences"] = {variant: differences(variant) for variant in BLOCKS}
            # a window of one token keeps no keys
            result["differences"]["mag, window 1"] = differences("mag", window=1)
        else:
            result = {"trained": train_and_evaluate(folder, rank, world_size), "failed": fail_alone(rank)}
            result["carried"] = carry(folder, rank, world_size)
    (folder / f"worker-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    # gloo and checkpoint threads occasionally abort the process at interpreter shutdown
    os._exit(0)


if __name__ == "__main__":
    main()
