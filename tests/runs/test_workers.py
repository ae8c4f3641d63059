"""A run under Ray Train: in-process, on two workers, and with a killed worker."""

import inspect
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from titans_platform.data import prepare
from titans_platform.errors import ClusterError
from titans_platform.objectives import build_objective
from titans_platform.runs import ray_session
from titans_platform.runs.execute import Worker, execute
from titans_platform.runs.load import spec_for
from titans_platform.runs.spec import Resources
from titans_platform.training.checkpoint import load_model

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


@pytest.mark.slow
def test_one_worker_is_the_run_in_this_process(tiny_run, tmp_path):
    import ray

    prepare(tiny_run.data, tmp_path)
    started = ray.is_initialized()
    direct = Worker(spec_for(tiny_run, tmp_path, name="direct")).run()
    wrapped = execute(spec_for(tiny_run, tmp_path, name="wrapped", labels={"row": "lmm"}))
    assert (ray.is_initialized(), wrapped.row) == (started, "lmm")
    for key in ("final_train_loss", "columns", "telemetry"):
        assert getattr(wrapped, key) == getattr(direct, key)


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_give_the_numbers_of_one(tiny_run, tmp_path):
    prepare(tiny_run.data, tmp_path)
    one = execute(spec_for(tiny_run, tmp_path, name="one"))
    two = execute(spec_for(tiny_run, tmp_path, Resources(workers=2), name="two"))
    assert (two.final_train_loss, two.tokens) == (pytest.approx(one.final_train_loss, rel=1e-4), one.tokens)
    models = [build_objective(tiny_run).build_model(), build_objective(tiny_run).build_model()]
    for name, model in zip(["one", "two"], models, strict=True):
        load_model(tmp_path / "cells" / name / "checkpoints" / "step-00000020", model)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-3, atol=1e-4)


def pages_asked_for() -> int:
    """Page faults of a thread, as cells run in, that frees ten 40 MiB blocks: 102,400 if none is reused."""
    import resource
    from concurrent.futures import ThreadPoolExecutor

    def step() -> None:
        block = b"x" * (40 * 2**20)
        assert block

    with ThreadPoolExecutor(1) as thread:
        thread.submit(step).result()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            thread.submit(step).result()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@GLIBC
def test_worker_keeps_its_large_blocks():
    import ray

    assert ray.get(ray.remote(pages_asked_for).remote()) < 20_000


# the function's source, as an import of this file brings torch
QUIETED = f"""
{inspect.getsource(pages_asked_for)}
from titans_platform.runs.ray_session import quiet
quiet()
print(pages_asked_for())
"""


@GLIBC
@pytest.mark.parametrize(("variables", "kept"), [
    ({}, True), ({"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TOP_PAD_": "0"}, False),
    ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, False),
])  # fmt: skip
def test_run_in_its_own_process_keeps_its_large_blocks_unless_its_environment_forbids(variables, kept):
    env = {key: os.environ[key] for key in os.environ.keys() - ray_session.ALLOCATOR.keys()} | variables
    pages = subprocess.check_output([sys.executable, "-c", QUIETED], env=env, cwd=Path(__file__).parents[2])
    assert (int(pages) < 20_000) == kept


TERMINATED = """
import os, signal, time
from titans_platform import cli
from titans_platform.runs.ray_session import ray_session
def session(arguments):
    try:
        with ray_session(1):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
    except KeyboardInterrupt:
        return 130
cli.run = session
cli.main([])
"""


@pytest.mark.slow
def test_schedulers_sigterm_ends_a_session_as_ctrl_c_does():
    ended = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 130, ended.stderr


def test_ray_that_does_not_start_is_given_up_and_a_start_cut_short_tried_again(monkeypatch):
    import ray

    never, calls = threading.Event(), []

    def init(**_):
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", init)
    with ray_session.ray_session(1):
        assert len(calls) == 3
    monkeypatch.setattr(ray_session, "START_SECONDS", 0.2)
    monkeypatch.setattr(ray, "init", lambda **_: never.wait())
    with pytest.raises(ClusterError, match=r"did not start in 0 s; its logs are in"):  # noqa: SIM117
        with ray_session.ray_session(1):
            pytest.fail("it never started")
    never.set()
