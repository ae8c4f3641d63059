"""One worker of three that share every row, as a program: `python parts.py FOLDER RANK WORLD_SIZE`.

Two rows in turn, the second with one stream reset, in float64: the losses, gradients and carried state of all
workers together against the ones of a single worker. Rank 0 writes the largest differences of each variant to
FOLDER/differences.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from titans_core import BLOCKS, AttentionConfig, LanguageModel, MemoryConfig, ModelConfig
from titans_core.sequence_parallel import SequenceParallel

T, B, V = 192, 2, 32


def model_of(variant: str, window: int) -> LanguageModel:
    torch.manual_seed(0)
    hybrid = {"window": window}
    attention: dict[str, Any] = {"mac": {"segment_size": 16}, "mag": hybrid, "mal": hybrid}.get(variant, {})
    memory = MemoryConfig(**{"heads": 2, "chunk_size": 8, **BLOCKS[variant].preset_memory})
    config = ModelConfig(
        variant=variant, vocab_size=V, d_model=16, n_layers=2, memory=memory,
        attention=AttentionConfig(heads=2, **attention),
    )  # fmt: skip
    return LanguageModel(config).double()


def two_rows(call: Any) -> tuple[Tensor, Any]:
    tokens = torch.randint(V, (B, 2 * T + 1), generator=torch.Generator().manual_seed(1))
    reset = torch.tensor([True, False])
    first = call(tokens[:, :T], None, targets_BT=tokens[:, 1 : T + 1])
    first.losses.mean().backward()
    second = call(tokens[:, T:-1], first.state.detach(), targets_BT=tokens[:, T + 1 :], reset_B=reset)
    second.losses.mean().backward()
    return torch.stack([first.losses, second.losses]).detach(), second.state


def differences(variant: str, window: int = 24) -> dict[str, float]:
    shared, alone = model_of(variant, window), model_of(variant, window)
    losses, state = two_rows(SequenceParallel(shared))
    dist.all_reduce(losses)
    expected, state_of_one = two_rows(alone)
    relative = []
    for p, q in zip(shared.parameters(), alone.parameters(), strict=True):
        own = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(own)
        wanted = torch.zeros_like(q) if q.grad is None else q.grad
        relative.append(((own - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item())
    pairs = zip(tree_leaves(state), tree_leaves(state_of_one), strict=True)
    carried = [(a - b).abs().max().item() for a, b in pairs if isinstance(a, Tensor) and a.numel()]
    return {
        "losses": (losses - expected).abs().max().item(), "gradients": max(relative), "state": max(carried),
        "position": abs(state.position - state_of_one.position),
    }  # fmt: skip


def main() -> None:
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    result = {variant: differences(variant) for variant in BLOCKS}
    # a window of one token keeps no keys
    result["mag, window 1"] = differences("mag", window=1)
    if rank == 0:
        (folder / "differences.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
