"""Find where a fact is lost: `python experiments/adapt/ceilings.py MODEL TEXTS.jsonl.xz`.

A row with a fact is read with the window alone. For the tokens that ask for it each layer also sees the far
tokens, or what stands for them: their softmax at their own distances, at one distance, at none; a matrix that
maps keys to values as well as any can; all of them, the fact's, or some. MODEL is an adapted model
with the source's weights, `my-model/base` of `titans adapt --lora`, which has no tokenizer: --tokenizer.

Shapes: P tokens before the question, a of the question, H query heads, E head width.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
from typing import Any

import torch
import transformers
from measure import FACTS, WORDS, attentions, fact, rows
from torch import Tensor
from torch.nn import functional as F

import titans_core.adapt  # noqa: F401 - registers its models
from titans_core.adapt.attention import Pass, WindowAttention, rotate
from titans_core.adapt.kept import AROUND, start, write

SOME = 92
"""Far tokens that are seen where not all are; twice as many in half of the layers."""
MODES = (
    ("window alone", "window", "all"),
    ("softmax, own distances", "own", "all"),
    ("softmax, one distance", "one", "all"),
    ("softmax, no distance", "none", "all"),
    ("softmax, no distance, but the share of own distances", "none, own share", "all"),
    ("softmax, one distance, the fact's tokens", "one", "fact"),
    ("the same in layers 0 to 14", "one", "fact, lower"),
    ("the same in layers 15 to 29", "one", "fact, upper"),
    ("matrix, own share", "matrix", "all"),
    ("matrix, own share, the fact's tokens", "matrix", "fact"),
    ("matrix of centred keys and queries, own share, the fact's tokens", "centred", "fact"),
    (f"softmax, one distance, {SOME} at random", "one", "random"),
    (f"softmax, one distance, {SOME} of the largest loss", "one", "loss"),
    (f"softmax, one distance, {SOME} by loss around them", "one", "loss around"),
    (f"softmax, one distance, {SOME} by surprise around them", "one", "surprise"),
    (f"the same, {2 * SOME} in layers 15 to 29", "one", "surprise, upper"),
)
RIDGE = 0.1


class Stand:
    """A stand-in for the far tokens in every layer."""

    kind, which = "window", "all"
    fact: slice
    loss_P: Tensor
    keys: dict[int, tuple[Tensor, Tensor, Tensor]]
    """Of each layer, keys and values [P, G, E] of the row, and their scores [P]."""
    rotary: Any

    def chosen(self, layer: WindowAttention, layers: int) -> Tensor | None:
        """[P], the tokens that are seen if they are far enough; None: the layer sees the window alone."""
        which, _, where = self.which.partition(", ")
        if where and (where == "upper") != (2 * layer.layer_idx >= layers):
            return None
        P, far = len(self.loss_P), slice(layer.options.sinks, len(self.loss_P) - layer.options.window)
        if which in ("all", "fact"):
            seen = torch.zeros(P, dtype=torch.bool)
            seen[far if which == "all" else self.fact] = True
            return seen
        around = F.avg_pool1d(self.loss_P[None], 2 * AROUND + 1, 1, AROUND, count_include_pad=False)[0]
        scores = {"random": torch.rand(P, generator=torch.Generator().manual_seed(5)), "loss": self.loss_P}
        scores |= {"loss around": around, "surprise": self.keys[layer.layer_idx][2]}
        score, seen = torch.full((P,), -torch.inf), torch.zeros(P, dtype=torch.bool)
        score[far] = scores[which][far]
        seen[score.topk(2 * SOME if where else SOME).indices] = True
        return seen

    def __call__(self, layer: Any, q: Tensor, y: Tensor, level: Tensor, at: int) -> Tensor:
        """Mix what stands for the far tokens into the window's output [1, a, H, E]."""
        W, S, scale = layer.options.window, layer.options.sinks, layer.scaling
        chosen = None if self.kind == "window" else self.chosen(layer, len(self.keys))
        if chosen is None:
            return y
        queries = torch.arange(at, at + q.shape[1])
        R = q.shape[2] // self.keys[layer.layer_idx][0].shape[1]
        k, v = (
            x.repeat_interleave(R, 1).transpose(0, 1) for x in self.keys[layer.layer_idx][:2]
        )  # [H, P, E]
        P = k.shape[1]
        turn = lambda x, p: rotate(x[None], self.rotary, p)[0].transpose(0, 1)  # noqa: E731
        seen = (torch.arange(P) <= queries[:, None] - W) & chosen
        seen[:, :S] = False
        hide = lambda scores: (scores * scale).masked_fill(~seen, -1e30)  # noqa: E731
        true = hide(turn(q[0], queries) @ turn(k.transpose(0, 1), torch.arange(P)).mT)
        plain = q[0].transpose(0, 1)
        scores = {"own": true, "none": hide(plain @ k.mT)}.get(self.kind.split(",")[0])
        if self.kind == "one":
            scores = hide(turn(q[0], torch.full_like(queries, W)) @ k.mT)
        share = true if scores is None or self.kind.endswith("own share") else scores
        if scores is not None:
            read = scores.softmax(-1) @ v
        else:
            mean = k[:, S:].mean(1, keepdim=True) if self.kind == "centred" else 0
            at_k, at_q = (F.normalize((x - mean).double(), dim=-1) for x in (k[:, seen[-1]], plain))
            inverse = torch.linalg.inv(at_k.mT @ at_k + RIDGE * torch.eye(k.shape[2], dtype=torch.float64))
            read = (at_q @ inverse @ at_k.mT @ v[:, seen[-1]].double()).to(v.dtype)
        share = (share.logsumexp(-1) - level[0].T - math.log(W + S)).sigmoid()[..., None].transpose(0, 1)
        return y + share * (read.transpose(0, 1) - y)


