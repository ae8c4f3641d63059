"""Train TPTT 0.12.1 (arXiv 2506.17671) and measure it as `measure.py` does: `tptt_peer.py MODEL TRAIN TEXTS`.

TPTT adds to each softmax attention a linear one, of the same projections, by constant weights. Its recipe:
LoRA, next-token loss, AdamW at 5e-4 falling to zero, the linear part's weight rising to 0.5 in 100 steps. It
has no window: ``max_self_attn_length`` fails on longer rows, so the window and the sinks are given as a mask.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measure import BEYOND, FACTS, WORDS, append, fact, losses, rows, share
from peft import LoraConfig  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.nn import functional as F
from tptt import LiZACallback, LiZAttention, TpttConfig, TpttModel  # pyright: ignore[reportMissingImports]
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from titans_core.adapt import MemoryOptions, convert
from titans_core.adapt.attention import Pass

Options = argparse.Namespace


def peer(given: Options) -> Any:
    """Convert the source by TPTT, with its LoRA's dropout and alpha for each rank, but rank 16."""
    names, source = ["q_proj", "k_proj", "v_proj", "o_proj"], AutoConfig.from_pretrained(given.model)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=names, task_type="CAUSAL_LM")
    options = {"operator_mode": given.operator, "max_chunk_size": given.chunk, "mag_weight": given.mag}
    options |= {"base_scale_attn": bool(given.scale), "use_linear_checkpoint": False}
    config = TpttConfig(source, given.model, lora_config=lora.to_dict(), **options)
    model = TpttModel(config, dtype=torch.float32).to(given.device)
    for module in model.modules():
        if isinstance(module, LiZAttention):
            module.disable_linear_attn = given.no_linear
    return model


def logits(model: Any, tokens: Tensor, given: Options) -> Tensor:
    """[B, T, V] of [B, T]; softmax attention sees the window, the query included, and the sinks."""
    at = torch.arange(tokens.shape[1], device=tokens.device)
    seen = (at <= at[:, None]) & ((at > at[:, None] - given.window) | (at < given.sinks))
    # of numbers, as TPTT adds a mask of booleans to the scores as zeros and ones
    mask = torch.zeros(seen.shape, device=tokens.device).masked_fill(~seen, torch.finfo(torch.float32).min)
    return model(input_ids=tokens, attention_mask=mask[None, None]).logits


def nats(model: Any, row: Tensor, given: Options) -> Tensor:
    """[B, T] nats of each token of rows [B, T + 1] but the first."""
    scores = logits(model, row[:, :-1], given).flatten(0, 1).float()
    return F.cross_entropy(scores, row[:, 1:].flatten(), reduction="none").view(len(row), -1)


def near(model: Any, row: Tensor, given: Options) -> Tensor:
    """[T] nats of [1, T + 1], of which TPTT reads 256 tokens and the 256 before them, for each 256."""
    starts = range(0, row.shape[1] - 1, 256)
    parts = [(nats(model, row[:, max(0, i - 256) : i + 257], given)[0], min(i, 256)) for i in starts]
    return torch.cat([part[before:] for part, before in parts])


