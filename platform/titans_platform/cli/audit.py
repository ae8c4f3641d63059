"""`titans audit`: hold a sequence layer to what it says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from rich.text import Text

from titans_platform.cli import echo_json, json_option
from titans_platform.errors import UsageError
from titans_platform.text import plain_console, table

if TYPE_CHECKING:
    from titans_core.audit import Check, CheckResult, Report

WIDTH = 80
"""Columns of the table."""


@click.command()
@click.argument("target", required=False)
@click.option("--variant", metavar="NAME", help="A variant of this library instead of TARGET.")
@click.option("--dim", type=click.IntRange(1), default=32, help="Width of the layer.")
@click.option(
    "--length", type=click.IntRange(8), default=144, help="Tokens of the inputs, more than two chunks."
)
@click.option("--kwargs", default="{}", metavar="JSON", help="Arguments of the layer, or of the config.")
@click.option("--adapter", metavar="MODULE:FUNCTION", help="A function that wraps the layer in an Adapter.")
@click.option("--only", multiple=True, metavar="CHECK", help="Run this check only. May be repeated.")
@click.option("--skip", multiple=True, metavar="CHECK", help="Leave this check out. May be repeated.")
@json_option
def audit(
    target: str | None, variant: str | None, dim: int, length: int, kwargs: str, adapter: str | None,
    only: tuple[str, ...], skip: tuple[str, ...], as_json: bool,
) -> int:  # fmt: skip
    """Check that TARGET, a layer, is causal and trained, and the same in pieces, packed and decoded.

    TARGET is package.module:Class, or a function that makes the layer: an nn.Module that maps [B, T, D] to
    [B, T, E] or tokens to logits, or an adapter. docs/audit.md lists the checks. Exit code 1: a check failed.

    \b
    Example:
      titans audit my_lab.layers:MyLayer --dim 64
      titans audit --variant mac --kwargs '{"memory": {"rule": "gated_delta"}}'
    """
    if (target is None) == (variant is None):
        raise UsageError("audit: give either TARGET, package.module:Class, or --variant NAME")
    if variant is not None and adapter is not None:
        raise UsageError("--adapter: works only with TARGET")
    try:
        arguments = json.loads(kwargs)
    except json.JSONDecodeError as error:
        raise UsageError(f"--kwargs: not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise UsageError(f"--kwargs: {kwargs} is not an object of names and values")
    from titans_core.audit import AuditError, layer_factory, variant_factory
    from titans_core.audit import audit as run
    from titans_platform.cli.live import PlainLines

    console = plain_console(stderr=True)
    plain, done = PlainLines(console), 0
    try:
        if variant is not None:
            factory, name = variant_factory(variant, dim, **arguments), variant
        else:
            factory, name = layer_factory(str(target), dim, arguments, adapter), str(target).partition(":")[2]
        with console.status("audit") as status:

            def progress(check: Check, result: CheckResult | None) -> None:
                nonlocal done
                done += result is not None
                status.update(line := f"{done} checks done, {check.name} running")
                plain(lambda: line)

            report = run(
                factory, name=name, length=length, width=None if variant else dim, only=only, skip=skip,
                on_check=progress,
            )  # fmt: skip
    except AuditError as error:
        where = f"--variant {variant}" if variant else f"TARGET: {target}"
        raise UsageError(f"{where}: {error}") from None
    _show(report, as_json)
    return 0 if report.passed else 1


def _show(report: Report, as_json: bool) -> None:
    """Print the checks as a table, or as JSON."""
    if as_json:
        return echo_json(report.to_dict())
    grid = table("check", "verdict", "finding", left=3, width=WIDTH)
    styles = {"pass": "green", "fail": "bold red", "not applicable": "dim"}
    for result in report.results:
        verdict = "-" if result.verdict == "not applicable" else result.verdict
        grid.add_row(result.check, Text(verdict, styles[result.verdict]), result.finding)
    plain_console(width=WIDTH).print(grid)
    passed, failed = len(report.of("pass")), len(report.of("fail"))
    click.echo(
        f"{report.layer}: {passed} of {passed + failed} checks pass, "
        f"{len(report.of('not applicable'))} do not apply; {report.seconds:.0f} s"
    )
    for result in report.of("fail"):
        click.echo(f"fail {result.check}; expected: {result.proves}")
