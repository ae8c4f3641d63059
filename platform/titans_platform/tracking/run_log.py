"""One MLflow run, and how entries are written to it."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from titans_platform.errors import UsageError

_BATCH = {"metrics": 1000, "params": 100, "tags": 100}
"""MLflow's limits per call."""


def log_entries(client: MlflowClient, run_id: str, **entries: list[Any]) -> None:
    """Log params, metrics or tags, in as many calls as it takes."""
    ((kind, values),) = entries.items()
    for start in range(0, len(values), _BATCH[kind]):
        part: dict[str, Any] = {kind: values[start : start + _BATCH[kind]]}
        client.log_batch(run_id, **part)


def log_new(client: MlflowClient, run_id: str, values: Mapping[str, float], step: int) -> None:
    """Log values of a step, except those that equal the run's latest values."""
    have = client.get_run(run_id).data.metrics
    new = [metric for metric in metrics_of(values, step) if metric.value != have.get(metric.key)]
    log_entries(client, run_id, metrics=new)


class RunLog:
    """One run: metrics by step, each once; tables, texts and figures."""

    def __init__(self, client: MlflowClient, run_id: str, uri: str, system_metrics: bool = False):
        self.run_id, self._client = run_id, client
        self._steps: dict[str, set[int]] = {}
        self._client.update_run(run_id, status="RUNNING")
        self._monitor = _monitor(run_id, uri) if system_metrics else None

    def send(self, points: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Log values, as (step, milliseconds since the epoch, values), except those already in the store.

        Raises MLflow's errors: part of the values may have been stored, which the next call checks.
        """
        try:
            new = [
                Metric(name, float(value), when, step)
                for step, when, values in points
                for key, value in values.items()
                if step not in self._logged(name := key.replace("@", "/"))
            ]
            with NO_RETRIES:
                log_entries(self._client, self.run_id, metrics=new)
        except BaseException:
            self._steps.clear()
            raise
        for point in new:
            self._steps[point.key].add(point.step)

    def _logged(self, key: str) -> set[int]:
        """The steps at which the store has a value; asked for the first time, and after a failure."""
        if key not in self._steps:
            history = self._client.get_metric_history(self.run_id, key)
            self._steps[key] = {point.step for point in history}
        return self._steps[key]

    def summary(self, values: Mapping[str, float], step: int = 0) -> None:
        """Log the run's final numbers, at its last step; the latest value is the one shown."""
        log_new(self._client, self.run_id, values, step)

    def dataset(self, name: str, digest: str, where: str, about: Mapping[str, Any], context: str) -> None:
        """Name one of the run's inputs; ``context`` is "training" or "validation". Idempotent."""
        source, profile = json.dumps({"uri": where}), json.dumps(dict(about))
        entry = Dataset(name, digest, "local", source, profile=profile)
        used = DatasetInput(entry, [InputTag(MLFLOW_DATASET_CONTEXT, context)])
        self._client.log_inputs(self.run_id, [used])

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        log_entries(self._client, self.run_id, tags=tags_of(tags))

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
        """End the run: FINISHED, FAILED or KILLED, at ``ended`` (seconds), or now."""
        if self._monitor:
            self._monitor.finish()
        self._client.set_terminated(self.run_id, status, None if ended is None else round(1000 * ended))


class _NoRetries:
    """Within it MLflow does not retry requests: one whose response was lost would be counted twice.

    MLflow reads the number of retries from the environment. Journals of several threads overlap here, so the
    first to enter sets it and the last to leave restores it.
    """

    NAME = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = os.environ.get(self.NAME)
                os.environ[self.NAME] = "0"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                os.environ.pop(self.NAME, None)
                if self._before is not None:
                    os.environ[self.NAME] = self._before


NO_RETRIES = _NoRetries()


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


def metrics_of(values: Mapping[str, float], step: int = 0) -> list[Metric]:
    """Metrics of the finite values: a NaN would stay a run's latest value; @ is not allowed in a name."""
    now = int(time.time() * 1000)
    finite = {key.replace("@", "/"): float(v) for key, v in values.items() if math.isfinite(v)}
    return [Metric(key, value, now, step) for key, value in finite.items()]


def tags_of(tags: Mapping[str, str]) -> list[RunTag]:
    """Tags as MLflow entities."""
    return [RunTag(key, str(value)) for key, value in tags.items()]


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
