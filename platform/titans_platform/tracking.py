"""The one file that talks to MLflow: a store, a parent run for a study, a child run for each cell.

The driver opens the store (which creates and migrates it once) and creates the runs; a worker resumes its
run by id, so that a run which was killed and restarted stays one run with each step logged once.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import sqlite3
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_SOURCE_NAME,
    MLFLOW_SOURCE_TYPE,
)

from titans_platform.errors import UsageError
from titans_platform.text import flatten

# alembic tells of every migration, mlflow of every table
for _name in ("mlflow", "alembic"):
    logging.getLogger(_name).setLevel(logging.ERROR)
# the traceback of what is raised as well
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

log = logging.getLogger(__name__)

EXPERIMENT = "titans"
STORE = "TITANS_MLFLOW"
"""Address of an MLflow server to use in place of the SQLite file under the root."""
CELL_TAG = "titans.cell"
STUDY_TAG = "titans.study"
_VIEW = "mlflow.sharedViewState."
# what MLflow takes in one call
_BATCH_METRICS, _BATCH_PARAMS, _PARAM_LENGTH = 1000, 100, 6000


def store_uri(root: Path) -> str:
    """The address of the store of ``root``: TITANS_MLFLOW where it is set, else an SQLite file under it."""
    if (given := os.environ.get(STORE)) and urlsplit(given).password:
        raise UsageError(
            f"{STORE}: holds a password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
        )
    return given or f"sqlite:///{root.resolve() / 'mlflow.db'}"


def check_store(root: Path) -> None:
    """Refuse a store of ``root`` that cannot be opened; makes none. Raises UsageError."""
    if os.environ.get(STORE):
        _check_server(store_uri(root))
    elif (path := root.resolve() / "mlflow.db").exists():
        _check_sqlite(path)


def open_store(where: Path | str) -> Store:
    """Open the store under a root folder, or at a tracking address; create and migrate it where needed.

    Raises UsageError where it cannot be opened.
    """
    uri = store_uri(where) if isinstance(where, Path) else where
    if uri.startswith("sqlite:///"):
        path = Path(uri.removeprefix("sqlite:///"))
        _check_sqlite(path)
        # several first writers on a fresh file break the migration: one at a time
        with FileLock(f"{path}.lock"):
            return _connect(uri, f"{path.parent.resolve().as_uri()}/artifacts")
    if uri.startswith(("http://", "https://")):
        _check_server(uri)
        return _connect(uri, None)
    raise UsageError(f"tracking store {uri}: should start with sqlite:///, http:// or https://")


def _connect(uri: str, artifacts: str | None) -> Store:
    try:
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        found = client.get_experiment_by_name(EXPERIMENT)
        there = found.artifact_location if found else ""
        if artifacts and there.startswith("file:") and urlsplit(there).path != urlsplit(artifacts).path:
            # MLflow would write the copy's files over those of the original
            fix = "move mlflow.db away to begin a new store, or work in the original --root"
            raise _refused(uri, f"was copied or moved here: MLflow keeps its files in {there}", fix)
        # its pages are those of training, not of agents
        kind = {"mlflow.experimentKind": "custom_model_development"}
        experiment = found.experiment_id if found else client.create_experiment(EXPERIMENT, artifacts, kind)
    except UsageError:
        raise
    except Exception as error:  # MLflow lets SQLAlchemy's and alembic's own errors through
        raise _refused(uri, "cannot be opened", "move it away or give another --root", error) from None
    return Store(client, uri, experiment)


def _check_sqlite(path: Path) -> None:
    """Refuse at once what MLflow would try ten times to open."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=30)) as connection:
            connection.execute("PRAGMA schema_version").fetchone()
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except (OSError, sqlite3.Error) as error:
        raise _refused(path, "cannot be opened", "move the file away or give another --root", error) from None


def _check_server(uri: str) -> None:
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=10).close()
    except urllib.error.HTTPError as error:
        # a server that wants a password says so here and to nobody else
        if error.code not in (401, 403):
            raise _refused(uri, _first_line(error), "is it an MLflow server?") from None
    except (OSError, ValueError) as error:
        raise _refused(uri, "no answer", "is the server up?", error) from None


