"""C++ for small work on a CPU, compiled where there is a compiler, without PyTorch's headers.

Compiled at the first call, seconds once for each machine and user: the library stays in the user's cache.
Without a compiler, or with ``TITANS_NATIVE=0`` in the environment, PyTorch's operators do the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
SOURCES = ("memory.cpp", "layers.cpp", "budget.cpp")
HEADERS = ("exponential.h",)
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-march=native", "-shared", "-fPIC"]
COMPILE_SECONDS = 120
TYPES = {torch.float32: "float", torch.float64: "double"}

log = logging.getLogger("titans_kernels")


def serves(*tensors: Tensor) -> bool:
    """Whether the library takes the tensors: of one type it is compiled for, on the CPU, in eager mode."""
    first = tensors[0]
    if torch.compiler.is_compiling() or any(
        x.device.type != "cpu" or x.dtype != first.dtype or type(x) not in _PLAIN for x in tensors
    ):
        return False
    return library(first.dtype) is not None


_PLAIN = (Tensor, torch.nn.Parameter)
"""Subclasses of tensors have no numbers at their address, or other ones."""


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """What is compiled for a type, or None where it cannot be had."""
    if os.environ.get("TITANS_NATIVE") == "0" or dtype not in TYPES:
        return None
    try:
        return ctypes.CDLL(str(build(TYPES[dtype], cache_folder())))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("PyTorch's operators in place of compiled ones: %s", error)
        return None


def cache_folder() -> Path:
    """Where what is compiled stays: ``titans`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titans"


def build(real: str, folder: Path) -> Path:
    """Compile the sources for ``real``, float or double, unless ``folder`` has it for this machine.

    Raises:
        OSError: there is no compiler, or the folder cannot be written.
        subprocess.SubprocessError: it failed, or took longer than `COMPILE_SECONDS`.
    """
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler")
    command = [compiler, *FLAGS, f"-DReal={real}", *(str(FOLDER / name) for name in SOURCES)]
    texts = [(FOLDER / name).read_text() for name in (*SOURCES, *HEADERS)]
    parts = (*texts, compiler, *FLAGS, _processor(), str(os.stat(compiler).st_mtime_ns))
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    target = folder / f"native-{real}-{name}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # under another name first: several processes may be doing this
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            made = Path(aside) / target.name
            command += ["-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            made.replace(target)
    return target


def _processor() -> str:
    """What the compiler's ``native`` depends on; a home may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def parallel_for(jobs: int, work: Callable[[ctypes.c_int64, ctypes.c_int64], object]) -> None:
    """``work(first, stop)`` for all jobs in torch's number of threads: a call lets go of Python's lock."""
    threads = torch.get_num_threads()
    parts = max(1, min(jobs, 1 if threads == 1 else 4 * threads))
    borders = [ctypes.c_int64(jobs * i // parts) for i in range(parts + 1)]
    if parts == 1:
        work(borders[0], borders[1])
    else:
        list(_threads(threads, os.getpid()).map(work, borders[:-1], borders[1:]))


@lru_cache(maxsize=1)
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Of ``process``: a forked one has none of its parent's."""
    return ThreadPoolExecutor(count, "native")


def numbers(values: Sequence[int]) -> ctypes.Array:
    """Integers for the library."""
    return (ctypes.c_int64 * len(values))(*values)


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """Where a tensor's numbers stand; null for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    """Where those of several stand."""
    return (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))
