"""One attempt at a run, in a process that will be killed: an unmodified run that records its samples.

Fault injection inside the process is configured by the environment and the run's folder, so that the same
code works in a local process and in Ray workers.
"""

import errno
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

SAMPLES = "samples"
FULL = "full"
"""While there is a file of this name under the root, nothing can be written to a checkpoint."""


def patch() -> None:
    """Add slow steps, a log of samples and a disk that fills up, as CHAOS says."""
    from torch.distributed.checkpoint import filesystem

    from titans_platform.training.loop import Trainer
    from titans_platform.training.parallel import rank, world_size

    options = json.loads(os.environ["CHAOS"])
    root, step, write = Path(options["root"]), Trainer.step, filesystem._write_item

    def slow(self: Trainer, batch: Any = None, telemetry: bool = False) -> dict[str, float]:
        time.sleep(options["seconds"])
        position = self.progress.step
        outcome = step(self, batch, telemetry)
        rows = [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in batch[0].cpu()]
        entry = {"step": self.progress.step, "position": position, "rows": rows, "time": time.time()}
        entry |= {"rank": rank(), "world": world_size()}
        with (root / f"{SAMPLES}-{rank()}-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return outcome

    def full(*arguments: Any, **keywords: Any) -> Any:
        if (root / FULL).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments, **keywords)

    Trainer.step = slow
    filesystem._write_item = full


def attempt(config: str, root: str, uri: str | None, options: dict[str, Any]) -> None:
    """Train as `titans train` does; the exit code is its own."""
    os.environ["CHAOS"] = json.dumps({"root": root} | options)
    patch()
    from titans_platform.config import RunConfig
    from titans_platform.errors import TitansError
    from titans_platform.runs.execute import execute
    from titans_platform.runs.load import spec_for
    from titans_platform.runs.spec import Tracking

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tracking = Tracking(uri, "chaos") if uri else None
    try:
        execute(spec_for(RunConfig.model_validate_json(config), Path(root), name="run", tracking=tracking))
    except TitansError as error:
        print(f"{error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
