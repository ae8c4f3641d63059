"""A process that times one subject on demand: a line ``step`` in, a line of JSON out.

Two such processes can be asked by turns, so that a machine's moods strike both alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO

from titans_platform.benchmarks.subjects import Shape, Subject
from titans_platform.errors import TitansError


class Worker:
    """The asking side; use as a context manager."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        environment = os.environ | {"OMP_NUM_THREADS": str(subject.threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "titans_platform.benchmarks.worker", json.dumps(asdict(subject))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
        )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def step(self) -> dict[str, float]:
        """Seconds of one step, peak_bytes of the process so far, and matmul_rate where it was measured."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TitansError(self._why()) from None
        answer = self._process.stdout.readline()
        if not answer:
            raise TitansError(self._why())
        return json.loads(answer)

    def _why(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        reason = "killed, most likely for its memory" if code == -9 else (said or [f"exit code {code}"])[-1]
        return f"{self.subject.kind} at T = {self.subject.length}: {reason}"


def peak_bytes() -> int:
    """The most physical memory this process has held."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    # what getrusage says of a child on Linux counts the parent too; elsewhere it is what there is
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def serve(subject: Subject) -> None:
    """Answer until the input ends."""
    import torch

    from titans_platform.benchmarks.subjects import build, matmul_rate

    torch.set_num_threads(subject.threads)
    step = build(subject)
    if not torch.isfinite(step()):
        raise SystemExit("its output is not finite")
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        answer = {"seconds": time.perf_counter() - start, "peak_bytes": peak_bytes()}
        if subject.kind == "operator":
            answer["matmul_rate"] = matmul_rate(subject.shape)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    serve(Subject(**(spec | {"shape": Shape(**spec["shape"])})))
