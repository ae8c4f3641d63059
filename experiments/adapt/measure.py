"""Measure an adapted model on held-out texts: `python experiments/adapt/measure.py MODEL TEXTS.jsonl.xz`.

Prints the losses beyond the window with full attention, the window alone and the memory, the share of the
context's worth that the memory brings back, and how often a fact told early is given back.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import transformers

from titans_core.adapt import Memories
from titans_core.adapt.attention import Pass

MODES = ("full", "window", "memory")
NAMES = ("Karen", "Leo", "Maria", "Nils", "Olga", "Peter", "Rosa", "Simon", "Tilda", "Victor")
WORDS = (
    "copper", "violet", "harbour", "lantern", "walnut", "falcon", "marble", "cinnamon", "thunder", "orchard",
    "velvet", "compass", "meadow", "granite", "saffron", "willow", "anchor", "ember", "pelican", "quartz",
)  # fmt: skip
KINDS = ("password", "favourite word", "code name", "secret word")


def rows(texts: Sequence[list[int]], count: int, length: int, rng: random.Random) -> list[torch.Tensor]:
    """Draw ``count`` rows [1, length + 1], each from another text as long as there are any."""
    order, drawn = rng.sample(range(len(texts)), len(texts)), []
    for i in range(count):
        text = texts[order[i % len(order)]]
        start = rng.randrange(len(text) - length)
        drawn.append(torch.tensor([text[start : start + length + 1]]))
    return drawn


def share(means: list[list[float]]) -> tuple[float, float]:
    """(window - memory) / (window - full) of rows of three losses, and its standard error over rows."""
    full, window, memory = (sum(column) / len(means) for column in zip(*means, strict=True))
    value = (window - memory) / (window - full)
    errors = [(w - m - value * (w - f)) ** 2 for f, w, m in means]
    return value, math.sqrt(sum(errors) / max(1, len(means) - 1) / len(means)) / abs(window - full)


def context(model: Memories, drawn: list[torch.Tensor], edges: Sequence[int]) -> None:
    """Print losses and shares by position; each row at once, so that an interrupted run has some."""
    first = model.adapted.options.window + model.adapted.options.sinks
    losses: list[list[torch.Tensor]] = []
    for row in drawn:
        row = row.to(model.adapted.device)
        losses.append([model(row, mode)[0].double() for mode in MODES])
        for start, end in [*pairwise(edges), (edges[1], edges[-1])]:
            means = [[float(x[start - first : end - first].mean()) for x in of] for of in losses]
            value, error = share(means) if len(means) > 1 else (math.nan, math.nan)
            mean = [sum(column) / len(means) for column in zip(*means, strict=True)]
            gains = torch.tensor([w - m for _, w, m in means])
            spread = float(gains.std() / len(gains) ** 0.5) if len(gains) > 1 else math.nan
            print(
                f"{len(means)} rows, tokens {start} to {end}: "
                + ", ".join(f"{mode} {x:.4f}" for mode, x in zip(MODES, mean, strict=True))
                + f"; share {value:.3f} s.e. {error:.3f}; gain {float(gains.mean()):.4f} s.e. {spread:.4f}",
                flush=True,
            )


def facts(model: Memories, tokenizer: Any, texts: Sequence[list[int]], count: int, length: int) -> None:
    """Print how often a word told in the first 128 of ``length`` tokens is the likeliest of 20 at the end."""
    rng, own, right = random.Random(11), model.adapted, {}
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    after = len(encode('x "'))
    likely = torch.tensor(sorted({encode(f'x "{word}')[after] for word in WORDS}), device=own.device)
    for i in range(count):
        name, kind, word = rng.choice(NAMES), rng.choice(KINDS), rng.choice(WORDS)
        told = encode(f'\n\nPlease remember this: {name}\'s {kind} is "{word}".\n\n')
        asked, answer = encode(f"\n\nNow, {name}'s {kind} is \""), encode(f'x "{word}')[after]
        row, at = rows(texts, 1, length, rng)[0][0, :length].tolist(), rng.randrange(8, 128 - len(told))
        row[at : at + len(told)] = told
        row[-len(asked) :] = asked
        state, emptied = own.read(row[: len(row) - len(asked) + 1]).state, []
        for block, layer in zip(state.blocks, own.layers(), strict=True):
            memory = getattr(layer, own.family.attention).memory
            emptied.append(block._replace(memory=memory and memory.start(1, block.k)))
        for mode in (*MODES, "emptied"):
            if mode in ("full", "window"):
                x, call = torch.tensor([row], device=own.device), Pass(far=mode)
            else:
                blocks = tuple(emptied) if mode == "emptied" else state.blocks
                x, call = torch.tensor([asked], device=own.device), Pass(state.position, blocks)
            logits = own.lm_head(own.encode(own.get_input_embeddings()(x), call)[:, -1])[0]
            hit = bool(likely[logits[likely].argmax()] == answer)
            right.setdefault(mode, []).append((hit, float(logits.log_softmax(-1)[answer])))
        shown = (
            f"{mode} {sum(h for h, _ in of)}/{len(of)} (log p {sum(p for _, p in of) / len(of):.2f})"
            for mode, of in right.items()
        )
        print(
            f"{i + 1} facts at {length} tokens, chance {1 / len(likely):.0%}: {', '.join(shown)}", flush=True
        )


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--facts", type=int, default=20)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = Memories(transformers.AutoModelForCausalLM.from_pretrained(given.model)).eval().to(given.device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    with lzma.open(given.texts, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"][20_000:220_000] for line in file]
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    encoded = [text for text in encoded if len(text) > given.length + 1]
    near = model.adapted.options.window + model.adapted.options.sinks
    with torch.inference_mode():
        drawn = rows(encoded, given.rows, given.length, random.Random(7))
        context(model, drawn, [near, *(given.length // n for n in (4, 2, 1))])
        facts(model, tokenizer, encoded, given.facts, given.length // 2)


if __name__ == "__main__":
    main()
