"""`titans ui` and `titans paper`: pages of what has been run."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from titans_platform.cli import dry_run_option, root_option
from titans_platform.errors import UsageError

if TYPE_CHECKING:
    from titans_platform.tracking import Store

QUIET = {
    # one worker is enough for one user, and starts faster
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PYTHONWARNINGS": "ignore",
}


@click.command()
@root_option
@click.option(
    "--store",
    metavar="ADDRESS",
    help="MLflow server or sqlite:/// address to use instead of the store under --root.",
)
@click.option("--adopt", is_flag=True, help="Take over a root that was copied or moved here.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True)
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
    opened = open_store(store or _local(root))
    for line in [] if dry_run else send_left(root):
        click.echo(line, err=True)
    if opened.server:
        _show(opened, opened.server, no_browser or dry_run)
        return 0
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", opened.uri]
    command += ["--host", host, "--port", str(port)]
    command += ["--workers", "1", "--uvicorn-opts", "--log-level warning"]
    if dry_run:
        click.echo(shlex.join(command))
        return 0
    return _serve(command, opened, host, port, no_browser)


def _local(root: Path) -> Path:
    if not os.environ.get("TITANS_MLFLOW") and not (root / "mlflow.db").exists():
        raise UsageError(f"{root / 'mlflow.db'}: no store there; run a study or give another --root")
    return root


def _serve(command: list[str], store: Store, host: str, port: int, no_browser: bool) -> int:
    """Run the server until Ctrl-C; its exit code, 130 for Ctrl-C."""
    from titans_platform.clusters.steps import LOOPBACK, terminate_group, wait_for_port

    _check_free(host, port)
    # in its own process group, so that its children are terminated with it
    server = subprocess.Popen(
        command, env=os.environ | QUIET, start_new_session=True, stdout=subprocess.DEVNULL
    )
    reached = LOOPBACK if host == "0.0.0.0" else host
    try:
        if wait_for_port(server, reached, port):
            _show(store, f"http://{reached}:{port}", no_browser, "  (Ctrl-C ends it)")
        return server.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        terminate_group(server)


def _check_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(f"--port {port}: {error.strerror} on {host}; give another --port") from None


def _show(store: Store, address: str, no_browser: bool, hint: str = "") -> None:
    """Print the address; open a browser on it if this machine has a display."""
    import webbrowser

    where = f"{address}/{store.page}"
    click.echo(f"{where}{hint}")
    screen = (
        sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    # without a display it would open a text browser in this terminal
    if screen and not no_browser:
        webbrowser.open(where)


@click.command()
@root_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Output file  [default: paper.html under --root]",
)
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
    page = paper_page(overview(root, studies_of_the_paper()), root)
    path = out or root / PAPER_PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    click.echo(f"page {path}")
