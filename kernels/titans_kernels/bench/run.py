"""Check each op of each shape, then time the correct ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from titans_kernels.bench.check import Judge, Verdict, judges
from titans_kernels.bench.inputs import BenchInputs, make
from titans_kernels.bench.machine import ceilings
from titans_kernels.bench.shapes import PHASES, BenchShape, Target, flops, traffic
from titans_kernels.bench.subjects import TimedForm
from titans_kernels.bench.timing import Clock, Interleaved, Runner, reason

Progress = Callable[[str], None]


@dataclass
class Bench:
    """A benchmark of some subjects on one device; gives a result for each shape."""

    subjects: list[TimedForm]
    dtype: torch.dtype
    device: torch.device
    repeats: int
    check_only: bool = False
    progress: Progress = lambda message: None
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Results of the shapes so far."""

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)
        self.ceilings = {} if self.check_only else ceilings(self.clock, self.dtype, self.device)

    def run(self, shapes: list[BenchShape]) -> Iterator[dict[str, Any]]:
        """Yield the result of each shape as soon as it is measured."""
        for shape in shapes:
            self.done[shape.name] = result = self._shape(shape)
            yield result

    def _shape(self, shape: BenchShape) -> dict[str, Any]:
        inputs = make(shape, self.dtype, self.device, seed=0)
        rows = self._checked(shape, inputs)
        if not self.check_only:
            self._time(shape, inputs, rows)
        return {
            "shape": shape.name,
            "is": str(shape),
            "sizes": _sizes(shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "flops": flops(shape.pairs, shape.chunk_size),
            "bytes": traffic(shape, self.dtype),
            "rows": list(rows.values()),
            "targets": [] if self.check_only else self._targets(shape, rows),
        }

    def _checked(self, shape: BenchShape, inputs: BenchInputs) -> dict[str, dict[str, Any]]:
        """Return a row for each subject: refused, red, failed, or green and perhaps to be timed."""
        rows = {s.name: _row(s, "refused", s.refuse(inputs)) for s in self.subjects}
        willing = [s for s in self.subjects if rows[s.name]["why"] is None]
        if willing:
            self.progress(f"{shape.name}: the reference")
        judged = judges(shape, self.dtype, self.device) if willing else []
        for subject in willing:
            self.progress(f"{shape.name}: checking {subject.name}")
            rows[subject.name] = _verdict(subject, judged)
        return rows

    def _time(self, shape: BenchShape, inputs: BenchInputs, rows: dict[str, dict[str, Any]]) -> None:
        green = [s for s in self.subjects if rows[s.name]["state"] == "green"]
        for subject in green:
            rows[subject.name]["why"] = subject.untimed()
        timed = [s for s in green if rows[s.name]["why"] is None]
        self.progress(f"{shape.name}: timing {', '.join(s.name for s in timed) or 'nothing'}")
        turns = Interleaved({s.name: partial(self._runner, s, inputs) for s in timed})
        turns.run(self.repeats)
        for name, cause in turns.failed.items():
            rows[name] |= {"state": "failed", "why": cause}
        for name, runner in turns.runners.items():
            rows[name] |= {"state": "timed", **self._measures(shape, runner, rows[name]["ours"])}
            rows[name]["times_first"] = _ratios(rows[name], rows[next(iter(turns.runners))])
        if self.device.type == "cuda" and "triton" in turns.runners:
            rows["triton"] |= self._graph(shape, turns.runners["triton"])

    def _runner(self, subject: TimedForm, inputs: BenchInputs) -> Runner:
        return Runner(subject.build(inputs), self.clock)

    def _measures(self, shape: BenchShape, runner: Runner, ours: bool) -> dict[str, Any]:
        samples = runner.samples
        measured: dict[str, Any] = {}
        for phase, seconds in zip((*PHASES, "step"), (samples.forward, samples.backward, samples.steps),
                                  strict=True):  # fmt: skip
            measured[phase] = _summary([1e9 * s / shape.token_heads for s in seconds])
            if ours and phase != "step":
                measured[phase] |= self._shares(shape, phase, measured[phase]["ns"])
        return measured

    def _shares(self, shape: BenchShape, phase: str, ns: float) -> dict[str, float]:
        """Return the share of the machine's measured rates, with and without recomputation of states."""
        work = flops(shape.pairs, shape.chunk_size)
        again = work["again"] if phase == "backward" else 0
        rate = work[phase] / ns * 1e9
        return {
            "flops_per_second": rate,
            "share_of_matmul": rate / self.ceilings["matmul"],
            "share_without_again": rate * (1 - again / work[phase]) / self.ceilings["matmul"],
            "share_of_copy": traffic(shape, self.dtype)[phase] / ns * 1e9 / self.ceilings["copy"],
        }

    def _graph(self, shape: BenchShape, runner: Runner) -> dict[str, Any]:
        try:
            seconds = runner.in_graph(self.repeats)
        except Exception as error:
            return {"graph": None, "graph_why": reason(error)}
        return {"graph": _summary([1e9 * s / shape.token_heads for s in seconds])}

    def _targets(self, shape: BenchShape, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Compare the kernels' results with their targets."""
        kernels = {
            name: row for name, done in self.done.items() for row in done["rows"] if row["name"] == "triton"
        }
        targets = []
        for target in shape.targets:
            reached = _found(target, rows, kernels | rows)
            targets.append({"is": str(target), "found": reached, "verdict": target.verdict(reached)})
        return targets


def _row(subject: TimedForm, state: str, why: str | None) -> dict[str, Any]:
    return {
        "name": subject.name, "note": subject.note, "ours": subject.ours, "required": subject.required,
        "state": state, "why": why,
    }  # fmt: skip


def _verdict(subject: TimedForm, judged: list[Judge]) -> dict[str, Any]:
    try:
        verdicts = subject.verify(judged)
    except Exception as error:
        return _row(subject, "failed", reason(error))
    red = next((v for v in verdicts if not v.green), None)
    row = _row(subject, "red" if red else "green", str(red) if red else None)
    return row | {"checks": [_as_json(v) for v in verdicts]}


def _as_json(verdict: Verdict) -> dict[str, Any]:
    # JSON has no infinity
    errors = {name: x if math.isfinite(x) else None for name, x in verdict.errors.items()}
    on = str(verdict.shape)
    return {"on": on, "errors": errors, "tolerance": verdict.tolerance, "says": str(verdict)}


def _summary(samples: list[float]) -> dict[str, Any]:
    return {"ns": median(samples), "least": min(samples), "most": max(samples), "samples": samples}


def _ratios(row: dict[str, Any], first: dict[str, Any]) -> dict[str, float]:
    return {phase: row[phase]["ns"] / first[phase]["ns"] for phase in (*PHASES, "step")}


def _ns(row: dict[str, Any], phase: str) -> float | None:
    return row[phase]["ns"] if row.get("state") == "timed" else None


def _found(target: Target, rows: dict[str, Any], others: dict[str, Any]) -> float | None:
    """Return the kernels' value for a target; None if they, or the form to compare with, were not timed."""
    row = rows.get("triton", {})
    ns = _ns(row, target.phase)
    if ns is None or target.unit == "ns":
        return ns
    if target.unit == "share":
        return row[target.phase]["share_of_matmul"]
    other = _ns(others.get(target.unit, {}), target.phase)
    return other / ns if other else None


def _sizes(shape: BenchShape) -> dict[str, Any]:
    return {name: value for name, value in vars(shape).items() if name not in ("targets", "small")}


def failures(result: dict[str, Any]) -> list[str]:
    """Return the reasons to fail the command: any red check, and a required form that could not run."""
    rows = result["rows"]
    bad = [r for r in rows if r["state"] == "red" or (r["state"] == "failed" and r["required"])]
    return [f"{result['shape']}: {row['name']}: {row['state']}, {row['why']}" for row in bad]
