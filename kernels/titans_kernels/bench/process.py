"""Times an op in a separate process, so that its peak memory can be measured.

The process answers each line ``turn`` with a line of JSON, so that several can be interleaved.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import torch

from titans_kernels.bench.timing import Clock, Failed, Runner, Samples


class Answering:
    """A Python process that answers each line of its input with a line of JSON; a context manager.

    Args:
        command: what Python runs, and its arguments.
        threads: CPU threads of torch.
        label: names the process in errors.
        environment: variables beside this process's own.
    """

    def __init__(
        self, command: Sequence[str], threads: int, label: str, environment: Mapping[str, str] | None = None
    ):
        self.label = label
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)} | dict(environment or {}),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, line: str) -> Any:
        """Send a line and return the answer. Raises Failed if the process has exited."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._why()) from None
        return self.answer()

    def answer(self) -> Any:
        """Read the next answer. Raises Failed if the process has exited."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise Failed(self._why())

    def _why(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        reason = "killed, most likely for its memory" if code == -9 else (lines or [f"exit code {code}"])[-1]
        return f"{self.label}: {reason}"


class TimingProcess(Answering):
    """Times, on the CPU, the op that ``builder`` makes in a process of its own.

    Args:
        builder: import path ``module:function`` of what makes the op.
        arguments: the function's keyword arguments, a JSON object.
        threads: CPU threads of torch.
        label: names the subject in errors.
    """

    done = False

    def __init__(self, builder: str, arguments: dict[str, Any], threads: int, label: str):
        super().__init__(["-m", __name__, builder, json.dumps(arguments), str(threads)], threads, label)
        self.samples, self.peak_bytes = Samples(), 0

    def turn(self) -> None:
        """Time one more round. Raises Failed if the process has exited."""
        forward, backward, self.peak_bytes = self.ask("turn")
        self.samples.forward.append(forward)
        self.samples.backward.append(backward)


def peak_bytes() -> int:
    """Peak resident memory of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    # on Linux getrusage counts a child's parent too; elsewhere nothing better is there
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def serve(builder: str, arguments: dict[str, Any], threads: int) -> None:
    """Build the op, then answer each line of the input with seconds forward, backward and peak bytes."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module, _, function = builder.partition(":")
    op = getattr(importlib.import_module(module), function)(**arguments)
    # without the buffer that flushes caches, which would count as the op's memory
    runner = Runner(op, Clock(torch.device("cpu"), flush=False), warm_up=1)
    for _ in sys.stdin:
        print(json.dumps([*runner.passes(), peak_bytes()]), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
