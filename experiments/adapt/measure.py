"""Measure an adapted model on held-out texts: `python experiments/adapt/measure.py MODEL TEXTS.jsonl.xz`.

Prints the losses of tokens by position with full attention, the window alone, a window as many bytes larger
as the memory has, and the memory; the share of the context's worth that the memory brings back; and how often
a fact told early is given back.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import lzma
import math
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

import titans_core.adapt  # noqa: F401 - registers its models
from titans_core.adapt.attention import Pass

NAMES = ("Karen", "Leo", "Maria", "Nils", "Olga", "Peter", "Rosa", "Simon", "Tilda", "Victor")
WORDS = (
    "copper", "violet", "harbour", "lantern", "walnut", "falcon", "marble", "cinnamon", "thunder", "orchard",
    "velvet", "compass", "meadow", "granite", "saffron", "willow", "anchor", "ember", "pelican", "quartz",
)  # fmt: skip
KINDS = ("password", "favourite word", "code name", "secret word")
FACTS = ("told", "paraphrased", "corrected", "one of three")
BEYOND = 512
"""Tokens of a row that the share does not count."""


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


def attentions(model: Any) -> list[Any]:
    """Return the attention of each layer."""
    return [getattr(layer, model.family.attention) for layer in model.layers()]


def set_window(model: Any, window: int) -> None:
    """Change the number of tokens that attention sees, in all layers."""
    for attention in attentions(model):
        attention.options = attention.options.model_copy(update={"window": window})


def set_kept(model: Any, kept: int) -> None:
    """Change the number of tokens that layers of the upper half keep whole."""
    for attention in attentions(model):
        attention.most = kept if 2 * (attention.layer_idx + 1) > len(attentions(model)) else 0


def larger_window(model: Any) -> int:
    """Return the tokens of a window that has also the bytes of what is beside it, as keys and values."""
    window, length = model.options.window, 64 * model.options.window
    before = model.state_bytes(length)
    set_window(model, 2 * window)
    each = (model.state_bytes(length) - before) / window
    set_window(model, window)
    start = [memory.start(1, torch.zeros(1)).state.weights for memory in model.memories().values()]
    more = sum(x.nbytes for weights in start for x in weights)
    kept = [attention.most for attention in attentions(model)]
    set_kept(model, 0)
    more += before - model.state_bytes(length)
    for attention, most in zip(attentions(model), kept, strict=True):
        attention.most = most
    return window + round(more / each)


def losses(model: Any, row: torch.Tensor, far: Any) -> torch.Tensor:
    """[T] nats of each token of a row [1, T + 1] but the first."""
    return model.nats(row, far)[0].double()


def context(model: Any, source: Any, drawn: list[torch.Tensor], name: str) -> list[dict[str, Any]]:
    """Print losses and shares by position; each row at once, so that an interrupted run has some.

    Args:
        model: adapted.
        source: adapted with the source's weights, which are not ``model``'s if LoRA changed them.
        drawn: rows of equal lengths.
        name: of the model, in the records.

    Returns:
        A record for each range of positions.
    """
    near, length = model.options.window + model.options.sinks, drawn[0].shape[1] - 1
    edges = [0, near, BEYOND]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    seen: dict[str, list[torch.Tensor]] = {}
    records: list[dict[str, Any]] = []
    larger = larger_window(source)
    print(f"larger window: {larger} tokens, by the bytes of the memories")
    for row in drawn:
        row = row.to(model.device)
        for mode, network, far, window in (
            ("full", source, "full", None), ("window", source, "window", None),
            ("larger window", source, "window", larger), ("memory", model, "memory", None),
            *([("window, trained", model, "window", None)] if model is not source else []),
        ):  # fmt: skip
            set_window(network, window or network.options.window)
            seen.setdefault(mode, []).append(losses(network, row, far))
            set_window(network, network.options.window)
        records = []
        for start, end in [*pairwise(edges), (BEYOND, length)]:
            means = {mode: [float(x[start:end].mean()) for x in each] for mode, each in seen.items()}
            three = list(zip(means["full"], means["window"], means["memory"], strict=True))
            shown = {mode: sum(each) / len(each) for mode, each in means.items()}
            value, error = (
                share([list(each) for each in three]) if len(three) > 1 and start else (math.nan,) * 2
            )
            gains = torch.tensor([w - m for _, w, m in three])
            spread = float(gains.std() / len(gains) ** 0.5) if len(gains) > 1 else math.nan
            print(
                f"{len(three)} rows, tokens {start} to {end}: "
                + ", ".join(f"{mode} {x:.4f}" for mode, x in shown.items())
                + f"; share {value:.3f} s.e. {error:.3f}; gain {float(gains.mean()):.4f} s.e. {spread:.4f}",
                flush=True,
            )
            record = {"model": name, "rows": len(three), "start": start, "end": end, "larger": larger}
            record |= {mode: f"{x:.5f}" for mode, x in ({"window, trained": shown["window"]} | shown).items()}
            records.append(record | {"share": f"{value:.4f}", "share_error": f"{error:.4f}"})
    return records


def fact(kind: str, rng: random.Random) -> tuple[str, str, str]:
    """Draw what is told, what is asked, and the word that is right."""
    names, noun, words = rng.sample(NAMES, 3), rng.choice(KINDS), rng.sample(WORDS, 3)
    name, word = names[0], words[0]
    told, asked = f'Please remember this: {name}\'s {noun} is "{word}".', f"Now, {name}'s {noun} is \""
    if kind == "paraphrased":
        asked = f'The {noun} that {name} chose was "'
    elif kind == "corrected":
        told = f'{name}\'s {noun} is "{words[1]}". No, that was wrong: {name}\'s {noun} is "{word}".'
    elif kind == "one of three":
        told = " ".join(f'{name}\'s {noun} is "{word}".' for name, word in zip(names, words, strict=True))
        name, word = rng.choice(list(zip(names, words, strict=True)))
        asked = f"Now, {name}'s {noun} is \""
    return f"\n\n{told}\n\n", f"\n\n{asked}", word


def facts(
    model: Any, source: Any, tokenizer: Any, texts: Sequence[list[int]], count: int, length: int, name: str,
    seed: int = 11,
) -> list[dict[str, Any]]:  # fmt: skip
    """Print how often a word told in the first 128 of ``length`` tokens is the likeliest of 20 at the end.

    Args as in `context`; ``count`` of each kind. Returns a record for each kind.
    """
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    after = len(encode('x "'))
    likely = torch.tensor(sorted({encode(f'x "{word}')[after] for word in WORDS}), device=model.device)
    records = []
    for kind in FACTS:
        rng, right = random.Random(f"{seed} {kind}"), {}
        for _ in range(count):
            told, asked, word = fact(kind, rng)
            told, asked, answer = encode(told), encode(asked), encode(f'x "{word}')[after]
            row, at = rows(texts, 1, length, rng)[0][0, :length].tolist(), rng.randrange(8, 128 - len(told))
            row[at : at + len(told)] = told
            row[-len(asked) :] = asked
            state, emptied = model.read(row[: len(row) - len(asked) + 1]).state, []
            for block, attention in zip(state.blocks, attentions(model), strict=True):
                empty, old = attention._start(block.k, block.k), block.kept
                memory = attention.memory and empty.memory._replace(far_B=block.memory.far_B)
                kept = old and empty.kept._replace(received=old.received, surprise=old.surprise)
                emptied.append(block._replace(memory=memory, kept=kept))
            for mode in ("full", "window", "memory", "emptied"):
                if mode in ("full", "window"):
                    network, x, call = source, torch.tensor([row], device=model.device), Pass(far=mode)
                else:
                    blocks = tuple(emptied) if mode == "emptied" else state.blocks
                    network, call = model, Pass(state.position, blocks)
                    x = torch.tensor([asked], device=model.device)
                logits = network.lm_head(network.encode(network.get_input_embeddings()(x), call)[:, -1])[0]
                hit = bool(likely[logits[likely].argmax()] == answer)
                right.setdefault(mode, []).append((hit, float(logits.log_softmax(-1)[answer])))
        scores = {
            mode: (sum(h for h, _ in each), sum(p for _, p in each) / count) for mode, each in right.items()
        }
        shown = (f"{mode} {hits}/{count} (log p {p:.2f})" for mode, (hits, p) in scores.items())
        print(
            f"{count} facts, {kind}, {length} tokens, chance {1 / len(likely):.0%}: {', '.join(shown)}",
            flush=True,
        )
        record = {"model": name, "facts": kind, "count": count}
        for mode, (hits, p) in scores.items():
            record |= {mode: hits, f"{mode} log p": f"{p:.3f}"}
        records.append(record)
    return records


def append(path: Path, records: list[dict[str, Any]]) -> None:
    """Add records to a CSV file, with a header if it is new."""
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(records)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--facts", type=int, default=20, help="of each kind")
    parser.add_argument("--facts-length", type=int, default=1024, help="tokens of a row with a fact")
    parser.add_argument("--facts-seed", type=int, default=11)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--kept", type=int, help="tokens kept whole  [default: as the model was made]")
    parser.add_argument("--no-memory", action="store_true", help="the window and kept tokens alone")
    parser.add_argument("--name", help="of the model in the records  [default: its folder]")
    parser.add_argument("--csv", type=Path, help="folder whose context.csv and facts.csv get the records")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.csv:
        given.csv.mkdir(parents=True, exist_ok=True)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = source = load(given.model).eval().to(given.device)
    if (base := Path(given.model) / "base").is_dir():  # of `titans adapt --lora`: the source's weights
        source = load(base).eval().to(given.device)
    for network in (model, source):
        if given.kept is not None:
            set_kept(network, given.kept)
        if given.no_memory:
            for attention in attentions(network):
                attention.memory = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    compressed = {".xz": lzma, ".gz": gzip}[Path(given.texts).suffix]
    with compressed.open(given.texts, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"][20_000:220_000] for line in file]
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    encoded = [text for text in encoded if len(text) > given.length + 1]
    name = given.name or Path(given.model).name
    with torch.inference_mode():
        if given.rows:
            drawn = rows(encoded, given.rows, given.length, random.Random(7))
            records = context(model, source, drawn, name)
            if given.csv:
                append(given.csv / "context.csv", records)
        if given.facts:
            asked = given.facts, given.facts_length, name, given.facts_seed
            records = facts(model, source, tokenizer, encoded, *asked)
            if given.csv:
                append(given.csv / "facts.csv", records)


if __name__ == "__main__":
    main()
