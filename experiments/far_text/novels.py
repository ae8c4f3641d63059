"""Read novels with the study's runs: `python -m experiments.far_text.novels TEXTS.jsonl.xz RUN...`.

A second test, of text that is no source code. TEXTS has {"text": ...} lines; the first 8,192 tokens of the
first 12 are read. Prints the study's columns, and writes them with their floors to novels.csv. TITANS_HOME is
the root of the runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import math
import os
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from experiments.far_text.measure import FarText, FarTextOptions
from titans_platform.evals import evaluate
from titans_platform.evals.by_position import LongText
from titans_platform.evals.ngrams import count_text
from titans_platform.objectives import build_objective
from titans_platform.runs.folder import RunFolder
from titans_platform.runs.load import find_run, load_run
from titans_platform.tasks import Context

TASK = "experiments.far_text.novels:Novels"
TEXTS = 12
CHARACTERS = 12
"""A token has fewer, on average."""


class NovelsOptions(FarTextOptions):
    """The reading, the tokens that count, and the file."""

    file: str


class Novels(FarText):
    """`FarText` on the texts of a file."""

    name = "novels"
    Options = NovelsOptions

    def texts(self, context: Context) -> list[LongText]:
        """Return the first `context.length` tokens of the first texts, each after the start of a document."""
        tokenizer, length, texts = context.scorer.tokenizer, context.length, []
        with lzma.open(self.options.file, "rt", encoding="utf-8") as file:
            for line in islice(file, TEXTS):
                ids = tokenizer.encode(json.loads(line)["text"][: CHARACTERS * length])
                texts.append(LongText(np.array([tokenizer.bos, *ids[:length]]), np.ones(length, bool)))
        return texts


def measured(folder: RunFolder, file: str) -> dict[str, Any]:
    """Evaluate a run's model on the file; a line of novels.csv."""
    model, _, cfg = load_run(folder.path)
    data, result = build_objective(cfg).reopen(folder.root, folder.record()["data"]), folder.result()
    assert result
    columns = {
        column: [
            task.model_copy(update={"task": TASK, "options": {**task.options, "file": file}})
            for task in configs
        ]
        for column, configs in cfg.eval.columns.items()
    }
    config = cfg.eval.model_copy(update={"columns": columns})
    ngrams = partial(count_text, data, cfg)
    tasks = evaluate(model, data, config, cfg.data.sequence_length, ngrams=ngrams)["tasks"]
    line = {"row": result.row, "cell": folder.name, "seed": result.seed, "commit": result.commit}
    for name, task in tasks.items():
        if math.isnan(task["value"]):
            continue
        column = name.partition("/")[0]
        line |= {f"{column} (nats)": task["value"], f"{column} stderr (nats)": task["stderr"]}
        line |= {f"{column} floor (nats)": task["floor"]} if task["floor"] else {}
    return line


def shown(line: dict[str, Any]) -> str:
    """Format a line of novels.csv: each column with its standard error over texts."""
    columns = [key.removesuffix(" stderr (nats)") for key in line if key.endswith(" stderr (nats)")]
    pairs = {column: (line[f"{column} (nats)"], line[f"{column} stderr (nats)"]) for column in columns}
    values = (f"{column} {value:.4f}±{stderr:.4f}" for column, (value, stderr) in pairs.items())
    return f"{line['row']}, seed {line['seed']}: {', '.join(values)}"


def main() -> None:
    """Evaluate each run; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", help="a .jsonl.xz of {text}")
    parser.add_argument("runs", nargs="+", metavar="RUN")
    args = parser.parse_args()
    root = Path(os.environ.get("TITANS_HOME") or "titans-runs").resolve()
    lines = []
    for run in args.runs:
        lines.append(measured(find_run(run, root), args.texts))
        print(shown(lines[-1]))
    # a model without memory lacks a column
    columns = dict.fromkeys(column for line in lines for column in line)
    with (Path(__file__).parent / "novels.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    main()
