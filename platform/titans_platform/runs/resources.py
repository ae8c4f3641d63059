"""What a run is trained on, what there is to place runs on, and how many of them fit at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from titans_core.config import Frozen, PositiveInt
from titans_platform.errors import ClusterError, UsageError

DRIVER_CPU = 0.01
"""CPUs of a trial that only drives other workers; Tune refuses to give it none."""


class Resources(Frozen):
    """What one run asks of the machine: one worker trains in the process it is started in, several under
    Ray Train."""

    workers: PositiveInt = 1
    cpus_per_worker: PositiveInt = 1
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0

    @property
    def cpus(self) -> float:
        """CPUs of all workers, with the process that drives them where there are several."""
        return self.workers * self.cpus_per_worker + DRIVER_CPU * (self.workers > 1)

    @property
    def gpus(self) -> float:
        """GPUs of all workers."""
        return self.workers * self.gpus_per_worker


@dataclass(frozen=True)
class Node:
    """CPUs and GPUs that are together: a worker needs all of its own on one node."""

    cpus: float
    gpus: float = 0

    def workers(self, resources: Resources) -> int:
        """How many workers fit."""
        fit = int(self.cpus // resources.cpus_per_worker)
        if resources.gpus_per_worker:
            # in ten thousandths, as Ray counts them: 1 // 0.1 is 9
            fit = min(fit, round(self.gpus * 10_000) // round(resources.gpus_per_worker * 10_000))
        return fit


@dataclass(frozen=True)
class Machine:
    """What runs can be placed on: this machine, or the nodes of a cluster."""

    cpus: float
    gpus: float = 0
    nodes: tuple[Node, ...] = ()
    """Empty: one node, this machine."""

    @staticmethod
    def of(nodes: list[dict[str, float]]) -> Machine:
        """A cluster from the resources of its nodes, as Ray names them."""
        parts = tuple(Node(float(node.get("CPU", 0)), float(node.get("GPU", 0))) for node in nodes)
        return Machine(sum(node.cpus for node in parts), sum(node.gpus for node in parts), parts)

    def workers(self, resources: Resources) -> int:
        """How many workers of a run fit at once."""
        return sum(node.workers(resources) for node in self.nodes or (Node(self.cpus, self.gpus),))


def this_machine(resources: Resources = Resources()) -> Machine:
    """The CPUs this process may use and, where a run asks for them, the GPUs torch sees."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not resources.gpus_per_worker:
        return Machine(cpus)
    import torch

    return Machine(cpus, torch.cuda.device_count())


def concurrency(resources: Resources, machine: Machine, requested: int | None = None) -> int:
    """How many runs fit at once, at most ``requested``.

    Raises UsageError, for a cluster ClusterError, where not one fits; UsageError where fewer fit than
    requested.
    """
    fit = machine.workers(resources) // resources.workers
    if machine.nodes and resources.workers > 1:
        fit = min(fit, int(machine.cpus / resources.cpus))
    if fit < 1:
        where = "cluster" if machine.nodes else "machine"
        refused = ClusterError if machine.nodes else UsageError
        raise refused(f"{_shortage(resources, machine)}; choose a smaller scale or a larger {where}")
    if requested is not None and not 1 <= requested <= fit:
        raise UsageError(f"--concurrency {requested}: {_shortage(resources, machine)}; give 1 to {fit}")
    return requested or fit


def _shortage(resources: Resources, machine: Machine) -> str:
    """What a run takes, what there is, and what is missing."""
    cpus, gpus = resources.workers * resources.cpus_per_worker, resources.gpus
    spread = f" on {resources.workers} workers" if resources.workers > 1 else ""
    need, have = _amount(cpus, gpus), _amount(machine.cpus, machine.gpus if gpus else 0)
    text = f"resources: a run takes {need}{spread}, there are {have}"
    if lack := _amount(max(0, cpus - machine.cpus), max(0, gpus - machine.gpus)):
        return f"{text}: {lack} missing"
    if machine.workers(resources) < resources.workers:
        each = _amount(resources.cpus_per_worker, resources.gpus_per_worker)
        return f"{text}, but only {machine.workers(resources)} workers of {each} fit on its nodes"
    return text


def _amount(cpus: float, gpus: float) -> str:
    return " and ".join([f"{cpus:g} CPU"] * bool(cpus) + [f"{gpus:g} GPU"] * bool(gpus))
