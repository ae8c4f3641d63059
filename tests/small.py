"""Config of a run that takes a second, and a study of such runs."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans_platform.config import RunConfig

TASK: dict[str, Any] = {"task": "recall", "options": {"pairs": 2}}
RUN: dict[str, Any] = {
    "model": {
        "variant": "lmm", "vocab_size": 260, "d_model": 16, "n_layers": 1,
        "memory": {"heads": 2, "chunk_size": 8}, "attention": {"heads": 2},
    },
    "data": {"sequence_length": 32, "sources": [{"kind": "task", "rows": 64, "tasks": [TASK]}]},
    "optim": {"steps": 20, "global_batch_size": 4, "lr": 3e-3},
    "eval": {"items": 8, "columns": {"reasoning": [TASK]}},
}  # fmt: skip


def study(steps: int = 20, items: int = 8, more_rows: tuple[dict, ...] = (), **fields: Any) -> dict[str, Any]:
    """Two rows, a deep memory and a linear one, and ``more_rows``; ``fields`` are put in place of its own."""
    optim, measured = RUN["optim"] | {"steps": steps}, RUN["eval"] | {"items": items}
    rows = [{"name": "LMM"}, {"name": "Linear Memory", "set": {"model.memory.depth": 1}}, *more_rows]
    return {
        "name": "tiny", "columns": {"reasoning": {"title": "Reasoning", "unit": "%", "factor": 100}},
        "base": RUN | {"optim": optim, "eval": measured}, "scales": {"small": {"seeds": [0]}}, "rows": rows,
    } | fields  # fmt: skip


def trained(root: Path, **fields: Any) -> Path:
    """The folder of a finished run; ``fields`` are put in place of its config's own."""
    # here, because the kernels' tests also run where the platform's packages are not installed
    from titans_platform.config import RunConfig
    from titans_platform.objectives import build_objective
    from titans_platform.runs.execute import execute
    from titans_platform.runs.load import spec_for

    cfg = RunConfig.model_validate_json(json.dumps(RUN | fields))
    build_objective(cfg).prepare(root)
    spec = spec_for(cfg, root)
    execute(spec)
    return spec.folder.path


def changed(cfg: "RunConfig", **parts: dict[str, Any]) -> "RunConfig":
    """A config with other fields in these parts."""
    values = cfg.model_dump(mode="json")
    return type(cfg).model_validate_json(json.dumps(values | {k: values[k] | v for k, v in parts.items()}))


def run_name(cfg: "RunConfig", root: Path) -> str:
    """The name of a run on the data that it prepares."""
    from titans_platform import objectives

    return objectives.run_name(cfg, objectives.build_objective(cfg).prepare(root).fingerprint)


def texts(folder: Path, *contents: str, **fields: Any) -> dict[str, Any]:
    """A source of a new folder with a file for each text; ``fields`` are its other fields."""
    folder.mkdir()
    for i, content in enumerate(contents):
        (folder / f"{i:02d}.txt").write_text(content)
    return {"kind": "files", "path": str(folder)} | fields


def documented(path: str) -> str:
    """The Python that docs/extending.md gives for a file."""
    page = (Path(__file__).parents[1] / "docs/extending.md").read_text("utf-8")
    return page.partition(f"\n`{path}`\n\n```python\n")[2].partition("```")[0]


def until(what: Callable[[], Any], process: subprocess.Popen | None = None, timeout: float = 300.0) -> Any:
    """Wait until ``what`` returns a true value while ``process`` lives, and return it."""
    deadline = time.monotonic() + timeout
    while not (result := what()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
    return result
