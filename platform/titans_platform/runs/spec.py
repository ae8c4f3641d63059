"""`RunSpec`, everything that defines a run, and how many runs fit on a machine at once."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from titans_core.config import Frozen, PositiveInt
from titans_platform.config import RunConfig
from titans_platform.errors import ClusterError, UsageError, nearest
from titans_platform.provenance import GPUS, Gpu, cores, gpu_named
from titans_platform.runs.folder import RunFolder

DRIVER_CPU = 0.01
"""CPUs of a trial that only drives workers; Tune does not accept 0."""
NODE_GPUS, CPUS_PER_GPU = 8, 12
"""A node of a cluster that is only described, e.g. as 16xH100."""


class Resources(Frozen):
    """Resources of one run. A single worker trains in the process that starts it, several under Ray Train."""

    workers: PositiveInt | tuple[PositiveInt, PositiveInt] = 1
    """Number of workers, or [min, max] for an elastic run, which trains with as many as are available."""
    cpus_per_worker: PositiveInt = 1
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0

    @field_validator("workers")
    @classmethod
    def _in_order(cls, workers: int | tuple[int, int]) -> int | tuple[int, int]:
        if isinstance(workers, int):
            return workers
        if workers[0] > workers[1]:
            raise ValueError(f"the least, {workers[0]}, is more than the most, {workers[1]}")
        return workers if workers[0] < workers[1] else workers[0]

    @property
    def min_workers(self) -> int:
        """The fewest workers the run trains with."""
        return self.workers if isinstance(self.workers, int) else self.workers[0]

    @property
    def max_workers(self) -> int:
        """The most workers the run trains with."""
        return self.workers if isinstance(self.workers, int) else self.workers[1]

    @property
    def several(self) -> bool:
        """True if there may be more than one worker; several run under Ray Train."""
        return self.max_workers > 1

    @property
    def hashed_workers(self) -> int | str:
        """Number of workers, or "elastic" for a range, as it enters the run's hash."""
        return self.workers if isinstance(self.workers, int) else "elastic"

    @property
    def cpus(self) -> float:
        """CPUs of all workers and, if there are several, of the process that drives them."""
        return self.max_workers * self.cpus_per_worker + DRIVER_CPU * self.several

    @property
    def gpus(self) -> float:
        """GPUs of all workers."""
        return self.max_workers * self.gpus_per_worker

    def whole_gpus(self, runs: int = 1) -> int:
        """Return how many GPUs ``runs`` concurrent runs need; a worker's fraction must fit on one GPU."""
        workers = runs * self.max_workers
        if 0 < self.gpus_per_worker < 1:
            return math.ceil(workers / _workers_on(1, self.gpus_per_worker))
        return math.ceil(workers * self.gpus_per_worker)


@dataclass(frozen=True)
class Tracking:
    """A run's place in MLflow, its title, parent, parameters and tags."""

    uri: str
    """The store's address."""
    title: str
    """Name of the run in MLflow."""
    parent: str | None = None
    """MLflow run id of the study that the run belongs to."""
    params: Collection[str] = ()
    """Fields of the config that are logged as MLflow parameters, beside what every run logs."""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunSpec:
    """Everything `execute` needs; built by `titans train`, the cells of a grid and the trials of a search.

    Of these fields only ``config`` and ``resources.hashed_workers`` affect the run's numbers and enter its
    name.
    """

    config: RunConfig
    root: Path
    """Storage root; must be shared by all workers."""
    name: str
    """The run's folder under ``root/cells``; computed by `run_name`."""
    commit: str
    """The commit of the code that runs it."""
    data: str
    """Fingerprint of the data from which ``name`` was computed; it trains on no other data."""
    resources: Resources = Resources()
    tracking: Tracking | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """Copied into the result: ``study`` and ``row``."""
    start: Path | None = None
    """Checkpoint of a shorter run to start from, if this run has none of its own."""
    rung: tuple[int, str] | None = None
    """For a trial: the optimiser step to stop after, and the only column to measure."""
    profile: bool = False
    """Write a trace of a few steps to the run's folder."""

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(self.root, self.name)

    @property
    def trace(self) -> Path:
        """Path of the trace of a profiled run on rank 0; the other ranks write theirs to the same folder."""
        return self.folder.path / "profile" / "worker-0.json.gz"


