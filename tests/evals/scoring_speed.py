"""Examples a second of the adapter to lm-evaluation-harness, beside those of an earlier commit.

    git worktree add ../earlier COMMIT
    python -m tests.evals.scoring_speed ../earlier FOLDER [TOKENIZER]

FOLDER has .jsonl.gz files of multiple choice. Each file's questions go through both adapters in turn, three
times; a rate is the median in CPU seconds of one thread, and the log-likelihoods of both must agree.
"""

from __future__ import annotations

import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from titans_core import LanguageModel
from titans_core.presets import preset
from titans_platform.data import load_tokenizer
from titans_platform.evals.lm_harness import HarnessModel
from titans_platform.evals.scoring import Scorer
from titans_platform.evals.texts import choices, read_jsonl

FORMS = {
    "hellaswag": "hellaswag",
    "piqa": "piqa",
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "winogrande": "winogrande",
    "siqa": "siqa",
    "boolq": "boolq",
}
QUESTIONS, ROUNDS, MAX_LENGTH, BATCH_TOKENS = 40, 3, 2048, 16_384


def main(earlier: str, folder: str, tokenizer: str = "byte") -> None:
    """Prints a line a file."""
    torch.set_num_threads(1)
    encoding = load_tokenizer(tokenizer)
    model = LanguageModel(preset("laptop", vocab_size=encoding.vocab_size)).eval()
    adapters = [
        HarnessModel(scorer(model, encoding, torch.device("cpu"), BATCH_TOKENS), MAX_LENGTH)
        for scorer in (earlier_scorer(earlier), Scorer)
    ]
    totals = [0.0, 0.0]
    for name, form in FORMS.items():
        path = max(Path(folder).glob(f"{name}_*.jsonl.gz"))  # validation where there is one, not training
        records = read_jsonl(str(path))[:QUESTIONS]
        asked = [SimpleNamespace(args=pair) for record in records for pair in choices(form, record).pairs]
        seconds = rounds(adapters, asked)
        totals = [total + one for total, one in zip(totals, seconds, strict=True)]
        report(name, len(records), seconds)
    report("all", QUESTIONS * len(FORMS), totals)


def rounds(adapters: list[HarnessModel], asked: list[Any]) -> list[float]:
    """Median seconds of each adapter."""
    taken: list[list[float]] = [[] for _ in adapters]
    for _ in range(ROUNDS):
        found = []
        for adapter, times in zip(adapters, taken, strict=True):
            start = time.process_time()
            with torch.inference_mode():
                found.append(adapter.loglikelihood(asked))
            times.append(time.process_time() - start)
        for (one, _), (other, _) in zip(*found, strict=True):
            assert abs(one - other) < 1e-3 * max(1.0, abs(one)), (one, other)
    return [median(times) for times in taken]


def report(name: str, questions: int, seconds: list[float]) -> None:
    """One line."""
    before, now = (questions / one for one in seconds)
    print(f"{name:14} {before:8.1f} {now:8.1f} examples/s {now / before:6.2f}x", flush=True)


def earlier_scorer(checkout: str) -> Any:
    """The `Scorer` of another checkout."""
    path = Path(checkout, "platform/titans_platform/evals/scoring.py")
    spec = spec_from_file_location("earlier_scoring", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["earlier_scoring"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Scorer


if __name__ == "__main__":
    main(*sys.argv[1:])
