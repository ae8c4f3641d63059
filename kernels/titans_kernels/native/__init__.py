"""C++ kernels for small problems on a CPU, built without PyTorch's headers.

They are compiled on first use, which takes seconds, and cached per machine and user. Without a C++ compiler,
or with ``TITANS_NATIVE=0`` in the environment, PyTorch's operators are used instead.
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
SOURCES = (
    "memory.cpp",
    "layers.cpp",
    "products.cpp",
    "attention.cpp",
    "budget.cpp",
    "scans.cpp",
    "segments.cpp",
)
HEADERS = ("calls.h", "exponential.h", "inner.h", "lanes.h", "norm.h")
TEXTS = {name: (FOLDER / name).read_text() for name in (*SOURCES, *HEADERS)}
"""The sources as they were on import: later ones may not have the structures and signatures of the Python
modules, which are imported once."""
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-march=native", "-shared", "-fPIC"]
COMPILE_SECONDS = 120
TYPES = {torch.float32: "float", torch.float64: "double"}

log = logging.getLogger("titans_kernels")


def serves(*tensors: Tensor) -> bool:
    """Return True if the library supports the tensors: on the CPU, of one supported dtype, in eager mode."""
    first = tensors[0]
    if torch.compiler.is_compiling() or any(
        x.device.type != "cpu" or x.dtype != first.dtype or type(x) not in _PLAIN for x in tensors
    ):
        return False
    return library(first.dtype) is not None


def compiled(x: Tensor) -> ctypes.CDLL:
    """Return the library for tensors that it `serves`."""
    compiled_library = library(x.dtype)
    assert compiled_library is not None
    return compiled_library


_PLAIN = (Tensor, torch.nn.Parameter)
"""Tensor subclasses may not store their values at ``data_ptr``."""


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library compiled for a dtype, or None if it is not available."""
    if os.environ.get("TITANS_NATIVE") == "0" or dtype not in TYPES:
        return None
    try:
        return ctypes.CDLL(str(build(TYPES[dtype], cache_folder())))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.info("PyTorch's operators in place of compiled ones: %s", error)
        return None


def cache_folder() -> Path:
    """Folder of the compiled libraries: ``titans`` in the user's cache folder.

    Raises RuntimeError if the user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titans"


def build(real: str, folder: Path) -> Path:
    """Compile the sources for ``real``, float or double, unless ``folder`` already has them for this machine.

    Raises:
        OSError: there is no C++ compiler, or the folder is not writable.
        subprocess.SubprocessError: compilation failed or took longer than `COMPILE_SECONDS`.
    """
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler")
    parts = (*TEXTS.values(), compiler, *FLAGS, _processor(), str(os.stat(compiler).st_mtime_ns))
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    target = folder / f"native-{real}-{name}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # write to a temporary name, then rename: several processes may compile at once
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            for file, text in TEXTS.items():
                (Path(aside) / file).write_text(text)
            command = [compiler, *FLAGS, f"-DReal={real}", *SOURCES, "-o", target.name]
            subprocess.run(command, cwd=aside, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            (Path(aside) / target.name).replace(target)
    return target


def _processor() -> str:
    """CPU features, on which ``-march=native`` depends; different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def parallel_for(jobs: int, work: Callable[[ctypes.c_int64, ctypes.c_int64], object]) -> None:
    """Run ``work(first, stop)`` over all jobs in torch's number of threads; ctypes calls release the GIL."""
    threads = torch.get_num_threads()
    parts = max(1, min(jobs, 1 if threads == 1 else 4 * threads))
    borders = [ctypes.c_int64(jobs * i // parts) for i in range(parts + 1)]
    if parts == 1:
        work(borders[0], borders[1])
    else:
        list(_threads(threads, os.getpid()).map(work, borders[:-1], borders[1:]))


@lru_cache(maxsize=1)
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Return the thread pool of ``process``: a forked process does not inherit its parent's threads."""
    return ThreadPoolExecutor(count, "native")


def numbers(values: Sequence[int]) -> ctypes.Array:
    """Convert to a C array of int64."""
    return (ctypes.c_int64 * len(values))(*values)


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """Address of a tensor's data; null for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    """Return a C array of the tensors' addresses."""
    return (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))