@dataclass(frozen=True)
class Machine:
    """The resources that runs are placed on: this machine, or the nodes of a cluster."""

    cpus: float
    gpus: float = 0
    nodes: tuple[Machine, ...] = ()
    """The nodes of a cluster; empty for a single machine. A worker cannot span nodes."""
    gpu: Gpu | None = None
    """The kind of its GPUs, of several kinds the one with the least memory; None if it is unknown."""

    @staticmethod
    def of(nodes: list[dict[str, float]]) -> Machine:
        """Describe a cluster by its nodes' resources in Ray's names (CPU, GPU, accelerator_type:H100)."""
        parts = tuple(Machine(float(node.get("CPU", 0)), float(node.get("GPU", 0))) for node in nodes)
        named = (key.partition("accelerator_type:")[2] for node in nodes for key in node)
        known = [gpu for name in named if (gpu := gpu_named(name))]
        least = min(known, key=lambda gpu: gpu.memory, default=None)
        return Machine(sum(node.cpus for node in parts), sum(node.gpus for node in parts), parts, least)

    @staticmethod
    def described(text: str, where: str) -> Machine:
        """Read a cluster such as 16xH100, 8 GPUs a node. Raises UsageError that begins with ``where``."""
        count, x, name = text.strip().partition("x")
        if not (x and re.fullmatch("[1-9][0-9]{0,4}", count)):
            raise UsageError(f"{where}: {text!r} is not a number of GPUs of a kind; give e.g. 8xH100")
        if (gpu := {known.casefold(): gpu for known, gpu in GPUS.items()}.get(name.casefold())) is None:
            raise UsageError(f"{where}: {name!r} is not a known GPU; {nearest(name, GPUS)}")
        whole, rest = divmod(int(count), NODE_GPUS)
        each = [NODE_GPUS] * whole + [rest] * bool(rest)
        parts = tuple(Machine(CPUS_PER_GPU * gpus, gpus) for gpus in each)
        return Machine(CPUS_PER_GPU * int(count), int(count), parts, gpu)

    def workers(self, resources: Resources) -> int:
        """Return the number of workers with these resources that fit at once."""
        if self.nodes:
            return sum(node.workers(resources) for node in self.nodes)
        fit = int(self.cpus // resources.cpus_per_worker)
        if resources.gpus_per_worker:
            fit = min(fit, _workers_on(self.gpus, resources.gpus_per_worker))
        return fit


def _workers_on(gpus: float, each: float) -> int:
    """Return how many workers fit that need ``each`` GPUs; a fraction of a GPU cannot span two."""
    # in units of 1/10,000, as Ray counts them: 1 // 0.1 is 9
    share = round(each * 10_000)
    if share < 10_000:
        return int(gpus) * (10_000 // share)
    return round(gpus * 10_000) // share


def this_machine(resources: Resources = Resources()) -> Machine:
    """Return the CPUs this process may use and, if ``resources`` include GPUs, the ones visible to torch."""
    if not resources.gpus_per_worker:
        return Machine(cores())
    import torch

    gpu = None
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        known, arch = gpu_named(device.name), 10 * device.major + device.minor
        gpu = Gpu(device.name, device.total_memory / 2**30, known.flops if known else 0.0, arch)
    return Machine(cores(), torch.cuda.device_count(), gpu=gpu)


def concurrency(resources: Resources, machine: Machine, requested: int | None = None) -> int:
    """Return the number of runs that fit at once, at most ``requested``.

    Raises UsageError (ClusterError on a cluster) if not even one fits, and UsageError if fewer fit than
    requested.
    """
    least = resources.model_copy(update={"workers": resources.min_workers})
    fit = _fit(resources, machine) or min(1, _fit(least, machine))
    if fit < 1:
        where = "cluster" if machine.nodes else "machine"
        refused = ClusterError if machine.nodes else UsageError
        raise refused(f"{_shortage(least, machine)}; choose a smaller scale or a larger {where}")
    if requested is not None and not 1 <= requested <= fit:
        raise UsageError(f"--concurrency {requested}: {_shortage(resources, machine)}; give 1 to {fit}")
    return requested or fit


def _fit(resources: Resources, machine: Machine) -> int:
    fit = machine.workers(resources) // resources.max_workers
    if machine.nodes and resources.several:
        fit = min(fit, int(machine.cpus / resources.cpus))
    return fit


def _shortage(resources: Resources, machine: Machine) -> str:
    """Return the message for a lack of resources: what a run takes, what there is, and what is missing."""
    cpus, gpus = resources.max_workers * resources.cpus_per_worker, resources.gpus
    spread = f" on {resources.max_workers} workers" if resources.several else ""
    needed, available = _amount(cpus, gpus), _amount(machine.cpus, machine.gpus if gpus else 0)
    text = f"resources: a run takes {needed}{spread}, there are {available}"
    if lack := _amount(max(0, cpus - machine.cpus), max(0, gpus - machine.gpus)):
        return f"{text}: {lack} missing"
    if machine.workers(resources) < resources.max_workers:
        each = _amount(resources.cpus_per_worker, resources.gpus_per_worker)
        return f"{text}, but only {machine.workers(resources)} workers of {each} fit on its nodes"
    return text


def _amount(cpus: float, gpus: float) -> str:
    return " and ".join([f"{cpus:g} CPU"] * bool(cpus) + [f"{gpus:g} GPU"] * bool(gpus))
