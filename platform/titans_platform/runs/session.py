"""Ray as a library: a cluster of this process's own, started quietly and ended with it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from titans_platform.errors import ClusterError
from titans_platform.runs.workers import quiet

OBJECT_STORE = 128 * 2**20
"""Bytes of Ray's object store; 75 MiB is the least Ray takes."""


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray's start puts a handler on SIGTERM that aborts; put back what a scheduler's end should reach."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


@contextmanager
def session(cpus: float, gpus: float = 0, address: str | None = None) -> Iterator[None]:
    """A Ray cluster with room for ``cpus`` and ``gpus``; none is started where both are 0.

    ``address`` joins a running one instead. A session that is already open is used and left open.
    Raises ClusterError.
    """
    import ray

    if not cpus and not gpus:
        yield
        return
    if ray.is_initialized():
        yield
        return
    # a cell is told its config and leaves files: the share of memory that Ray would take stays free
    here = {"num_cpus": max(1, round(cpus)), "object_store_memory": OBJECT_STORE}
    # RAY_ADDRESS would turn the embedded default into a client of somebody's cluster
    where: dict[str, Any] = {"address": address} if address else {"address": "local"} | here
    if gpus and not address:
        where["num_gpus"] = max(1, round(gpus))
    quiet()
    try:
        with _own_sigterm():
            ray.init(
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=True,
                logging_level=logging.ERROR,
                **where,
            )
    except Exception as error:
        raise ClusterError(
            f"Ray cluster {address or 'on this machine'}: {' '.join(str(error).split())}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
