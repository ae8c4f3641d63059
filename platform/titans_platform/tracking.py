"""The only module that uses MLflow: a store, a parent run for a study, a child run for each cell.

The driver opens the store (which creates and migrates it once) and creates the study's run; the run of a cell
is resumed by its name, so that a run which was killed and restarted stays one run with each step logged once.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import posixpath
import re
import shutil
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote, unquote, urlsplit

# read when MLflow is imported
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# the defaults are minutes, for which a hanging server would block the end of a run
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_SOURCE_NAME, MLFLOW_SOURCE_TYPE

from titans_platform.config import digest
from titans_platform.errors import NotWritable, UsageError, one_line
from titans_platform.files import file_lock, write_error

# alembic logs every migration, mlflow every table
for _name in ("mlflow", "alembic"):
    logging.getLogger(_name).setLevel(logging.ERROR)
# it logs the traceback of errors that are raised anyway
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

EXPERIMENT = "titans"
STORE = "TITANS_MLFLOW"
"""Address of an MLflow server to use in place of the SQLite file under the root."""
CELL_TAG = "titans.cell"
STUDY_TAG = "titans.study"
_PARAM_LENGTH = 6000
"""Characters of a param that MLflow takes."""
_BATCH = {"metrics": 1000, "params": 100, "tags": 100}
"""MLflow's limits per call."""


def store_uri(root: Path) -> str:
    """Return the address of the store of ``root``: TITANS_MLFLOW if set, else an SQLite file under it."""
    if (configured := os.environ.get(STORE)) and urlsplit(configured).password:
        fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
        raise UsageError(f"{STORE}: holds a password; {fix}")
    path = re.sub("[%?#]", lambda sign: quote(sign[0]), str(root.resolve() / "mlflow.db"))
    return configured or f"sqlite:///{path}"


def check_store(root: Path) -> None:
    """Raise UsageError if the store of ``root`` cannot be opened; does not create one."""
    if os.environ.get(STORE):
        check_server(store_uri(root))
    elif (path := root.resolve() / "mlflow.db").exists():
        _check_sqlite(path)


def open_store(where: Path | str) -> TrackingStore:
    """Open the store under a root folder, or at a tracking address; create and migrate it where needed.

    Raises UsageError where it cannot be opened.
    """
    uri = store_uri(where) if isinstance(where, Path) else where
    if uri.startswith("sqlite:///"):
        path = Path(unquote(uri.removeprefix("sqlite:///")))
        _check_sqlite(path)
        # concurrent first writers on a new file break the migration
        with file_lock(Path(f"{path}.lock"), timeout=-1):
            _start_from_template(path)
            try:
                return _connect(uri, f"{path.parent.resolve().as_uri()}/artifacts")
            finally:
                if "%" in uri:
                    # MLflow makes a folder of the address as it is written
                    with suppress(OSError):
                        os.removedirs(Path(uri.removeprefix("sqlite:///")).parent)
    if uri.startswith(("http://", "https://")):
        check_server(uri)
        return _connect(uri, None)
    raise UsageError(f"tracking store {uri}: should start with sqlite:///, http:// or https://")


def adopt(root: Path) -> None:
    """Make the store that was copied or moved to ``root`` its own, with its artifacts below ``root``.

    Raises UsageError if there is no store, or it cannot be opened.
    """
    if not (path := root.resolve() / "mlflow.db").exists():
        raise UsageError(f"{path}: no store there to adopt")
    _check_sqlite(path)
    new_uri = f"{root.resolve().as_uri()}/artifacts"
    try:
        with file_lock(Path(f"{path}.lock"), -1), closing(sqlite3.connect(path, timeout=30)) as db, db:
            query = "SELECT artifact_location FROM experiments WHERE name = ?"
            for (old_uri,) in db.execute(query, (EXPERIMENT,)).fetchall():
                for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                    moved = f"{column} = ? || substr({column}, ?)"
                    update = f"UPDATE {table} SET {moved} WHERE substr({column}, 1, ?) = ?"
                    db.execute(update, (new_uri, len(old_uri) + 1, len(old_uri), old_uri))
    except sqlite3.Error as error:
        raise _refused(path, "cannot be changed", "is it a store of MLflow?", error) from None


