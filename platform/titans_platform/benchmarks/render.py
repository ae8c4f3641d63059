"""A benchmark's result as a table of 80 columns."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def print_memory(result: dict[str, Any], console: Console) -> None:
    """The table of `memory.run`, with how to read it."""
    shape, peer = result["shape"], result["peer"]
    console.print(
        f"Memory layer, forward and backward: B = {shape['batch']}, {shape['heads']} heads of "
        f"{shape['head_dim']}, depth {shape['depth']}, hidden {shape['expansion'] * shape['head_dim']}, "
        f"chunk {shape['chunk_size']}; float32, threads: {shape['threads']}, median of {shape['pairs']}."
    )
    console.print(_table(result))
    notes = ["op/matmul: the operator's products over the machine's batched-matmul rate, same sizes."]
    if peer:
        notes.append(f"peer: {peer['name']} {peer['version']}, its batch_size {shape['chunk_size']}.")
        notes += [_peer_note(row) for row in result["rows"] if "peer" in row]
    notes += [f"{row['peer_failed']}." for row in result["rows"] if row["peer_failed"]]
    if any("base" in row for row in result["rows"]):
        notes.append(f"* over its own speed at T = {shape['base_length']}.")
    for note in notes:
        console.print(f"  {note}", style="dim", highlight=False)


def _peer_note(row: dict[str, Any]) -> str:
    chunk = row["peer"]["chunk_size"]
    what = "what we compute" if chunk == 1 else "reads and writes once a chunk"
    return f"  T = {row['length']}: its chunk_size {chunk}, {what}."


def _table(result: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("T", "tokens/s", "peer", "ratio", "peak MB", "peer MB", "op/matmul"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        ours, peer = row["ours"], row.get("peer")
        table.add_row(
            f"{row['length']}",
            f"{ours['tokens_per_second']:,.0f}",
            f"{peer['tokens_per_second']:,.0f}" if peer else "failed" if row["peer_failed"] else "",
            _ratio(row),
            f"{ours['peak_mb']:,.0f}",
            f"{peer['peak_mb']:,.0f}" if peer else "",
            f"{row['operator']['share_of_matmul']:.0%}",
        )
    return table


def _ratio(row: dict[str, Any]) -> str:
    for name, mark in (("times_peer", ""), ("times_base", "*")):
        if name in row:
            r = row[name]
            digits = 0 if r["median"] >= 10 else 2
            span = f"({r['least']:.{digits}f}-{r['most']:.{digits}f})"
            return f"{r['median']:.{digits}f}x{mark} {span}"
    return ""
