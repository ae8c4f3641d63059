"""Compare what may decide which tokens are kept: `python experiments/adapt/choices.py MODEL TEXTS.jsonl`.

MODEL is an adapted model with the source's weights, `my-model/base` of `titans adapt --lora`, which has no
tokenizer: --tokenizer. Its memories are not used. Rows are read with full attention, the window, and the
window with the tokens that each choice keeps; prints losses beyond the first 512 tokens, the share of the
context's worth that comes back, and facts.

Shapes: T tokens, C candidates, H query heads, G heads of keys and values, R = H / G, E head width.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from typing import Any, NamedTuple

import torch
import transformers
from measure import FACTS, WORDS, attentions, fact, losses, rows, share
from torch import Tensor

import titans_core.adapt  # noqa: F401 - registers its models
from titans_core.adapt.attention import Pass, WindowAttention, rotate
from titans_core.adapt.kept import _seen, start, write

BLOCK = 128
"""Queries at once."""


class Choice(NamedTuple):
    """Which tokens are kept beyond the window."""

    name: str
    lower: int = 0
    """Kept tokens of each layer of the lower half."""
    upper: int = 0
    attention: float = 0.0
    """The factor of the attention that a token received from queries ``ages`` tokens later."""
    ages: tuple[int, int] = (128, 256)
    surprise: float = 0.0
    """The factor of surprise."""
    wider: int = 0
    """Tokens by which the window is larger."""


CHOICES = (
    Choice("full attention"),
    Choice("window"),
    Choice("larger window, as many bytes", wider=96),
    Choice("at random", upper=192),
    Choice("surprise", upper=192, surprise=1),
    Choice("attention", upper=192, attention=1, ages=(0, 256)),
    Choice("attention, half of them in each layer", 96, 96, attention=1, ages=(0, 256)),
    Choice("attention, lower layers", lower=192, attention=1, ages=(0, 256)),
    Choice("attention from 128 later", upper=192, attention=1),
    Choice("attention from 208 later", upper=192, attention=1, ages=(208, 256)),
    Choice("attention from 128 later + 0.3 surprise", upper=192, attention=1, surprise=0.3),
    Choice("attention from 128 later + surprise", upper=192, attention=1, surprise=1),
    Choice("attention from 128 later + 2 surprise", upper=192, attention=1, surprise=2),
    Choice("attention from 128 later + 4 surprise", upper=192, attention=1, surprise=4),
)


class Chosen:
    """Attention [1, T, H, E] of a row to window, sinks and chosen tokens, in the place of full attention."""

    choice: Choice

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rotary: Any) -> Tensor:
        """Args as of `WindowAttention._full`."""
        choice, (_, T, _, E), G, S = self.choice, q.shape, k.shape[2], layer.options.sinks
        upper = 2 * (layer.layer_idx + 1) > layer.config.num_hidden_layers
        limit, W = choice.upper if upper else choice.lower, layer.options.window + choice.wider
        at = torch.arange(T)
        heads = lambda x: x[0].transpose(0, 1).reshape(G, -1, T, E)  # noqa: E731 - [G, R or 1, T, E]
        near_q, far, sinks = (
            heads(rotate(q, rotary, to)) * layer.scaling
            for to in (at, torch.full_like(at, W), at.clamp(max=S + W - 1))
        )
        keys, still, values = (heads(x)[:, 0] for x in (rotate(k, rotary, at), rotate(k, rotary, at * 0), v))
        surprise = torch.cat([write(start(k), k, v, W)[0][0, W:], torch.zeros(W)])
        noise = torch.rand(T, generator=torch.Generator().manual_seed(5))
        received, outputs = torch.zeros(G, T), []
        kept = torch.zeros(G, 0, E), torch.zeros(G, 0, E), torch.zeros(G, 0)
        for first in range(0, T, BLOCK):
            query = slice(first, min(first + BLOCK, T))
            key = slice(max(0, first - W + 1), query.stop)
            age = at[query, None] - at[key]
            near = (near_q[:, :, query] @ keys[:, None, key].mT).masked_fill((age < 0) | (age >= W), -1e30)
            sink = sinks[:, :, query] @ keys[:, None, :S].mT
            scores = [sink.masked_fill(at[:S] > at[query, None] - W, -1e30), near]
            seen_values = [values[:, :S], values[:, key]]
            p = torch.cat(scores, -1).softmax(-1)[..., S:]
            old = (age >= choice.ages[0]) & (age < choice.ages[1])
            received[:, key] += (p * old).sum((1, 2))
            leaving = slice(max(S, first - W), query.stop - W)
            new = leaving.stop - leaving.start
            if limit and new > 0:
                score = choice.attention * received[:, leaving] + choice.surprise * surprise[leaving]
                score = score if choice.attention or choice.surprise else noise[leaving].expand(G, -1)
                pairs = zip(kept, (still[:, leaving], values[:, leaving], score), strict=True)
                kept = tuple(torch.cat(pair, 1) for pair in pairs)
                seen = _seen(kept[2][None], new, limit)[0]
                read = (far[:, :, query][:, :, -new:] @ kept[0][:, None].mT).masked_fill(
                    ~seen[:, None], -1e30
                )
                scores.append(torch.nn.functional.pad(read, (0, 0, near.shape[2] - new, 0), value=-1e30))
                seen_values.append(kept[1])
                order = seen[:, -1].to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :limit]
                kept = tuple(x.take_along_dim(order.view(*order.shape, *[1] * (x.ndim - 2)), 1) for x in kept)
            outputs.append(torch.cat(scores, -1).softmax(-1) @ torch.cat(seen_values, 1)[:, None])
        return torch.cat(outputs, 2).flatten(0, 1).transpose(0, 1)[None]


def main() -> None:
    """Read the command line and print a line for each of `CHOICES`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--tokenizer", help="[default: MODEL]")
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--facts", type=int, default=4, help="of each kind")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(given.model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.tokenizer or given.model)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    with (lzma.open if given.texts.endswith("xz") else open)(given.texts, "rt", encoding="utf-8") as file:
        texts = [encode(json.loads(line)["text"][20_000:220_000]) for line in file]
    texts = [text for text in texts if len(text) > 2048]
    for attention in attentions(model):
        attention.memory, attention.most = None, 0
    drawn, asked_rows = rows(texts, given.rows, 2048, random.Random(given.seed)), []
    after = len(encode('x "'))
    likely = torch.tensor(sorted({encode(f'x "{word}')[after] for word in WORDS}))
    for kind in FACTS:
        rng = random.Random(f"21 {kind}")
        for _ in range(given.facts):
            told, asked, word = fact(kind, rng)
            told, asked, answer = encode(told), encode(asked), encode(f'x "{word}')[after]
            row, at = rows(texts, 1, 1024, rng)[0][:, :1024], rng.randrange(8, 128 - len(told))
            row[0, at : at + len(told)], row[0, -len(asked) :] = torch.tensor(told), torch.tensor(asked)
            asked_rows.append((row, answer))
    full, chosen = WindowAttention._full, Chosen()
    means: dict[str, list[float]] = {}
    for chosen.choice in CHOICES:
        name = chosen.choice.name
        other: Any = lambda *of: chosen(*of)  # noqa: E731 - a function becomes a method
        WindowAttention._full = full if name == "full attention" else other
        with torch.inference_mode():
            means[name] = [float(losses(model, row, "full")[512:].mean()) for row in drawn]
            hits, nats = 0, 0.0
            for row, answer in asked_rows:
                x = model.encode(model.get_input_embeddings()(row), Pass(far="full"))
                logits = model.lm_head(x[0, -1])
                hits += bool(likely[logits[likely].argmax()] == answer)
                nats += float(logits.log_softmax(-1)[answer])
        line = f"{name}: {sum(means[name]) / len(drawn):.4f}"
        if len(means) > 2:
            three = zip(means["full attention"], means["window"], means[name], strict=True)
            line += " share {:.2f} s.e. {:.2f}".format(*share([list(of) for of in three]))
        print(f"{line}; {hits} of {len(asked_rows)} facts (log p {nats / len(asked_rows):.2f})", flush=True)


if __name__ == "__main__":
    main()