def _refused(store: Path | str, what: str, fix: str, error: Exception | None = None) -> UsageError:
    why = f": {_first_line(error)}" if error else ""
    return UsageError(f"tracking store {store}: {what}{why}; {fix}")


class Store:
    """An open MLflow store and our experiment in it."""

    def __init__(self, client: MlflowClient, uri: str, experiment: str):
        self.client, self.uri, self.experiment = client, uri, experiment

    @property
    def server(self) -> str | None:
        """The address of the server that is the store; None where the store is a file."""
        return self.uri.rstrip("/") if self.uri.startswith(("http://", "https://")) else None

    def study_run(self, study: str, tags: Mapping[str, str] | None = None) -> str:
        """The parent run of a study, created the first time; its run id."""
        run_id = self.find(STUDY_TAG, study) or self._create(study, {STUDY_TAG: study})
        self._log(run_id, tags=_tags(tags or {}))
        self.client.update_run(run_id, status="RUNNING")
        return run_id

    def cell_run(
        self,
        cell: str,
        name: str,
        *,
        parent: str | None = None,
        params: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """The run of a cell, created the first time; its run id.

        ``params`` become columns to compare runs by; the whole ``config`` is put beside them as a file.
        """
        run_id = self.find(CELL_TAG, cell)
        if run_id is None:
            nested = {MLFLOW_PARENT_RUN_ID: parent} if parent else {}
            run_id = self._create(name, {CELL_TAG: cell} | nested)
            columns = [Param(k, str(v)[:_PARAM_LENGTH]) for k, v in flatten(params or {}).items()]
            self._log(run_id, _BATCH_PARAMS, params=columns)
            if config:
                self.client.log_dict(run_id, dict(config), "config.json")
        self._log(run_id, tags=_tags(tags or {}))
        return run_id

    def discard_cell(self, cell: str) -> None:
        """Delete the run of a cell that is made again by other code, so that its log starts again too."""
        if run_id := self.find(CELL_TAG, cell):
            self.client.delete_run(run_id)

    def run(self, run_id: str, system_metrics: bool = False) -> RunLog:
        """The run's log, continued where it stopped; the run counts as running from now on."""
        return RunLog(self, run_id, system_metrics=system_metrics)

    def end(self, run_id: str, status: str, ended: float | None = None) -> None:
        """End a run without logging to it: FINISHED, FAILED or KILLED, at ``ended`` (seconds), or now."""
        self.client.set_terminated(run_id, status, None if ended is None else round(1000 * ended))

    def running(self, parent: str) -> dict[str, str]:
        """Run ids by cell of a study's runs that have not been ended, by a process that may be dead."""
        where = f"attributes.status = 'RUNNING' and tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent}'"
        found = self.client.search_runs([self.experiment], where, max_results=10_000)
        return {run.data.tags[CELL_TAG]: run.info.run_id for run in found if CELL_TAG in run.data.tags}

    def cell_of(self, run_id: str) -> str:
        """The cell whose run ``run_id`` is. Raises UsageError."""
        try:
            return self.client.get_run(run_id).data.tags[CELL_TAG]
        except (MlflowException, KeyError):
            raise UsageError(f"run {run_id}: no run of a cell in {self.uri}") from None

    def amend(self, run_id: str, values: Mapping[str, float], step: int) -> None:
        """Set final numbers, of its last step, of a run that has ended; what it has is not written again."""
        try:
            have = self.client.get_run(run_id).data.metrics
        except MlflowException:
            # of a store that is no longer there
            return
        self._log(run_id, metrics=[new for new in _metrics(values, step) if new.value != have.get(new.key)])

    def curves(self, run_ids: Iterable[str], metric: str = "loss") -> dict[str, list[tuple[int, float]]]:
        """A metric by step, of each run that has it; a run that is not there has none."""
        found: dict[str, list[tuple[int, float]]] = {}
        for run_id in run_ids:
            with suppress(MlflowException):
                history = self.client.get_metric_history(run_id, metric)
                # a column of that name comes after the last step's value
                history.sort(key=lambda point: point.timestamp, reverse=True)
                found[run_id] = sorted({point.step: point.value for point in history}.items())
        return {run_id: curve for run_id, curve in found.items() if curve}

    def copy_curves(self, source: str, target: str, last: int) -> None:
        """Log what a run of this store logged, up to step ``last``, on another that goes on from there."""
        with suppress(MlflowException):
            for key in self.client.get_run(source).data.metrics:
                history = self.client.get_metric_history(source, key)
                # one step alone: a number of the end
                if len({point.step for point in history}) > 1 and not key.startswith("system/"):
                    points = [point for point in history if 0 < point.step <= last]
                    self._log(target, metrics=[Metric(key, p.value, p.timestamp, p.step) for p in points])

    def url(self, run_id: str) -> str:
        """Where `titans ui` shows the run, below the address of the server."""
        return f"#/experiments/{self.experiment}/runs/{run_id}"

    def find(self, tag: str, value: str) -> str | None:
        """The run id of the newest run with this tag."""
        runs = self.client.search_runs(
            [self.experiment], f"tags.`{tag}` = '{value}'", max_results=1, order_by=["start_time DESC"]
        )
        return runs[0].info.run_id if runs else None

    def save_view(
        self, name: str, parent: str, columns: Sequence[str], order: str, ascending: bool = True
    ) -> None:
        """Save a view of a study's cells in MLflow's list of runs: `?viewStateShareKey=titans-NAME`.

        Experimental: saved views are what MLflow's own pages keep as a tag of the experiment, which no
        interface promises. A version of it that does not know them shows the list as it always is.
        """
        now = int(time.time() * 1000)
        state = {
            "searchFilter": f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent}'",
            # by time of start runs would be folded below their parent
            "orderByKey": order,
            "orderByAsc": ascending,
            "startTime": "ALL",
            "lifecycleFilter": "Active",
            "datasetsFilter": [],
            "modelVersionFilter": "All Runs",
            "selectedColumns": list(columns),
            "columnOrder": list(columns),
            "runsHiddenMode": "SHOWALL",
        }
        packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
        view = {"name": name, "createdAt": now, "updatedAt": now, "state": f"deflate;{packed}"}
        self.client.set_experiment_tag(self.experiment, f"{_VIEW}titans-{name}", json.dumps(view))

    @property
    def page(self) -> str:
        """Where a server shows the runs, below its address: in the view saved last, if there is one."""
        tags = self.client.get_experiment(self.experiment).tags
        saved = [key for key in tags if key.startswith(_VIEW)]
        newest = max(saved, key=lambda key: json.loads(tags[key])["updatedAt"], default="")
        view = f"?viewStateShareKey={newest.removeprefix(_VIEW)}" if newest else ""
        return f"#/experiments/{self.experiment}/runs{view}"

    def _create(self, name: str, tags: dict[str, str]) -> str:
        tags = {MLFLOW_SOURCE_NAME: "titans", MLFLOW_SOURCE_TYPE: "LOCAL"} | tags
        return self.client.create_run(self.experiment, tags=tags, run_name=name).info.run_id

    def _log(self, run_id: str, batch: int = _BATCH_METRICS, **entries: list[Any]) -> None:
        """Log params, metrics or tags, in as many calls as it takes."""
        ((kind, values),) = entries.items()
        for start in range(0, len(values), batch):
            part: dict[str, Any] = {kind: values[start : start + batch]}
            self.client.log_batch(run_id, **part)


