"""The views of a study: in its folder, and on its MLflow parent run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_platform.study import render
from titans_platform.study.cells import write_text
from titans_platform.study.table import Table

if TYPE_CHECKING:
    from titans_platform.tracking import Store

TABLE, SUMMARY, CELLS, FIGURE = "table.md", "table.csv", "cells.csv", "figure.png"


def write_views(table: Table, folder: Path) -> dict[str, Path]:
    """Write table.md, table.csv, cells.csv and figure.png; their paths by name."""
    # half a second of imports that `sweep run --help` need not wait for
    from titans_platform.study.figure import draw

    paths = {name: folder / name for name in (TABLE, SUMMARY, CELLS, FIGURE)}
    write_text(paths[TABLE], render.markdown(table))
    write_text(paths[SUMMARY], render.summary_csv(table))
    write_text(paths[CELLS], render.cells_csv(table))
    draw(table, paths[FIGURE])
    return paths


def log_views(store: Store, table: Table, label: str, paths: dict[str, Path]) -> str:
    """Put the views and the links to the cells on the study's parent run; the run's id."""
    run_id = store.study_run(label)
    log = store.run(run_id)
    log.table(list(_records(table)), "table.json")
    for path in paths.values():
        log.artifact(path)
    log.note(f"{render.markdown(table)}\n{_links(store, table)}\n")
    log.summary(_numbers(table))
    log.close("FINISHED" if not table.missing else "FAILED")
    return run_id


def _records(table: Table) -> list[dict[str, Any]]:
    columns = table.study.columns
    records = []
    for row, line in zip(table.rows, render.body(table), strict=True):
        fields: dict[str, Any] = {"row": line[0]}
        for i, key in enumerate(columns):
            fields[key], fields[f"{key}, paper"] = line[1 + 2 * i], line[2 + 2 * i]
        fields["parameters"], fields["state bytes"] = line[-2:]
        fields["cells"] = " ".join(result["cell"] for result in row.results)
        records.append(fields)
    return records


def _links(store: Store, table: Table) -> str:
    lines = ["**Cells**", ""]
    for row in table.rows:
        links = [
            f"[seed {result['seed']}]({store.url(result['mlflow_run_id'])})"
            for result in row.results
            if result.get("mlflow_run_id")
        ]
        if links:
            lines.append(f"- {row.row.name}: {', '.join(links)}")
    return "\n".join(lines)


def _numbers(table: Table) -> dict[str, float]:
    """Mean of each row and column as a metric, so that studies can be plotted against each other."""
    return {
        f"{key}/{_metric_name(row.row.name)}": entry.mean
        for row in table.rows
        for key, entry in row.entries.items()
        if entry.mean is not None
    }


def _metric_name(name: str) -> str:
    """MLflow takes letters, digits, space and a few signs in a metric's name."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name.replace("/", "-"))
