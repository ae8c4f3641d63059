"""The table of docs/training.md: for each option of a memory, and each GPU, the kernels that compute it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from titans_kernels.memory.support import Support, supports

GPUS = {80: "A100", 90: "H100, H200", 100: "B200"}
"""By compute capability."""


@dataclass(frozen=True)
class Memory:
    """The fields of a `MemoryConfig` that `supports` takes, and the width of a head."""

    depth: int = 2
    expansion: int = 1
    chunk_size: int = 64
    activation: str = "silu"
    residual: str = "none"
    decay: bool = True
    channel_gates: str = "none"
    surprise_bound: float | None = 1.0
    write_budget: float | None = 2.0
    backend: str = "auto"
    rule: str = "paper"
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16

    def on(self, arch: int) -> Support:
        """Return the form on an architecture such as 90."""
        return supports(self, self.head_dim, self.dtype, arch)


PRESET = Memory()
"""Of the presets 170M to 760M."""
LINEAR = replace(PRESET, depth=1, surprise_bound=None)
ROWS: dict[str, Memory] = {
    "the presets 170M to 760M: `depth: 2`, heads of width 64": PRESET,
    "`depth: 1`": replace(PRESET, depth=1),
    "`depth: 1`, heads of width 65 to 128": replace(PRESET, depth=1, head_dim=128),
    "the same, `surprise_bound: null`": replace(LINEAR, head_dim=128),
    "`depth: 1`, `chunk_size: 1`, `surprise_bound: null`": replace(LINEAR, chunk_size=1, write_budget=None),
    "`depth: 3` and more": replace(PRESET, depth=3),
    "`expansion: 2` to `8`": replace(PRESET, expansion=4),
    "`expansion: 9` and more, hidden layers up to 2,048": replace(PRESET, expansion=16),
    "heads of width 1 to 63 (padded to a power of 2)": replace(PRESET, head_dim=48),
    "heads of width 65 to 256 (padded to 128, 256)": replace(PRESET, head_dim=96),
    "heads of width 257 to 2,048 (padded to a multiple of 64)": replace(PRESET, head_dim=1024),
    "`chunk_size: 16`, `32`": replace(PRESET, chunk_size=16),
    "`chunk_size: 128`": replace(PRESET, chunk_size=128),
    "any other `chunk_size`": replace(PRESET, chunk_size=256),
    "float32": replace(PRESET, dtype=torch.float32),
    "float32, `chunk_size: 128`": replace(PRESET, dtype=torch.float32, chunk_size=128),
    "`residual: input`": replace(PRESET, residual="input"),
    "`residual: norm`": replace(PRESET, residual="norm"),
    "`channel_gates: alpha`": replace(PRESET, channel_gates="alpha"),
    "any other `rule`": replace(PRESET, rule="gated_delta"),
}


def table() -> list[str]:
    """Return the lines of the table, in Markdown; every option that it does not name changes nothing."""
    lines = [
        "| memory | " + " | ".join(f"{gpu} (sm_{arch})" for arch, gpu in GPUS.items()) + " | why no kernel |"
    ]
    lines.append("|---" * (len(GPUS) + 2) + "|")
    for name, memory in ROWS.items():
        on = [memory.on(arch) for arch in GPUS]
        cells = [f"{s.form}: {s.kernels}" if s.kernels else s.form for s in on]
        reasons = dict.fromkeys(s.reason for s in on if s.reason)
        lines.append(f"| {' | '.join([name, *cells, '; '.join(reasons)])} |")
    return lines