def _start_from_template(path: Path) -> None:
    """Begin a new SQLite store as a copy of an empty one in the user's cache folder.

    MLflow's migrations of a new file take 2 s of CPU. Without a cache folder MLflow creates the file.
    """
    # `_check_sqlite` has created the file
    if path.stat().st_size:
        return
    copy = path.with_name(f"{path.name}.new")
    # whatever goes wrong here, MLflow may still create the file, and reports its own error if not
    with suppress(Exception):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titans"
        template = cache / f"mlflow-{mlflow.__version__}.db"
        if not template.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=cache) as aside:
                fresh = Path(aside) / template.name
                MlflowClient(f"sqlite:///{fresh}").search_experiments(max_results=1)
                fresh.replace(template)
        shutil.copyfile(template, copy)
        with closing(sqlite3.connect(copy)) as connection, connection:
            # MLflow's default experiment, which is not used, was given the folder that it was made in
            connection.execute("UPDATE experiments SET artifact_location = ?", (f"{path.parent}/mlruns/0",))
        copy.replace(path)
    copy.unlink(missing_ok=True)


def _connect(uri: str, artifacts: str | None) -> TrackingStore:
    try:
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        known = client.get_experiment_by_name(EXPERIMENT)
        recorded = known.artifact_location if known else ""
        if artifacts and recorded.startswith("file:") and urlsplit(recorded).path != urlsplit(artifacts).path:
            # MLflow would overwrite the original's artifacts
            fix = "titans ui --adopt --root HERE makes it the copy's own; or work in the original --root"
            raise _refused(uri, f"was copied or moved here: its artifacts are in {recorded}", fix)
        # show the UI of training runs, not of agents
        kind = {"mlflow.experimentKind": "custom_model_development"}
        experiment = known.experiment_id if known else client.create_experiment(EXPERIMENT, artifacts, kind)
    except UsageError:
        raise
    except Exception as error:  # MLflow lets SQLAlchemy's and alembic's own errors through
        raise _refused(uri, "cannot be opened", "move it away or give another --root", error) from None
    return TrackingStore(client, uri, experiment)


def _check_sqlite(path: Path) -> None:
    """Fail fast on a file that MLflow would retry ten times to open."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=30)) as connection:
            connection.execute("PRAGMA schema_version").fetchone()
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise _refused(path, "cannot be opened", "give another --root", error) from None
        raise write_error(path, error) from None
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY):
            cause = f"cannot be written: {error}; free space there, or give another --root"
            raise NotWritable(f"{path}: {cause}") from None
        raise _refused(path, "cannot be opened", "move the file away or give another --root", error) from None


def check_server(uri: str) -> None:
    """Raise UsageError if the server does not answer here. /health would answer under any host name."""
    try:
        search = f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1"
        urllib.request.urlopen(search, timeout=10)
    except urllib.error.HTTPError as error:
        if "Host header" in error.read(200).decode(errors="replace"):
            unknown = "takes no requests under this name"
            raise _refused(uri, unknown, "start it with --allowed-hosts") from None
        if error.code >= 500:
            raise _refused(uri, one_line(error), "check the server's log") from None
        # a server that wants a password says so here and to nobody else
        if error.code not in (401, 403):
            raise _refused(uri, one_line(error), "is it an MLflow server?") from None
    except (OSError, ValueError) as error:
        raise _refused(uri, "no answer", "is the server up?", error) from None


def _refused(store: Path | str, cause: str, fix: str, error: Exception | None = None) -> UsageError:
    detail = f": {one_line(error)}" if error else ""
    return UsageError(f"tracking store {store}: {cause}{detail}; {fix}")


class TrackingStore:
    """An open MLflow store and our experiment in it."""

    def __init__(self, client: MlflowClient, uri: str, experiment: str):
        self.client, self.uri, self.experiment = client, uri, experiment

    @property
    def server(self) -> str | None:
        """Address of the server that is the store; None if the store is a file."""
        return self.uri.rstrip("/") if self.uri.startswith(("http://", "https://")) else None

    def study_run(
        self, study: str, tags: Mapping[str, str] | None = None, params: Mapping[str, Any] | None = None
    ) -> str:
        """Return the run id of a study's parent run, created with ``params`` the first time."""
        run_id = self.cell_run(study, study, tag=STUDY_TAG, params=params, tags=tags)
        self.client.update_run(run_id, status="RUNNING")
        return run_id

    def cell_run(
        self, cell: str, name: str, *, parent: str | None = None, params: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None, tags: Mapping[str, str] | None = None, tag: str = CELL_TAG,
    ) -> str:  # fmt: skip
        """Return the run id of a cell's run, which ``tag`` names, created as ``name`` the first time.

        ``params`` become columns to compare runs by; the whole ``config`` is put beside them as a file.
        """
        if (run_id := self.find(tag, cell)) is None:
            system_tags = {MLFLOW_SOURCE_NAME: "titans", MLFLOW_SOURCE_TYPE: "LOCAL", tag: cell}
            system_tags |= {MLFLOW_PARENT_RUN_ID: parent} if parent else {}
            run_id = self.client.create_run(self.experiment, tags=system_tags, run_name=name).info.run_id
            columns = [Param(name_of(k), str(v)[:_PARAM_LENGTH]) for k, v in (params or {}).items()]
            log_entries(self.client, run_id, params=columns)
            if config:
                self.client.log_dict(run_id, dict(config), "config.json")
        log_entries(self.client, run_id, tags=tags_of(tags or {}))
        return run_id

    def discard_cell(self, cell: str) -> None:
        """Delete the MLflow run of a cell, so that a rerun starts with an empty log."""
        if run_id := self.find(CELL_TAG, cell):
            self.client.delete_run(run_id)

    def run(self, run_id: str) -> RunLog:
        """Resume the run's log; sets the run's status to RUNNING."""
        return RunLog(self.client, run_id)

    def running(self, parent: str) -> dict[str, str]:
        """Run ids by cell of a study's runs with status RUNNING, whose process may be dead."""
        where = f"attributes.status = 'RUNNING' and tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent}'"
        runs = self.client.search_runs([self.experiment], where, max_results=10_000)
        return {run.data.tags[CELL_TAG]: run.info.run_id for run in runs if CELL_TAG in run.data.tags}

    def find(self, tag: str, value: str) -> str | None:
        """Return the run id of the newest run with this tag."""
        where, order = f"tags.`{tag}` = '{value}'", ["start_time DESC"]
        runs = self.client.search_runs([self.experiment], where, max_results=1, order_by=order)
        return runs[0].info.run_id if runs else None


