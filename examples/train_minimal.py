"""Train a Titans model on a text file and let it write: titans_core and titans_kernels alone, in one file.

    python examples/train_minimal.py README.md
    python examples/train_minimal.py book.txt --variant lmm --preset laptop --steps 2000 --length 256

The text is read as bytes. The last tenth is held out: the model never trains on it. Where there is a GPU, the
model trains on it in bfloat16.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from titans_core import LanguageModel, Sampling
from titans_core.presets import SIZES, preset

VOCAB = 256
"""A token is a byte."""


def read_arguments() -> argparse.Namespace:
    """Parse the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a Titans model on a text file.")
    parser.add_argument("text", type=Path, help="a text file, the longer the better")
    parser.add_argument("--variant", default="mac", help="mac, mag, mal, lmm, transformer, or a baseline")
    parser.add_argument("--preset", default="laptop", choices=SIZES, help="the size of the model")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--prompt", help="start of the sample; by default the held-out text's")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_bytes(path: Path, length: int) -> tuple[Tensor, Tensor]:
    """Training and held-out tokens [N] of a file."""
    try:
        tokens = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from None
    if len(tokens) < 20 * (length + 1):
        raise SystemExit(f"{path}: {len(tokens)} bytes are too few for --length {length}; give a longer text")
    return tokens.tensor_split([len(tokens) * 9 // 10])


def sample_batch(tokens: Tensor, rows: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets [rows, length] from random places of the text."""
    starts = torch.randint(len(tokens) - length, (rows,))
    batch = torch.stack([tokens[start : start + length + 1] for start in starts]).to(device)
    return batch[:, :-1], batch[:, 1:]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warmup over a twentieth of the steps, then a cosine to a tenth of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def held_out_loss(model: LanguageModel, tokens: Tensor, length: int, device: torch.device) -> float:
    """Mean loss in nats per byte over the start of the held-out text, in sequences of `length`."""
    rows = min(64, (len(tokens) - 1) // length)
    inputs = tokens[: rows * length].view(rows, length).to(device)
    targets = tokens[1 : rows * length + 1].view(rows, length).to(device)
    losses = model(inputs, targets_BT=targets).losses
    return losses.mean().item()


def train(model: LanguageModel, tokens: Tensor, held_out: Tensor, args: argparse.Namespace) -> None:
    """AdamW with a warmup, a cosine and clipped gradients; prints the loss and the rate."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), lr=args.lr, betas=(0.9, 0.95))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    every, last, running = max(1, args.steps // 10), time.perf_counter(), 0.0
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        inputs, targets = sample_batch(tokens, args.batch, args.length, device)
        with autocast:
            loss = model(inputs, targets_BT=targets).losses.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running += loss.item()
        if (step + 1) % every == 0:
            now = time.perf_counter()
            rate = every * args.batch * args.length / (now - last)
            held = held_out_loss(model, held_out, args.length, device)
            print(
                f"step {step + 1:5d}/{args.steps}  loss {running / every:.3f}  held-out {held:.3f}  "
                f"lr {optimizer.param_groups[0]['lr']:.1e}  {rate:,.0f} tokens/s",
                flush=True,
            )
            last, running = time.perf_counter(), 0.0


def write(model: LanguageModel, prompt: bytes, tokens: int, seed: int) -> str:
    """Generate text after a prompt."""
    sampling = Sampling(temperature=0.8, top_k=40, seed=seed)
    (written,) = model.generate([list(prompt)], tokens, sampling=sampling)
    return bytes(written).decode("utf-8", errors="replace")


def main() -> None:
    """Train, then write."""
    args = read_arguments()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, held_out = load_bytes(args.text, args.length)
    model = LanguageModel(preset(args.preset, args.variant, vocab_size=VOCAB)).to(device)
    print(f"{args.variant} {args.preset}: {model.num_parameters():,} parameters on {device}")
    print(f"{args.text}: {len(tokens):,} bytes to train on, {len(held_out):,} held out")
    train(model, tokens, held_out, args)
    prompt = bytes(held_out[:64].tolist()) if not args.prompt else args.prompt.encode()
    print(f"\n{prompt.decode('utf-8', errors='replace')}|{write(model, prompt, args.tokens, args.seed)}")


if __name__ == "__main__":
    main()
