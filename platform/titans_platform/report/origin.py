"""Where a report's numbers come from: the commands, the code, the data, the machines."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from titans_platform.flatten import flatten
from titans_platform.report.table import Table
from titans_platform.text import NONE


@dataclass(frozen=True)
class Links:
    """Where runs can be looked at: the address of a running MLflow, and our experiment in it."""

    address: str
    experiment: str
    view: str = ""
    """Name of the saved view of the study's cells."""

    @property
    def cells(self) -> str:
        """The list of the study's cells with its columns chosen."""
        return f"{self.address}/#/experiments/{self.experiment}/runs?viewStateShareKey=titans-{self.view}"

    def run(self, run_id: str) -> str:
        """The page of one run."""
        return f"{self.address}/#/experiments/{self.experiment}/runs/{run_id}"

    def compare(self, run_ids: Sequence[str]) -> str:
        """One run's page, or several runs side by side."""
        if len(run_ids) == 1:
            return self.run(run_ids[0])
        runs, experiments = json.dumps(run_ids, separators=(",", ":")), json.dumps([self.experiment])
        return f"{self.address}/#/compare-runs?runs={runs}&experiments={experiments}"


def again(table: Table) -> str:
    """The command that makes the whole table from nothing."""
    changed = "".join(f" --set {shlex.quote(override)}" for override in table.overrides)
    seeds = ",".join(map(str, table.seeds))
    return f"titans sweep run {table.study.name} --scale {table.scale_name} --seeds {seeds}{changed}"


def facts(table: Table) -> dict[str, str]:
    """What the cells say of how they were made; where they differ, how many say what."""
    results = table.results
    named = {
        "commit": "commit",
        "data fingerprint": "data_fingerprint",
        "version of the evaluation": "eval_version",
    }
    found = {name: _counted(result.get(key) for result in results) for name, key in named.items()}
    made = [result.get("environment") or {} for result in results]
    found |= {name: _counted(each.get(name) for each in made) for each in made for name in each}
    trained, measured, tokens = (
        sum(float(result.get(key) or 0) for result in results)
        for key in ("train_seconds", "eval_seconds", "tokens")
    )
    return found | {
        "cells": f"{len(results)} of {len(results) + table.missing} done",
        "training": f"{tokens:,.0f} tokens in {trained / 3600:.2f} hours, summed over the cells",
        "measuring": f"{measured / 3600:.2f} hours",
    }


def _counted(values: Iterable[Any]) -> str:
    counts = Counter(str(value) for value in values if value is not None)
    if len(counts) <= 1:
        return next(iter(counts), "not recorded")
    return ", ".join(f"{value} ({count} cells)" for value, count in counts.most_common())


def configs(table: Table) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The fields that all rows share, and for each row those that differ between rows."""
    fields = {
        row.row.name: {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in flatten(row.cells[0].config.model_dump(mode="json", exclude={"seed"})).items()
        }
        for row in table.rows
    }
    named = dict.fromkeys(key for each in fields.values() for key in each)
    values = {key: {each.get(key, NONE) for each in fields.values()} for key in named}
    common = {key: next(iter(found)) for key, found in values.items() if len(found) == 1}
    own = {
        name: {key: each[key] for key in named if key in each and key not in common}
        for name, each in fields.items()
    }
    return common, own
