"""Runs in a local process, killed repeatedly and compared with an undisturbed run."""

import hashlib
import json
import multiprocessing as mp
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.small import RUN
from titans_platform.runs.folder import RunFolder
from tools.chaos.attempt import FULL, SAMPLES, attempt
from tools.chaos.server import Server

STEPS, EVERY, BATCH = 60, 5, 4
FAULTS = ("driver killed", "SIGTERM", "disk full", "MLflow away")


@dataclass
class Line:
    """Outcome of the runs with one fault."""

    fault: str
    runs: int = 0
    equal: int = 0
    hits: int = 0
    lost: int = 0
    repeated: int = 0
    notes: list[str] = field(default_factory=list)

    def row(self) -> str:
        counts = (self.runs, self.hits, self.equal, self.lost, self.repeated)
        return "| " + " | ".join(map(str, (self.fault, *counts, "; ".join(self.notes)))) + " |"


HEAD = """| fault | runs | faults that struck | bit-equal runs | samples lost | repeated | notes |
|---|--:|--:|--:|--:|--:|---|"""


def config(steps: int = STEPS) -> str:
    optim = RUN["optim"] | {"steps": steps, "global_batch_size": BATCH}
    # streams of items of four rows each, whose state is one thing more to lose
    (source,) = RUN["data"]["sources"]
    data = RUN["data"] | {"rows": "streams", "sources": [source | {"item_length": 128}]}
    return json.dumps(RUN | {"data": data, "optim": optim, "checkpoint": {"every": EVERY}})


def weights(root: Path) -> str:
    """Hash of the weights of the last step."""
    from titans_platform.config import RunConfig
    from titans_platform.objectives import build_objective
    from titans_platform.training.checkpoint import load_model, newest

    cfg = RunConfig.model_validate_json(json.dumps(RunFolder(root, "run").record()["config"]))
    model, point = build_objective(cfg).build_model(), newest(root / "cells/run/checkpoints")
    assert point is not None
    assert load_model(point, model) == cfg.optim.steps
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.state_dict().values())).hexdigest()


def samples(root: Path) -> dict[int, tuple[int, list[str]]]:
    """Return the place in the stream and the rows by step, from the last time that the step was made."""
    entries: list[dict[str, Any]] = []
    for path in root.glob(f"{SAMPLES}-*.jsonl"):
        # the last line may have been cut off
        entries += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    by_step: dict[int, dict[int, dict[str, Any]]] = {}
    for entry in sorted(entries, key=lambda entry: entry["time"]):
        ranks = by_step.setdefault(entry["step"], {})
        ranks[entry["rank"]] = entry
        # of a try with more workers
        by_step[entry["step"]] = {rank: of for rank, of in ranks.items() if rank < entry["world"]}
    return {
        step: (ranks[0]["position"], [row for rank in sorted(ranks) for row in ranks[rank]["rows"]])
        for step, ranks in sorted(by_step.items())
    }


def start(root: Path, text: str, uri: str | None, seconds: float = 0.01) -> Any:
    """Start a process that continues the run's training, forked from one that has imported everything."""
    context = mp.get_context("forkserver")
    modules = ["titans_platform.runs.execute", "ray.train.torch", "mlflow", "tools.chaos.attempt"]
    context.set_forkserver_preload(modules)
    process = context.Process(target=attempt, args=(text, str(root), uri, {"seconds": seconds}))
    process.start()
    return process


def wait_for_training(root: Path, process: Any) -> None:
    """Wait until the process is at its steps: faults are to strike a run, not the imports before it."""
    folder = RunFolder(root, "run")
    while process.is_alive() and (folder.progress() or {}).get("pid") != process.pid:
        time.sleep(0.005)


def disturbed(root: Path, fault: str, draw: random.Random, hits: int, server: Server | None) -> int:
    """Complete a run through ``hits`` faults at random moments; return the number that struck."""
    struck, deadline = 0, time.monotonic() + 1200
    while True:
        process = start(root, config(), server.uri if server else None)
        wait_for_training(root, process)
        if struck < hits and process.is_alive():
            time.sleep(draw.uniform(0, 3))
            struck += strike(root, fault, process, draw, server)
        process.join(300)
        if server and server.server is None:
            server.up()
        assert process.exitcode is not None, "it hangs"
        assert time.monotonic() < deadline
        if process.exitcode == 0:
            return struck
        assert process.exitcode in (-signal.SIGKILL, -signal.SIGTERM, 130), process.exitcode


def strike(root: Path, fault: str, process: Any, draw: random.Random, server: Server | None) -> int:
    """Inject one fault; return 1 if it met a run."""
    if fault == "disk full":
        (root / FULL).touch()
        time.sleep(draw.uniform(0, 2))
        if draw.random() < 0.5:
            # a disk that is full does not spare a run the rest
            process.kill()
        (root / FULL).unlink()
    elif fault == "MLflow away":
        assert server
        server.lose = draw.randint(0, 2)
        server.down()
        time.sleep(draw.uniform(0, 1))
        process.kill()
    else:
        try:
            os.kill(process.pid, signal.SIGTERM if fault == "SIGTERM" else signal.SIGKILL)
        except ProcessLookupError:
            # it had come to its end
            return 0
    return 1


def series(folder: Path, fault: str, draw: random.Random, hits: int, a_run: int) -> Line:
    """Run with one fault until it has struck ``hits`` times, at most ``a_run`` times in each run."""
    from titans_platform.config import RunConfig
    from titans_platform.data import prepare

    line, straight = Line(fault), folder / "straight"
    cfg = RunConfig.model_validate_json(config())
    if not straight.exists():
        prepare(cfg.data, straight)
        process = start(straight, config(), None, 0.0)
        process.join(600)
        assert process.exitcode == 0
    expected, drawn = weights(straight), samples(straight)
    while line.hits < hits:
        root = folder / f"{fault.replace(' ', '-').replace(',', '')}-{line.runs}"
        prepare(cfg.data, root)
        server = Server() if fault == "MLflow away" else None
        if server:
            server.up()
        line.hits += disturbed(root, fault, draw, min(a_run, hits - line.hits), server)
        line.runs += 1
        samples_of_run = samples(root)
        line.equal += weights(root) == expected and samples_of_run == drawn
        places = [place for place, _ in samples_of_run.values()]
        line.lost += BATCH * len({place for place, _ in drawn.values()} - set(places))
        line.repeated += BATCH * (len(places) - len(set(places)))
        if server:
            from titans_platform.runs.reporter import send_left

            left = send_left(root)
            server.down()
            whole = not left and server.steps() == list(range(1, cfg.optim.steps + 1))
            line.notes.append("points whole, each once" if whole else f"points {len(server.steps())} {left}")
    line.notes = sorted(set(line.notes))
    return line
