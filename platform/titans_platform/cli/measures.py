"""The table of one run's measurements, chance beside each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table


def measures_table(result: Mapping[str, Any]) -> Table:
    """The result of ``evaluate`` as a table: each column, and under it its tasks at their lengths."""
    table = Table(box=box.SIMPLE_HEAD)
    for name, justify in [
        ("", "left"),
        ("value", "right"),
        ("± s.e.", "right"),
        ("chance", "right"),
        ("items", "right"),
    ]:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for column, value in result["columns"].items():
        table.add_row(
            f"[bold]{column}", f"[bold]{number(value)}", "", number(result["chance"].get(column)), ""
        )
        for name, task in result["tasks"].items():
            if name.partition("/")[0] == column:
                measured = (number(task["value"]), number(task["stderr"]), number(task["chance"]))
                table.add_row(f"  {name.partition('/')[2]}", *measured, f"{task['items']:,}")
    return table


def number(value: float | None) -> str:
    """Three decimals below ten, fewer above; a dash where there is nothing."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
