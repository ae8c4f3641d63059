"""Results as plain text of 80 columns."""

from __future__ import annotations

import textwrap
from typing import Any

WIDTH = 80
_LINE = "{:<17} {:<8} {:>9} {:>14} {:>7} {:>6} {:>6} {:>6}"
HEAD = _LINE.format("what", "pass", "ns", "least-most", "TFLOP/s", "matmul", "copy", "times")


def heading(machine: dict[str, Any], ceilings: dict[str, Any]) -> list[str]:
    """What was measured on, and how to read the tables."""
    card = machine["device"]
    if "multiprocessors" in machine:
        card += f" ({machine['multiprocessors']} SMs, driver {machine['driver']}, CUDA {machine['cuda']})"
    lines = [f"{card}; torch {machine['torch']}, Triton {machine['triton']}"]
    if ceilings:
        lines += wrapped(
            f"measured here: {ceilings['matmul'] / 1e12:.4g} TFLOP/s of matmul ({ceilings['matmul_of']}), "
            f"{ceilings['copy'] / 1e9:.4g} GB/s of copy"
        )
        lines += wrapped(
            "ns: median, a token and head; matmul, copy: share of these rates; times: the first row's time"
        )
    return lines


def lines_of(result: dict[str, Any], timed: bool, judged: bool) -> list[str]:
    """The table of one shape; targets are ``judged`` where there is a GPU."""
    lines = ["", *wrapped(f"{result['shape']}: {result['is']}; {result['dtype']}")]
    if timed:
        work = result["flops"]
        lines.append(
            f"kFLOP a token and head: forward {work['forward'] / 1e3:.0f}, "
            f"backward {work['backward'] / 1e3:.0f} ({work['again'] / 1e3:.0f} of it again)"
        )
        lines.append(HEAD)
    for row in result["rows"]:
        lines += _timed(row) if row["state"] == "timed" else _untimed(row)
    for target in result["targets"] if judged else []:
        lines += wrapped(f"target: {target['is']}: {target['verdict']}")
    return lines


def wrapped(text: str, indent: int = 2) -> list[str]:
    """Lines of 80 columns, all but the first indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent)


def _timed(row: dict[str, Any]) -> list[str]:
    lines = []
    for phase, name in (("forward", row["name"]), ("backward", "")):
        m = row[phase]
        rates = ["", "", ""]
        if "share_of_matmul" in m:
            shares = (m["share_of_matmul"], m["share_of_copy"])
            rates = [_number(m["flops_per_second"] / 1e12), *(f"{share:.1%}" for share in shares)]
        span = f"{_number(m['least'])}-{_number(m['most'])}"
        times = f"{_number(row['times_first'][phase])}x"
        lines.append(_LINE.format(name, phase, _number(m["ns"]), span, *rates, times))
    return lines + _graph(row)


def _graph(row: dict[str, Any]) -> list[str]:
    if row.get("graph"):
        graph, step = _number(row["graph"]["ns"]), _number(row["step"]["ns"])
        return [f"  both passes from a CUDA graph: {graph} ns, launched one by one {step}"]
    return wrapped(f"  no CUDA graph: {row['graph_why']}") if "graph_why" in row else []


def _untimed(row: dict[str, Any]) -> list[str]:
    says = "; ".join(check["says"] for check in row.get("checks", []))
    text = {
        "refused": f"chunked ({row['why']})" if row["name"] == "triton" else f"left out ({row['why']})",
        "red": f"RED, not timed: {row['why']}",
        "failed": f"failed: {row['why']}",
        "green": f"right: {says}" + (f"; not timed ({row['why']})" if row["why"] else ""),
    }[row["state"]]
    return wrapped(f"{row['name']:<17} {text}", indent=18)


def _number(value: float) -> str:
    """Three digits, or all before the point; at most 7 characters below a million."""
    if value < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
