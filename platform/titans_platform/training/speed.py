"""Throughput relative to the device's peak (MFU), and profiler traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
}
"""Peak FLOP/s in bfloat16 (V100: float16) without sparsity, from the vendor's data sheet, by a substring of
the device's name."""
UNTIMED, WARMUP, TRACED = 2, 1, 3
"""Steps that the profiler skips, warms up in, and traces."""


def device_metrics(device: torch.device, flops_per_second: float | None) -> dict[str, float]:
    """Metrics of a GPU; empty for a CPU. `memory_gib`: peak allocated memory; `tflops`: TFLOP/s of this
    worker; `mfu`: its fraction of the device's peak, if that is known.
    """
    if device.type != "cuda":
        return {}
    found = {"memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}
    if flops_per_second is not None:
        found["tflops"] = flops_per_second / 1e12
        if peak := peak_flops(torch.cuda.get_device_name(device)):
            found["mfu"] = flops_per_second / peak
    return found


def peak_flops(name: str) -> float | None:
    """Peak FLOP/s of a device by its name; None if unknown."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


@contextmanager
def profiled(path: Path) -> Iterator[Callable[[], None]]:
    """Write a profiler trace of a few steps to ``path`` (.json.gz, for Perfetto). Yields the function to call
    after each step."""
    # Kineto logs when it starts and stops
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    path.parent.mkdir(parents=True, exist_ok=True)
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(
        activities=[ProfilerActivity.CPU, *gpu],
        schedule=schedule(wait=0, warmup=WARMUP, active=TRACED, repeat=1, skip_first=UNTIMED),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)),
        record_shapes=True,
    ) as profiler:
        yield profiler.step