def main() -> None:
    """Read the command line and print a line for each of `MODES`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--tokenizer", help="[default: MODEL]")
    parser.add_argument("--facts", type=int, default=4, help="of each kind")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(given.model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.tokenizer or given.model)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    with lzma.open(given.texts, "rt", encoding="utf-8") as file:
        texts = [encode(json.loads(line)["text"][20_000:220_000]) for line in file]
    for attention in attentions(model):
        attention.memory, attention.most = None, 0
    stand, within, embed = Stand(), WindowAttention._window, model.get_input_embeddings()
    stand.rotary = model.base_model.rotary_emb(torch.zeros(1, 1), torch.arange(2048)[None])

    def window(self: Any, q: Tensor, k: Tensor, v: Tensor, before: Any, position: int, rotary: Any) -> Any:
        y, level, _ = within(self, q, k, v, before, position, rotary)
        if position:
            return stand(self, q, y, level, position), level, None
        W = self.options.window
        score = torch.cat([write(start(k), k, v, W)[0][0, W:], torch.zeros(W)])
        stand.keys[self.layer_idx] = k[0], v[0], score
        return y, level, None

    WindowAttention._window = window  # pyright: ignore[reportAttributeAccessIssue]
    after, length = len(encode('x "')), 1024
    likely = torch.tensor(sorted({encode(f'x "{word}')[after] for word in WORDS}))
    results: dict[str, list[tuple[bool, float]]] = {name: [] for name, *_ in MODES}
    with torch.inference_mode():
        for kind in FACTS:
            rng = random.Random(f"11 {kind}")
            for _ in range(given.facts):
                told, asked, word = fact(kind, rng)
                told, asked, answer = encode(told), encode(asked), encode(f'x "{word}')[after]
                row, at = rows(texts, 1, length, rng)[0][0, :length], rng.randrange(8, 128 - len(told))
                row[at : at + len(told)] = torch.tensor(told)
                read = row[: length - len(asked) + 1]  # the first token of the question is a line's end
                read[-1], stand.fact, stand.keys = asked[0], slice(at, at + len(told)), {}
                x = model.encode(embed(read[None]), call := Pass(far="window"))[0]
                logits = torch.cat([model.lm_head(part) for part in x.split(256)])
                stand.loss_P = F.pad(F.cross_entropy(logits[:-1], read[1:], reduction="none"), (1, 0))
                state = tuple(call.after[i] for i in range(len(stand.keys)))
                for name, stand.kind, stand.which in MODES:
                    x = model.encode(embed(torch.tensor([asked[1:]])), Pass(len(read), state, "window"))
                    logits = model.lm_head(x[:, -1])[0]
                    hit = bool(likely[logits[likely].argmax()] == answer)
                    results[name].append((hit, float(logits.log_softmax(-1)[answer])))
            print(
                f"{kind}: {', '.join(str(sum(h for h, _ in pairs)) for pairs in results.values())}",
                flush=True,
            )
    for name, pairs in results.items():
        hits, nats = zip(*pairs, strict=True)
        print(f"{name}: {sum(hits)} of {len(pairs)} (log p {sum(nats) / len(pairs):.2f})")


if __name__ == "__main__":
    main()
