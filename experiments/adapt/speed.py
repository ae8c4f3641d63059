"""Speed and state by length: `python experiments/adapt/speed.py MODEL SOURCE TEXT.txt`.

MODEL, a folder of `titans adapt`, reads the text and generates after each length. SOURCE, of which it was
made, generates with full attention and a cache of that length, filled with random keys and values, on which
the time does not depend. Prints bytes carried, and tokens a second of reading and of generating.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_leaves

import titans_core.adapt  # noqa: F401
from titans_core import Reading


def rate(tokens: Iterable[Any]) -> float:
    """Tokens a second by the median time between two, without the first, which may compile."""
    times = [time.perf_counter() for _ in tokens]
    return 1 / statistics.median(b - a for a, b in pairwise(times))


@torch.inference_mode()
def full_attention(model: Any, length: int, new: int) -> tuple[int, float]:
    """Bytes of the cache after ``length`` tokens, and tokens generated a second."""
    config = model.config
    cache: Any = transformers.DynamicCache(config=config)
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        pair = torch.randn(2, 1, heads, length, width, dtype=model.dtype, device=model.device)
        cache.update(pair[0], pair[1], layer)
    size = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))

    def tokens() -> Iterable[int]:
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        for _ in range(new):
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            yield token.item()

    return size, rate(tokens())


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("source")
    parser.add_argument("text", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32_768, 100_000])
    parser.add_argument("--read-most", type=int, default=100_000, help="tokens to read; none after them")
    parser.add_argument("--full-most", type=int, default=32_768, help="longest cache of full attention")
    parser.add_argument("--new", type=int, default=33, help="tokens to generate after each length")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, source = (load(folder).eval().to(given.device) for folder in (given.model, given.source))
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    tokens = tokenizer(given.text.read_text("utf-8"), add_special_tokens=False)["input_ids"]
    reading, before = Reading(), 0
    for length in sorted(given.lengths):
        count = min(length, given.read_most)
        if count > len(tokens):
            raise SystemExit(f"{given.text}: {len(tokens):,} tokens, and {count:,} are to be read")
        began = time.perf_counter()
        if count > before:
            reading = model.read(tokens[before:count], reading)
        read = f"{(count - before) / (time.perf_counter() - began):.1f}" if count > before else "-"
        leaves = tree_leaves(reading.state.blocks if reading.state else ())
        state = sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
        speed = rate(model.stream([[]], given.new, start=reading))
        line = f"{length:,} tokens, {count:,} read: state {state:,} bytes, "
        line += f"read {read} a second, written {speed:.2f}"
        if length <= given.full_most:
            cache, full = full_attention(source, length, given.new)
            line += f"; full attention: cache {cache:,} bytes, written {full:.2f}; {speed / full:.2f} times"
        print(line, flush=True)
        before = count


if __name__ == "__main__":
    main()
