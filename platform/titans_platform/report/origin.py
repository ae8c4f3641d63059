"""Where a report's numbers come from: the commands, the code, the data, the machines."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titans_platform.report.series import flat
from titans_platform.report.table import Table, TableRow
from titans_platform.study.schedule import COMMANDS


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

    def compare(self, run_ids: Iterable[str]) -> str:
        """One run's page, or several runs side by side."""
        listed = list(run_ids)
        if len(listed) == 1:
            return self.run(listed[0])
        runs, experiments = json.dumps(listed, separators=(",", ":")), json.dumps([self.experiment])
        return f"{self.address}/#/compare-runs?runs={runs}&experiments={experiments}"


def commands(folder: Path) -> list[str]:
    """The commands that worked on a study, first to last, each once."""
    try:
        lines = (folder / COMMANDS).read_text(encoding="utf-8").splitlines()
        return list(dict.fromkeys(str(json.loads(line)["command"]) for line in lines))
    except (OSError, ValueError, KeyError):
        return []


def again(table: Table) -> str:
    """The command that makes the whole table from nothing."""
    seeds = sorted({cell.seed for row in table.rows for cell in row.cells})
    changed = "".join(f" --set {shlex.quote(override)}" for override in table.overrides)
    listed = ",".join(map(str, seeds))
    return f"titans sweep run {table.study.name} --scale {table.scale_name} --seeds {listed}{changed}"


def facts(table: Table) -> dict[str, str]:
    """What the cells say of how they were made; where they differ, how many say what."""
    results = [result for row in table.rows for result in row.results]
    said = {
        "commit": [result.get("commit") for result in results],
        "data fingerprint": [result.get("data_fingerprint") for result in results],
        "version of the evaluation": [result.get("eval_version") for result in results],
    }
    made = [result.get("environment") or {} for result in results]
    for name in dict.fromkeys(name for environment in made for name in environment):
        said[name] = [environment.get(name) for environment in made]
    trained = sum(float(result.get("train_seconds") or 0) for result in results)
    measured = sum(float(result.get("eval_seconds") or 0) for result in results)
    tokens = sum(int(result.get("tokens") or 0) for result in results)
    effort = {
        "cells": f"{len(results)} of {len(results) + table.missing} done",
        "training": f"{tokens:,} tokens in {trained / 3600:.2f} hours of a cell's time",
        "measuring": f"{measured / 3600:.2f} hours",
    }
    return {name: _counted(values) for name, values in said.items()} | effort


def _counted(values: Iterable[Any]) -> str:
    counts = Counter(str(value) for value in values if value is not None)
    if len(counts) <= 1:
        return next(iter(counts), "not recorded")
    return ", ".join(f"{value} ({count} cells)" for value, count in counts.most_common())


def configs(table: Table) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The fields that all rows share, and for each row those that differ between rows."""
    fields = {row.row.name: _fields(row) for row in table.rows}
    named = dict.fromkeys(key for each in fields.values() for key in each)
    common = {
        key: next(iter(values))
        for key in named
        if len(values := {each.get(key, "—") for each in fields.values()}) == 1
    }
    own = {
        name: {key: each[key] for key in named if key in each and key not in common}
        for name, each in fields.items()
    }
    return common, own


def _fields(row: TableRow) -> dict[str, str]:
    config: Mapping[str, Any] = row.cells[0].config.model_dump(mode="json", exclude={"seed"})
    return {key: _text(value) for key, value in flat(_unlisted(config)).items()}


def _unlisted(value: Any) -> Any:
    """Lists of mappings as mappings, so that their fields have names."""
    if isinstance(value, Mapping):
        return {key: _unlisted(inner) for key, inner in value.items()}
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return {str(i): _unlisted(item) for i, item in enumerate(value)}
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
