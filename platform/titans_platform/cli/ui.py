"""`titans ui`: MLflow's own pages on the store of the runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from titans_platform.cli.options import dry_run_option, root_option


@click.command()
@root_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True)
@dry_run_option
def ui(root: Path, host: str, port: int, dry_run: bool) -> None:
    """Open MLflow on the runs, studies and figures under a root.

    \b
    Example:
      titans ui --port 5001
    """
    from titans_platform.errors import UsageError
    from titans_platform.tracking import open_store

    if not (root / "mlflow.db").exists():
        raise UsageError(f"{root / 'mlflow.db'}: no store there; run a study or give another --root")
    store = open_store(root)
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store.uri]
    command += ["--host", host, "--port", str(port)]
    if dry_run:
        click.echo(" ".join(command))
        return
    click.echo(f"http://{host}:{port}/#/experiments/{store.experiment}  (Ctrl-C ends it)")
    sys.stdout.flush()
    # the server takes this process's place, and with it Ctrl-C and the exit code
    os.execv(command[0], command)
