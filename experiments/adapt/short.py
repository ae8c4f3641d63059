"""Measure an adapted model on questions within its window: `python experiments/adapt/short.py MODEL FOLDER`.

FOLDER has lambada_1000, piqa_train, arc_easy_val and hellaswag_2000 .jsonl.gz, the fields as published. Right
is the last word of a text by greedy choice (LAMBADA), or the ending with the largest sum of log probabilities
(lm_eval's acc). Prints each score with full attention and the source's weights, and as adapted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F

import titans_core.adapt  # noqa: F401 - registers its models
from titans_core.adapt.attention import Pass

Item = tuple[str, list[str], int]
"""The text before, the endings, and the number of the right one."""


def lambada(line: dict[str, Any]) -> Item:
    """Ask for the last word."""
    text, word = line["text"].rsplit(" ", 1)
    return text, [f" {word}"], 0


def piqa(line: dict[str, Any]) -> Item:
    """Offer two solutions."""
    return f"Question: {line['goal']}\nAnswer:", [f" {line['sol1']}", f" {line['sol2']}"], line["label"]


def arc(line: dict[str, Any]) -> Item:
    """Offer three to five choices."""
    return (
        f"Question: {line['question']}\nAnswer:",
        [f" {choice}" for choice in line["choices"]],
        line["gold"],
    )


def hellaswag(line: dict[str, Any]) -> Item:
    """Offer four endings."""
    return line["ctx"], [f" {ending}" for ending in line["endings"]], line["label"]


TASKS: dict[str, Callable[[dict[str, Any]], Item]] = {
    "lambada_1000": lambada, "piqa_train": piqa, "arc_easy_val": arc, "hellaswag_2000": hellaswag,
}  # fmt: skip


def right(model: Any, encode: Callable[[str], list[int]], item: Item, far: Any) -> bool:
    """Return True if the right ending is the likeliest, of a single one if each of its tokens is."""
    text, endings, gold = item
    before, sums, greedy = encode(text), [], False
    for ending in endings:
        after = encode(ending)
        tokens = torch.tensor([before + after])
        x = model.encode(model.get_input_embeddings()(tokens[:, :-1]), Pass(far=far))[0, -len(after) :]
        logits = model.lm_head(x)
        sums.append(-float(F.cross_entropy(logits, tokens[0, -len(after) :], reduction="sum")))
        greedy = logits.argmax(-1).tolist() == after
    return greedy if len(endings) == 1 else sums.index(max(sums)) == gold


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--items", type=int, default=200, help="of each task")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, base = load(given.model).eval(), Path(given.model) / "base"
    source = load(base).eval() if base.is_dir() else model  # of `titans adapt --lora`: the source's weights
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    for name, item in TASKS.items():
        with gzip.open(given.folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        items = [item(line) for line in random.Random(7).sample(lines, given.items)]
        with torch.inference_mode():
            pairs = [(right(source, encode, x, "full"), right(model, encode, x, "memory")) for x in items]
        full, adapted = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        changed = torch.tensor([float(b) - float(a) for a, b in pairs])
        error = float(changed.std() / len(pairs) ** 0.5)
        print(
            f"{name}: {len(pairs)} items, source {full:.1%}, adapted {adapted:.1%}, s.e. {error:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
