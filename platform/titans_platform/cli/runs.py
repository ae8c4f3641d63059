"""Runs: `titans runs` lists and deletes, `ui` and `paper` show."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from titans_platform.cli import dry_run_option, echo_json, file_type, json_option, root_option
from titans_platform.errors import UsageError
from titans_platform.files import read_json
from titans_platform.runs.folder import runs_under

STATES = ("done", "running", "failed", "interrupted")
# one worker is enough for one user, and starts faster
QUIET = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore"}


@click.group()
def runs() -> None:
    """List and delete the runs under --root.

    \b
    Example:
      titans runs list --state done
    """


@runs.command("list")
@click.option("--state", type=click.Choice(STATES), help="Only runs in this state.")
@click.option("--study", metavar="NAME", help="Only runs of this study, e.g. ablation or ablation-laptop.")
@root_option
@json_option
def list_runs(state: str | None, study: str | None, root: Path, as_json: bool) -> None:
    """List runs: name, state, variant, steps, size on disk, and the studies that they belong to.

    \b
    Example:
      titans runs list --study ablation
    """
    matching = [run for run in _runs(root) if state in (None, run["state"])]
    if study is not None:
        prefix = f"{study}-"
        matching = [run for run in matching if any(f"{name}-".startswith(prefix) for name in run["studies"])]
    if as_json:
        return echo_json(matching)
    for run in matching:
        line = "{name}  {state:<11} {variant:<16} {steps:>7,} {size:>11}  {labels}"
        click.echo(line.format(**run, size=_mb(run["bytes"]), labels=" ".join(run["studies"])).rstrip())
    size = _mb(sum(run["bytes"] for run in matching))
    click.echo(f"{len(matching)} runs, {size} under {root / 'cells'}", err=True)


@runs.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@root_option
@dry_run_option
def delete(names: tuple[str, ...], root: Path, dry_run: bool) -> None:
    """Delete runs: their folders, checkpoints and MLflow runs. A run that is being trained is refused.

    A study that includes a deleted run trains it again.

    \b
    Example:
      titans runs delete 3f2a91c0 --dry-run
    """
    from titans_platform.runs.load import find_run

    folders = dict.fromkeys(find_run(name, root) for name in names)
    if busy := next((folder for folder in folders if folder.is_held()), None):
        raise UsageError(f"{busy.name}: is running; stop it first")
    for folder in folders:
        click.echo(f"{'would delete' if dry_run else 'deleting'} {folder.path} ({_mb(_size(folder.path))})")
        if dry_run:
            continue
        with folder.hold(0):
            if os.environ.get("TITANS_MLFLOW") or (root / "mlflow.db").exists():
                # imports mlflow, which takes seconds
                from titans_platform.tracking import open_store

                open_store(root).discard_cell(folder.name)
            shutil.rmtree(folder.path)


def _runs(root: Path) -> Iterator[dict[str, Any]]:
    """Yield each run as --json has it; its ``bytes`` on disk include checkpoints."""
    studies: dict[str, list[str]] = {}
    for manifest in sorted((root / "studies").glob("*/cells.json")):
        for cell in (read_json(manifest) or {}).get("cells", []):
            studies.setdefault(cell["cell"], []).append(manifest.parent.name)
    for folder in runs_under(root):
        config = folder.record().get("config", {})
        yield {
            "name": folder.name, "state": folder.state(),
            "variant": str(config.get("model", {}).get("variant", "?")),
            "steps": int(config.get("optim", {}).get("steps", 0)),
            "bytes": _size(folder.path), "studies": list(dict.fromkeys(studies.get(folder.name, []))),
        }  # fmt: skip


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"


@click.command()
@root_option
@click.option("--adopt", is_flag=True, help="Take over a root that was copied or moved here.")
@click.option("--port", type=click.IntRange(1, 65535), default=5000, help="Port to listen on.")
@dry_run_option
def ui(root: Path, adopt: bool, port: int, dry_run: bool) -> int:
    """Serve the MLflow UI on the runs, studies and figures under --root, until Ctrl-C.

    With TITANS_MLFLOW, the address of a running MLflow server, print the address of our page there.

    \b
    Example:
      titans ui --port 5001
    """
    from titans_platform.clusters.steps import LOOPBACK, terminate_group
    from titans_platform.runs.reporter import send_left
    from titans_platform.tracking import adopt as adopt_store
    from titans_platform.tracking import open_store

    if adopt:
        adopt_store(root)
    if not (os.environ.get("TITANS_MLFLOW") or (root / "mlflow.db").exists()):
        raise UsageError(f"{root / 'mlflow.db'}: no store there; run a study or give another --root")
    store = open_store(root)
    for line in [] if dry_run else send_left(root):
        click.echo(line, err=True)
    page = f"#/experiments/{store.experiment}/runs"
    if store.server:
        click.echo(f"{store.server}/{page}")
        return 0
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store.uri, "--host", LOOPBACK]
    command += ["--port", str(port), "--workers", "1", "--uvicorn-opts", "--log-level warning"]
    if dry_run:
        click.echo(shlex.join(command))
        return 0
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError as error:
        cause = os.strerror(error.errno or 0)
        raise UsageError(f"--port {port}: {cause} on {LOOPBACK}; give another") from None
    # in its own process group, so that its children are terminated with it
    env = os.environ | QUIET
    server = subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    click.echo(f"http://{LOOPBACK}:{port}/{page}  (Ctrl-C ends it)")
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        terminate_group(server)


@click.command()
@root_option
@click.option("--out", type=file_type, metavar="FILE", help="Output file  [default: paper.html under --root]")
def paper(root: Path, out: Path | None) -> None:
    """Write one HTML page with all of the paper's tables and figures: our results next to the paper's.

    Our results are those under --root. The paper's own scales are always listed; what has not been run is
    marked as missing.

    \b
    Example:
      titans paper
    """
    from titans_platform.files import write_text
    from titans_platform.report.publish import PAPER_PAGE, paper_page
    from titans_platform.study.status import overview, studies_of_the_paper

    root = root.resolve()
    path = out or root / PAPER_PAGE
    write_text(path, paper_page(overview(root, studies_of_the_paper()), root))
    click.echo(f"page {path}")