def train(model: Any, texts: list[list[int]], given: Options) -> float:
    """Train by TPTT's recipe. Returns seconds a step, without the first."""
    drawn = rows(texts, given.steps * given.batch, given.length, random.Random(given.seed))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, given.lr, weight_decay=0.0)
    falling = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / given.steps)
    rising = LiZACallback(model, "gradual", 0.01, given.mag, max(1, min(given.rise, given.steps // 2)))
    model.train()
    model.tptt_model.gradient_checkpointing_enable({"use_reentrant": False})  # else 50 GB a row of 2,048
    start = time.perf_counter()
    for step in range(given.steps):
        rising.on_step_end(None, SimpleNamespace(global_step=step), None)
        row = torch.cat(drawn[step * given.batch : (step + 1) * given.batch]).to(given.device)
        with torch.autocast(given.device, torch.bfloat16, enabled=given.device == "cuda"):
            loss = nats(model, row, given).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        falling.step()
        print(f"step {step}: loss {loss:.4f}", flush=True)
        start = start if step else time.perf_counter()
    return (time.perf_counter() - start) / max(1, given.steps - 1)


def context(model: Any, source: Any, drawn: list[Tensor], given: Options) -> dict[str, str]:
    """Print and return losses by position, and the share that TPTT brings back of what the window loses."""
    seen: dict[str, list[Tensor]] = {"full": [], "window": [], "tptt": [], "near": []}
    for row in (row.to(given.device) for row in drawn):
        for mode in ("full", "window"):
            seen[mode].append(losses(source, row, mode))
        seen["tptt"].append(nats(model, row, given)[0].double())
        seen["near"].append(near(model, row, given).double())
    edges = [0, given.window + given.sinks, *(x for x in (512, 1024) if x < given.length), given.length]
    record = {}
    for start, end in [*pairwise(edges), (min(BEYOND, edges[-2]), given.length)]:
        means = {mode: [float(x[start:end].mean()) for x in values] for mode, values in seen.items()}
        shown = {mode: f"{sum(values) / len(values):.5f}" for mode, values in means.items()}
        for mode in ("tptt", "near") if start else ():
            three = zip(means["full"], means["window"], means[mode], strict=True)
            value, error = share([list(values) for values in three])
            shown |= {f"share of {mode}": f"{value:.4f}", f"error of {mode}": f"{error:.4f}"}
        print(f"tokens {start} to {end}:", ", ".join(f"{key} {x}" for key, x in shown.items()), flush=True)
        record |= {f"{key} {start}-{end}": x for key, x in shown.items()}
    return record


def facts(model: Any, source: Any, tokenizer: Any, texts: list[list[int]], given: Options) -> dict[str, str]:
    """Print and return how often a told word is the likeliest of 20, of the rows of `measure.py`."""
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    after, length, record = len(encode('x "')), 1024, {}
    likely = torch.tensor(sorted({encode(f'x "{word}')[after] for word in WORDS}), device=given.device)
    for kind in FACTS:
        rng, right = random.Random(f"11 {kind}"), {}
        for _ in range(given.facts):
            told, asked, word = fact(kind, rng)
            told, asked, answer = encode(told), encode(asked), encode(f'x "{word}')[after]
            row, at = rows(texts, 1, length, rng)[0][:, :length], rng.randrange(8, 128 - len(told))
            row[0, at : at + len(told)] = torch.tensor(told)
            row[0, -len(asked) :] = torch.tensor(asked)
            row = row.to(given.device)
            scores, x = {"tptt": logits(model, row, given)[0, -1]}, source.get_input_embeddings()(row)
            for far in ("full", "window"):
                scores[far] = source.lm_head(source.encode(x, Pass(far=far))[0, -1])
            for mode, values in scores.items():
                hit = bool(likely[values[likely].argmax()] == answer)
                right.setdefault(mode, []).append((hit, float(values.log_softmax(-1)[answer])))
        for mode, values in right.items():
            hits, p = sum(hit for hit, _ in values), sum(p for _, p in values) / len(values)
            record |= {f"{kind} {mode}": str(hits), f"{kind} {mode} log p": f"{p:.3f}"}
            print(f"{kind}, {mode}: {hits}/{len(values)} (log p {p:.2f})", flush=True)
    return record


def main() -> None:
    """Read the command line, train and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "train", "texts"):
        parser.add_argument(name)
    options = {"steps": 200, "batch": 4, "lr": 5e-4, "seed": 0, "rows": 16, "facts": 20, "length": 2048}
    options |= {"window": 256, "sinks": 4, "mag": 0.5, "rise": 100, "chunk": 64, "scale": 0}
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--operator", default="delta_rule", help="of TpttConfig.RECURRENT_MODES")
    parser.add_argument("--no-linear", action="store_true", help="a control: LoRA with the window alone")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--csv", type=Path, help="gets the record; one file for the same options")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    tokenizer, encoded = AutoTokenizer.from_pretrained(given.model), []
    for path, part in ((given.train, slice(None)), (given.texts, slice(20_000, 220_000))):
        with (lzma.open if path.endswith(".xz") else open)(path, "rt", encoding="utf-8") as file:
            texts = [json.loads(line)["text"][part] for line in file]
        texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        encoded.append([text for text in texts if len(text) > given.length + 1])
    model, source = peer(given), AutoModelForCausalLM.from_pretrained(given.model).float()
    record = {key: value for key, value in vars(given).items() if key != "csv"}
    record["seconds a step"] = f"{train(model, encoded[0], given) if given.steps else 0:.2f}"
    source = convert(source, MemoryOptions(window=given.window, sinks=given.sinks)).to(given.device)
    model.eval()
    with torch.inference_mode():
        drawn = rows(encoded[1], given.rows, given.length, random.Random(7))
        record |= context(model, source, drawn, given)
        record |= facts(model, source, tokenizer, encoded[1], given) if given.facts else {}
    if given.csv:
        append(given.csv, [record])


if __name__ == "__main__":
    main()
