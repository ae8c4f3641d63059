"""The only package that uses MLflow: a store, a parent run for a study, a child run for each cell.

The driver opens the store (which creates and migrates it once) and creates the study's run; the run of a cell
is resumed by its name, so that a run which was killed and restarted stays one run with each step logged once.
"""

import logging
import os

# read when MLflow is imported
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# the default is minutes, for which a hanging server would block the end of a run
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

from titans_platform.tracking.store import (
    CELL_TAG,
    EXPERIMENT,
    STORE,
    STUDY_TAG,
    RunLog,
    Store,
    Unreachable,
    check_store,
    open_store,
    store_uri,
)

# alembic logs every migration, mlflow every table
for _name in ("mlflow", "alembic"):
    logging.getLogger(_name).setLevel(logging.ERROR)
# it logs the traceback of errors that are raised anyway
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

__all__ = [
    "CELL_TAG",
    "EXPERIMENT",
    "STORE",
    "STUDY_TAG",
    "RunLog",
    "Store",
    "Unreachable",
    "check_store",
    "open_store",
    "store_uri",
]
