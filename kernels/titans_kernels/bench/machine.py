"""The machine of a measurement: GPU, versions, and the measured matmul and copy rates."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from titans_kernels.bench.peers import versions
from titans_kernels.bench.timing import Clock


def describe(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Names and versions, for the JSON file."""
    import numpy
    import triton

    description: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or git_commit(),
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda,
        "peers": versions(),
    }
    return description | _card(device) if device.type == "cuda" else description


def _card(device: torch.device) -> dict[str, Any]:
    card = torch.cuda.get_device_properties(device)
    return {
        "device": card.name,
        "multiprocessors": card.multi_processor_count,
        "capability": f"{card.major}.{card.minor}",
        "memory_bytes": card.total_memory,
        "l2_bytes": card.L2_cache_size,
        "driver": _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def git_commit() -> str | None:
    """Commit of the source tree of this module, with `-dirty` if modified; None outside a git checkout."""
    folder = str(Path(__file__).parent)
    return _answer("git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _answer(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.strip().splitlines() or [None])[0]


def ceilings(clock: Clock, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Measure the matmul rate of 16-bit operands (of ``dtype`` on a CPU) and the copy bandwidth."""
    on_gpu = device.type == "cuda"
    n, elements = (8192, 2**29) if on_gpu else (1024, 2**25)
    operands = torch.bfloat16 if on_gpu else dtype
    # random: a GPU runs faster on zeros
    a, b = (torch.randn(n, n, device=device, dtype=operands) for _ in range(2))
    product = torch.empty_like(a)
    matmul = 2 * n**3 / clock.median(lambda: torch.mm(a, b, out=product))
    source = torch.rand(elements, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / clock.median(lambda: target.copy_(source))
    name = str(operands).removeprefix("torch.")
    return {"matmul": matmul, "matmul_of": f"{n} x {n} x {n} {name}", "copy": copy, "copy_of": source.nbytes}