class RunLog:
    """One run: metrics by step, gathered and written in batches; tables, texts and figures at once."""

    def __init__(self, store: Store, run_id: str, flush_every: float = 5.0, system_metrics: bool = False):
        self.run_id, self._store, self._client = run_id, store, store.client
        self._flush_every, self._flushed = flush_every, time.monotonic()
        self._pending: list[Metric] = []
        logged = self._client.get_metric_history(run_id, "loss")
        self._last_step = max((metric.step for metric in logged), default=-1)
        self._client.update_run(run_id, status="RUNNING")
        self._monitor = _monitor(run_id, store.uri) if system_metrics else None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log values at a step. A step logged before the run was interrupted is not logged again."""
        if step <= self._last_step:
            return
        self._pending += _metrics(values, step)
        if time.monotonic() - self._flushed > self._flush_every or len(self._pending) > _BATCH_METRICS // 2:
            self.flush()

    def flush(self) -> None:
        """Write what is gathered; the values of one step go together, so a step is logged whole or not.

        A store that does not answer costs a warning, not the run: the values wait for the next flush.
        """
        self._flushed = time.monotonic()
        while self._pending:
            cut = min(len(self._pending), _BATCH_METRICS)
            while cut < len(self._pending) and self._pending[cut - 1].step == self._pending[cut].step:
                cut -= 1
            try:
                self._client.log_batch(self.run_id, metrics=self._pending[:cut])
            except MlflowException as error:
                log.warning("run %s: not logged for now: %s", self.run_id, _first_line(error))
                return
            del self._pending[:cut]

    def summary(self, values: Mapping[str, float], step: int = 0) -> None:
        """Log the run's final numbers, at its last step; the latest value is the one shown."""
        self._store._log(self.run_id, metrics=_metrics(values, step))

    def dataset(self, name: str, digest: str, where: str, about: Mapping[str, Any], context: str) -> None:
        """Name one of the run's inputs; ``context`` is "training" or "validation". A second time is none."""
        source, profile = json.dumps({"uri": where}), json.dumps(dict(about))
        entry = Dataset(name, digest, "local", source, profile=profile)
        used = DatasetInput(entry, [InputTag(MLFLOW_DATASET_CONTEXT, context)])
        self._client.log_inputs(self.run_id, [used])

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        self._store._log(self.run_id, tags=_tags(tags))

    def note(self, markdown: str) -> None:
        """The description MLflow shows at the top of the run; the place for links to other runs."""
        self._client.set_tag(self.run_id, "mlflow.note.content", markdown)

    def table(self, rows: Iterable[Mapping[str, Any]], name: str) -> None:
        """Put a table (``name`` ends in .json) on the run, in place of an earlier one of that name."""
        listed = list(rows)
        columns = list(listed[0]) if listed else []
        data = [[row.get(key) for key in columns] for row in listed]
        # log_table appends to the table of an earlier call
        self._client.log_dict(self.run_id, {"columns": columns, "data": data}, name)
        tag = json.dumps([{"path": name, "type": "table"}])
        self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", tag)

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Put a file on the run."""
        self._client.log_artifact(self.run_id, str(path), folder)

    def close(self, status: str = "FINISHED", ended: float | None = None) -> None:
        """Write what is left and end the run: FINISHED, FAILED or KILLED, at ``ended`` (seconds), or now."""
        if self._monitor:
            self._monitor.finish()
        self.flush()
        self._store.end(self.run_id, status, ended)


def _monitor(run_id: str, uri: str) -> Any:
    """MLflow's own thread that logs the use of CPU, memory and GPUs, started. Raises UsageError."""
    try:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
    except ModuleNotFoundError as error:
        fix = f"{error.name} is not installed; pip install {error.name}, or leave it out"
        raise UsageError(f"log.system_metrics: {fix}") from None
    monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=uri)
    monitor.start()
    return monitor


def _metrics(values: Mapping[str, float], step: int = 0) -> list[Metric]:
    """The finite ones: a NaN would be shown as a run's latest value for ever; @ is not allowed in a name."""
    now = int(time.time() * 1000)
    finite = {key.replace("@", "/"): float(v) for key, v in values.items() if math.isfinite(v)}
    return [Metric(key, value, now, step) for key, value in finite.items()]


def _tags(tags: Mapping[str, str]) -> list[RunTag]:
    return [RunTag(key, str(value)) for key, value in tags.items()]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
