"""Following a job from here: its log as it grows, Ctrl-C that leaves it running, its exit code."""

from __future__ import annotations

from collections.abc import Callable

import click

from titans_platform.clusters.jobs import DETACHED, Jobs

SIGNALS = 128
"""Exit codes above it are of processes that a signal ended."""


def follow(jobs: Jobs, cluster: str, job_id: str, write: Callable[[str], None]) -> int:
    """Write the log until the job ends; its exit code, or ``DETACHED`` after Ctrl-C."""
    try:
        code = jobs.wait(job_id, write)
    except KeyboardInterrupt:
        click.echo(
            f"\ndetached; the job goes on\n"
            f"  titans cluster logs {cluster} {job_id}   follows it again\n"
            f"  titans cluster stop {cluster} {job_id}   ends it",
            err=True,
        )
        return DETACHED
    if code > SIGNALS and code != DETACHED:
        click.echo(
            f"job {job_id} was ended by signal {code - SIGNALS}; the same command again goes on from there",
            err=True,
        )
    return code


class Answer:
    """Tells a command's JSON answer from the rest of its log, in which Ray joins stdout and stderr.

    `--json` prints one object or list, last, whose first and last line are a bracket alone.
    """

    def __init__(self, rest: Callable[[str], None]):
        self._rest = rest
        self._line = ""
        self._held: list[str] = []

    def write(self, text: str) -> None:
        """Take more of the log."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._take(line + "\n")

    def _take(self, line: str) -> None:
        if line.strip() in ("{", "[") and not line.startswith(" "):
            self._release()
            self._held = [line]
        elif self._held:
            self._held.append(line)
        else:
            self._rest(line)

    def _release(self) -> None:
        for line in self._held:
            self._rest(line)
        self._held = []

    def text(self) -> str:
        """The answer, empty where the command gave none; what was held and is none goes to the rest."""
        if self._line:
            self._take(self._line)
            self._line = ""
        ends = [i for i, line in enumerate(self._held) if line.rstrip("\n") in ("}", "]")]
        answer = self._held[: ends[0] + 1] if ends else []
        for line in self._held[len(answer) :]:
            self._rest(line)
        return "".join(answer)
