"""Kind `slurm`: each job is a batch job that starts Ray on its nodes, runs the study, and ends Ray.

`titans` runs on a login node; the storage is a folder that login and compute nodes share.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from titans_core.config import PositiveInt
from titans_platform.clusters.base import Cluster
from titans_platform.clusters.jobs import Jobs
from titans_platform.clusters.schema import ClusterSpec, Cpus
from titans_platform.clusters.slurmjobs import SlurmJobs
from titans_platform.clusters.steps import Note, Run, Step


class SlurmSpec(ClusterSpec):
    """What is asked of Slurm, and how Python is found there."""

    kind: Literal["slurm"]
    nodes: PositiveInt = 1
    cpus_per_node: PositiveInt
    gpus_per_node: Cpus = 0
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] = "24:00:00"
    """The most a job may take; a study that was cut off goes on when it is submitted again."""
    partition: str | None = None
    account: str | None = None
    exclusive: bool = True
    """Whole nodes. Ray's symmetric-run ends every Ray of the user on its nodes when the job is over."""
    options: tuple[str, ...] = ()
    """More of sbatch's options, e.g. --constraint=h100."""
    setup: tuple[str, ...] = ()
    """Shell lines before Ray starts: modules, `source .venv/bin/activate`."""

    @model_validator(mode="after")
    def _shared(self) -> SlurmSpec:
        if not self.storage:
            raise ValueError("storage: missing; give a folder that login and compute nodes share")
        if self.pip:
            raise ValueError("pip: install the requirements once, and activate them in `setup`")
        bad = [line for line in self.options if not line.startswith("-") or "\n" in line]
        if bad:
            raise ValueError(f"options: {bad[0]!r} is no option of sbatch")
        return self


class Slurm(Cluster[SlurmSpec]):
    """Batch jobs."""

    kind = "slurm"
    Spec = SlurmSpec
    sees_paths = True

    @property
    def one_machine(self) -> bool:
        """Whether jobs have one node."""
        return self.spec.nodes == 1

    @property
    def _jobs(self) -> SlurmJobs:
        assert self.spec.storage is not None
        return SlurmJobs(self.name, self.spec, Path(self.spec.storage) / "slurm" / self.name)

    def up_steps(self) -> list[Step]:
        """None but a look at the scheduler."""
        return [
            Run(("sbatch", "--version")),
            Note("nothing to start: each submit is a batch job with its own Ray"),
        ]

    def up(self) -> str:
        """Look for the scheduler."""
        self.up_steps()[0].do()
        return self.where()

    def down_steps(self) -> list[Step]:
        """Cancel what was submitted from here and is not over."""
        steps = [step for job in self._jobs.list() if not job.ended for step in self._jobs.stop_steps(job.id)]
        return steps or [Note("nothing to end: no job that was submitted here is queued or running")]

    def down(self) -> None:
        """Cancel them."""
        for step in self.down_steps():
            step.do()

    def status(self) -> dict[str, Any]:
        """The jobs; Slurm itself is asked for their state."""
        return {"state": "up", "where": self.where(), "nodes": [], **self._jobs.about()}

    def status_steps(self) -> list[Step]:
        """What is asked."""
        return [Run(("squeue", "--me", "--noheader", "--format=%i %T"))]

    def where(self) -> str:
        """The partition."""
        return (
            f"Slurm, {self.spec.nodes} nodes of partition {self.spec.partition or '(default)'} for each job"
        )

    def open_jobs(self) -> Iterator[Jobs]:
        """Batch jobs."""
        yield self._jobs

    def describe_jobs(self) -> tuple[list[Step], Jobs]:
        """The same."""
        return [], self._jobs
