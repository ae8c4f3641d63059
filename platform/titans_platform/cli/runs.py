"""What has been run: `titans runs` lists, tags and deletes; `clean` frees disk space; `ui`, `paper` show."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from titans_platform.cli import dry_run_option, echo_json, file_type, json_option, root_option
from titans_platform.errors import UsageError
from titans_platform.files import read_json
from titans_platform.runs.folder import CHECKPOINTS, RunFolder

if TYPE_CHECKING:
    from titans_platform.tracking import Store


STATES = ("done", "running", "failed", "interrupted")
SESSION_AGE = 24 * 3600.0
"""Seconds after which a Ray session without a process is deleted."""


class RunInfo(NamedTuple):
    """A run as `titans runs list` shows it."""

    name: str
    state: str
    variant: str
    steps: int
    bytes: int
    """On disk, checkpoints included."""
    studies: list[str]
    tags: list[str]


@click.group()
def runs() -> None:
    """Runs under --root: list, tag and delete them.

    \b
    Example:
      titans runs list --state done
    """


@runs.command("list")
@click.option("--state", type=click.Choice(STATES), help="Only runs in this state.")
@click.option("--study", metavar="NAME", help="Only runs of this study, e.g. ablation or ablation-laptop.")
@click.option("--tag", "tags", metavar="TAG", multiple=True, help="Only runs with this tag; repeatable.")
@root_option
@json_option
def list_runs(state: str | None, study: str | None, tags: tuple[str, ...], root: Path, as_json: bool) -> None:
    """List runs: name, state, variant, steps, size on disk, studies and tags.

    \b
    Example:
      titans runs list --study ablation --tag baseline
    """
    found = [run for run in _runs(root) if state in (None, run.state) and set(tags) <= set(run.tags)]
    if study is not None:
        found = [run for run in found if any(f"{label}-".startswith(f"{study}-") for label in run.studies)]
    if as_json:
        return echo_json([run._asdict() for run in found])
    for run in found:
        size = f"{run.bytes / 2**20:.1f} MB"
        more = " ".join([*run.studies, *(f"#{tag}" for tag in run.tags)])
        line = f"{run.name}  {run.state:<11} {run.variant:<16} {run.steps:>7,} {size:>11}  {more}"
        click.echo(line.rstrip())
    click.echo(f"{len(found)} runs, {_mb(sum(run.bytes for run in found))} under {root / 'cells'}", err=True)


@runs.command()
@click.argument("run")
@click.argument("names", nargs=-1, required=True, metavar="TAG...")
@click.option("--remove", is_flag=True, help="Remove the tags instead.")
@root_option
@dry_run_option
def tag(run: str, names: tuple[str, ...], remove: bool, root: Path, dry_run: bool) -> None:
    """Add tags to RUN (its name, or a prefix of it). They are stored in its folder and affect no results.

    \b
    Example:
      titans runs tag 3f2a91c0 baseline
    """
    folder = _folder(run, root)
    if bad := next((name for name in names if not re.fullmatch(r"[\w.:=-]+", name)), None):
        raise UsageError(f"tag {bad!r}: use letters, digits and . : = _ -")
    before = set(_tags(folder))
    kept = sorted(before - set(names) if remove else before | set(names))
    if not dry_run:
        with folder.hold(0):
            folder.update(tags=kept)
    click.echo(f"{folder.name}: {' '.join(kept) or 'no tags'}")


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
    folders = [_folder(name, root) for name in names]
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


@click.command()
@click.option("--all-checkpoints", is_flag=True, help="Delete the last checkpoint of finished runs too.")
@root_option
@dry_run_option
@json_option
def clean(all_checkpoints: bool, root: Path, dry_run: bool, as_json: bool) -> None:
    """Free disk space: delete older checkpoints of finished runs, and dead Ray sessions.

    The checkpoint that eval, generate and export use is kept. With --all-checkpoints it is deleted
    too: the run keeps its results, but cannot be used or trained further. Ray's session folders are deleted
    when they are older than a day and no process uses them.

    \b
    Example:
      titans clean --dry-run
    """
    paths = [*_old_checkpoints(root, all_checkpoints), *_dead_sessions()]
    freed = {str(path): _size(path) for path in paths}
    for path in [] if dry_run else paths:
        shutil.rmtree(path, ignore_errors=True)
    if as_json:
        return echo_json({"deleted": not dry_run, "bytes": freed})
    for path, size in freed.items():
        click.echo(f"{_mb(size):>11}  {path}")
    click.echo(f"{'would free' if dry_run else 'freed'} {_mb(sum(freed.values()))}")


def _old_checkpoints(root: Path, everything: bool) -> Iterator[Path]:
    # imports torch
    from titans_platform.runs.load import find_checkpoint

    used = {folder.record().get("config", {}).get("start_from") for folder in _folders(root)}
    for folder in _folders(root):
        points = sorted((folder.path / CHECKPOINTS).glob("step-*"))
        if not points or folder.state() != "done":
            continue
        try:
            kept = None if everything else find_checkpoint(str(folder.path), root)
        except UsageError as error:
            click.echo(f"{folder.name}: all checkpoints are kept: {error}", err=True)
            continue
        yield from (point for point in points if point.resolve() != kept and str(point.resolve()) not in used)


def _dead_sessions() -> Iterator[Path]:
    """Session folders of Ray that are older than a day, ours, and named by no living process."""
    place = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    sessions = [path for path in sorted(place.glob("session_2*")) if path.is_dir() and not path.is_symlink()]
    if not sessions:
        return
    alive = subprocess.run(["ps", "-axww", "-o", "command="], capture_output=True, text=True).stdout
    for path in sessions:
        last = max((file.lstat().st_mtime for file in path.rglob("*")), default=path.stat().st_mtime)
        if time.time() - last > SESSION_AGE and path.stat().st_uid == os.getuid() and path.name not in alive:
            yield path


def _runs(root: Path) -> Iterator[RunInfo]:
    studies: dict[str, list[str]] = {}
    for manifest in sorted((root / "studies").glob("*/cells.json")):
        for cell in (read_json(manifest) or {}).get("cells", []):
            studies.setdefault(cell["cell"], []).append(manifest.parent.name)
    for folder in _folders(root):
        config = folder.record().get("config", {})
        variant = str(config.get("model", {}).get("variant", "?"))
        steps = int(config.get("optim", {}).get("steps", 0))
        belongs = list(dict.fromkeys(studies.get(folder.name, [])))
        yield RunInfo(folder.name, folder.state(), variant, steps, _size(folder.path), belongs, _tags(folder))


def _folders(root: Path) -> list[RunFolder]:
    return [RunFolder(root, path.name) for path in sorted((root / "cells").glob("*")) if path.is_dir()]


def _folder(run: str, root: Path) -> RunFolder:
    found = [folder for folder in _folders(root) if folder.name.startswith(run)] if run else []
    if len(found) != 1:
        what = f"{len(found)} runs match this prefix; give more of the name" if found else "no such run"
        raise UsageError(f"{run}: {what} under {root / 'cells'}; titans runs list shows them")
    return found[0]


def _tags(folder: RunFolder) -> list[str]:
    return folder.record().get("tags", [])


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"


# one worker is enough for one user, and starts faster
QUIET = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore"}


@click.command()
@root_option
@click.option("--store", metavar="ADDRESS", help="Another MLflow store: a server or sqlite:/// address.")
@click.option("--adopt", is_flag=True, help="Take over a root that was copied or moved here.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=5000)
@click.option("--no-browser", is_flag=True, help="Print the address without opening a browser.")
@dry_run_option
def ui(
    root: Path, store: str | None, adopt: bool, host: str, port: int, no_browser: bool, dry_run: bool
) -> int:
    """Open the MLflow UI on the runs, studies and figures under --root, or on a running MLflow server.

    \b
    Example:
      titans ui --port 5001
      titans ui --store https://mlflow.example.org
    """
    from titans_platform.runs.reporter import send_left
    from titans_platform.tracking import adopt as adopt_store
    from titans_platform.tracking import open_store

    if adopt:
        adopt_store(root)
    if not (store or os.environ.get("TITANS_MLFLOW") or (root / "mlflow.db").exists()):
        raise UsageError(f"{root / 'mlflow.db'}: no store there; run a study or give another --root")
    opened = open_store(store or root)
    for line in [] if dry_run else send_left(root):
        click.echo(line, err=True)
    if opened.server:
        _show(opened, opened.server, no_browser or dry_run)
        return 0
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", opened.uri, "--host", host]
    command += ["--port", str(port), "--workers", "1", "--uvicorn-opts", "--log-level warning"]
    if dry_run:
        click.echo(shlex.join(command))
        return 0
    return _serve(command, opened, host, port, no_browser)


def _serve(command: list[str], store: Store, host: str, port: int, no_browser: bool) -> int:
    """Run the server until Ctrl-C; its exit code, 130 for Ctrl-C."""
    from titans_platform.clusters.steps import LOOPBACK, terminate_group, wait_for_port

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(f"--port {port}: {error.strerror} on {host}; give another --port") from None
    # in its own process group, so that its children are terminated with it
    null = subprocess.DEVNULL
    server = subprocess.Popen(command, env=os.environ | QUIET, start_new_session=True, stdout=null)
    reached = LOOPBACK if host == "0.0.0.0" else host
    try:
        if wait_for_port(server, reached, port):
            _show(store, f"http://{reached}:{port}", no_browser, "  (Ctrl-C ends it)")
        return server.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        terminate_group(server)


def _show(store: Store, address: str, no_browser: bool, hint: str = "") -> None:
    """Print the address; open a browser on it if this machine has a display."""
    import webbrowser

    where = f"{address}/{store.page}"
    click.echo(f"{where}{hint}")
    screen = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    # without a display it would open a text browser in this terminal
    if screen and not no_browser:
        webbrowser.open(where)


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
