"""Logging to a real `mlflow server` that is killed during training and restarted later."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from titans_platform.data import prepare
from titans_platform.runs import reporter
from titans_platform.runs.execute import execute
from titans_platform.runs.load import spec_for
from titans_platform.runs.reporter import Reporter, send_left
from titans_platform.runs.spec import Tracking
from titans_platform.tracking import open_store

AWAY_AFTER = 7


@contextmanager
def served(folder: Path, port: int) -> Iterator[subprocess.Popen]:
    """Context manager: an MLflow server on a store in ``folder``, once it responds; killed on exit."""
    kept = ["--artifacts-destination", str(folder / "kept")]
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", *kept]
    command = [sys.executable, "-m", "mlflow", "server", *store, "--port", str(port), "--workers", "1"]
    with (folder / "server.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen) -> None:
    """Kill the server and its child processes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_has_every_point_once(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(reporter, "SEND_EVERY", 0.05)
    monkeypatch.setattr(reporter, "END_SECONDS", 1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, on_step = free.getsockname()[1], Reporter.on_step
    steps = tiny_run.optim.steps
    assert steps > AWAY_AFTER
    prepare(tiny_run.data, tmp_path)
    with served(tmp_path, port) as server:
        tracking = Tracking(f"http://127.0.0.1:{port}", "real")
        spec = spec_for(tiny_run, tmp_path, tracking=tracking)
        open_store(tracking.uri)

        def away(self: Reporter, step: int, metrics: dict[str, float]) -> None:
            on_step(self, step, metrics)
            if step == AWAY_AFTER:
                kill(server)

        monkeypatch.setattr(Reporter, "on_step", away)
        execute(spec)
    # the run is over; what did not reach the server is in its journal
    with served(tmp_path, port):
        assert not send_left(tmp_path)
        store = open_store(tracking.uri)
        (run,) = store.client.search_runs([store.experiment])
        points = [point.step for point in store.client.get_metric_history(run.info.run_id, "loss")]
    assert (points, run.info.status) == (list(range(1, steps + 1)), "FINISHED")