def log_entries(client: MlflowClient, run_id: str, **entries: list[Any]) -> None:
    """Log params, metrics or tags, in as many calls as it takes."""
    for kind, values in entries.items():
        for start in range(0, len(values), _BATCH[kind]):
            part: dict[str, Any] = {kind: values[start : start + _BATCH[kind]]}
            client.log_batch(run_id, **part)


class RunLog:
    """One run: metrics by step, each once; tables, texts and figures."""

    def __init__(self, client: MlflowClient, run_id: str):
        self.run_id, self._client = run_id, client
        self._steps: dict[str, set[int]] = {}
        self._client.update_run(run_id, status="RUNNING")

    def send(self, points: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Log values, as (step, milliseconds since the epoch, values), except those already in the store.

        Raises MLflow's errors: part of the values may have been stored, which the next call checks.
        """
        try:
            new = [
                Metric(name, float(value), when, step)
                for step, when, values in points
                for key, value in values.items()
                if step not in self._logged(name := name_of(key))
            ]
            log_entries(self._client, self.run_id, metrics=new)
        except BaseException:
            self._steps.clear()
            raise
        for point in new:
            self._steps[point.key].add(point.step)

    def _logged(self, key: str) -> set[int]:
        """Return the steps at which the store has a value; queried the first time, and after a failure."""
        if key not in self._steps:
            self._steps[key] = {point.step for point in self._client.get_metric_history(self.run_id, key)}
        return self._steps[key]

    def summary(self, values: Mapping[str, float], step: int = 0) -> None:
        """Log the finite numbers that differ from the run's latest; the latest value is the one shown."""
        now, have = int(time.time() * 1000), self._client.get_run(self.run_id).data.metrics
        # a NaN would stay a run's latest value
        finite = {name_of(key): float(value) for key, value in values.items() if math.isfinite(value)}
        new = [Metric(key, value, now, step) for key, value in finite.items() if value != have.get(key)]
        log_entries(self._client, self.run_id, metrics=new)

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        log_entries(self._client, self.run_id, tags=tags_of(tags))

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Put a file on the run."""
        self._client.log_artifact(self.run_id, str(path), folder)

    def close(self, status: str = "FINISHED", ended: float | None = None, failure: str = "") -> None:
        """End the run: FINISHED, KILLED or FAILED (because of ``failure``); at ``ended`` seconds, or now."""
        self._client.set_terminated(self.run_id, status, None if ended is None else round(1000 * ended))
        if status == "FAILED" and failure:
            self.tags({"titans.last_failure": failure})


def name_of(key: str) -> str:
    """Return the name under which MLflow takes a metric or a param: what it refuses is replaced, and a name
    that changes by more than @ ends in a hash, so that no two become one.
    """
    plain = key.replace("@", "/")
    kept = posixpath.normpath(re.sub(r"[^\w/.: -]", "_", plain).strip("/")).strip("./ ")[:200]
    return plain if plain and plain == kept else f"{kept or '_'}-{digest(key, 4)}"


def tags_of(tags: Mapping[str, str]) -> list[RunTag]:
    """Tags as MLflow entities."""
    return [RunTag(key, str(value)) for key, value in tags.items()]
