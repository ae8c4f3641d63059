"""Faults planted by a program at seeded periods and residues, and the checks that see each.

python -m experiments.audit.mutations    # the table
"""

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titans_core.audit import Adapter, audit

D = 8
PERIODS = (3, 7, 20, 37, 40, 100)
"""Some of usual sizes, and some that share no factor with them."""
Held = tuple[Tensor, int]


class Ema(nn.Module):
    """h_t = a h_{t-1} + U x_t, y_t = x_t + W tanh(h_t); the state is h and the number of tokens read."""

    block = 48

    def __init__(self) -> None:
        super().__init__()
        self.u, self.w, self.a = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.randn(D) + 1)

    def inputs(self, x: Tensor, position: Tensor) -> Tensor:
        return x

    def writes(self, u: Tensor, position: Tensor) -> Tensor:
        return u

    def outputs(self, y: Tensor, position: Tensor) -> Tensor:
        return y

    def carried(self, h: Tensor, seen: int) -> Tensor:
        return h

    def returned(self, h: Tensor, seen: int, tokens: int) -> Any:
        return h, seen

    def start(self, x: Tensor) -> Held:
        return x.new_zeros(len(x), D), 0

    def forward(self, x: Tensor, state: Held | None = None) -> tuple[Tensor, Any]:
        h, seen = (self.start(x) if state is None else state)[:2]
        position = torch.arange(seen, seen + x.shape[1])
        x = self.inputs(x, position)
        u, a, outputs, at = self.writes(self.u(x), position), torch.sigmoid(self.a), [], 0
        while at < x.shape[1]:
            h, size = self.carried(h, seen + at), min(self.block - (seen + at) % self.block, x.shape[1] - at)
            t = torch.arange(size)
            power = (t[:, None] - t).clamp(min=0)[..., None]
            decay = torch.where((t[:, None] >= t)[..., None], a**power, 0)
            states = torch.einsum("tsd,bsd->btd", decay, u[:, at : at + size]) + h[:, None] * a ** (
                t[:, None] + 1
            )
            outputs.append(x[:, at : at + size] + self.w(torch.tanh(states)))
            h, at = states[:, -1], at + size
        return self.outputs(torch.cat(outputs, 1), position), self.returned(h, seen + at, x.shape[1])

    def packed(self, x: Tensor, borders: Tensor) -> Tensor:
        return torch.cat([self(document)[0] for document in x.split(borders.diff().tolist(), 1)], 1)

    def slow(self, x: Tensor) -> Tensor:
        return Ema.forward(Plain.of(self), x)[0]


class Plain(Ema):
    """Without the fault, with the parameters of a layer that has one."""

    @staticmethod
    def of(layer: Ema) -> "Plain":
        plain = Plain()
        plain.u, plain.w, plain.a = layer.u, layer.w, layer.a
        return plain


def adapt(layer: Ema) -> Adapter:
    return Adapter(
        layer, lambda x: layer(x)[0], width=D, step=layer, packed=layer.packed, reference=layer.slow,
        state_grows="constant",
    )  # fmt: skip


Make = Callable[[int, int], type[Ema]]
KINDS: dict[str, tuple[str, Make]] = {}
"""Of each kind of fault: the check that is meant to see it, and the layer of a period c and residue r."""


def kind(check: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        KINDS[make.__name__] = check, make
        return make

    return register


def following(x: Tensor, by: int = 1) -> Tensor:
    """x a few tokens ahead, 0 behind the end."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)[:, : x.shape[1]]


def at(position: Tensor, c: int, r: int) -> Tensor:
    return (position % c == r)[:, None]


# leaks


@kind("causal_gradient")
def chunk_end_sees_next(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def inputs(self, x: Tensor, position: Tensor) -> Tensor:
            return x + 0.1 * at(position, c, c - 1) * following(x)

    return Layer


@kind("causal_perturbation")
def detached_leak(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def inputs(self, x: Tensor, position: Tensor) -> Tensor:
            return x + 0.1 * at(position, c, r) * following(x).detach()

    return Layer


@kind("modes")
def leak_in_training(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def inputs(self, x: Tensor, position: Tensor) -> Tensor:
            return x + 0.1 * self.training * at(position, c, r) * following(x)

    return Layer


@kind("causal_gradient")
def sees_a_chunk_ahead(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def inputs(self, x: Tensor, position: Tensor) -> Tensor:
            return x + 0.1 * at(position, 2 * c, r) * following(x, min(c, x.shape[1]))

    return Layer


@kind("causal_gradient")
def mean_of_chunk(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def inputs(self, x: Tensor, position: Tensor) -> Tensor:
            means = [part.mean(1, keepdim=True).expand_as(part) for part in x.split(c, 1)]
            return x + 0.1 * torch.cat(means, 1)

    return Layer


@kind("rows")
def token_of_another_row(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def inputs(self, x: Tensor, position: Tensor) -> Tensor:
            return x + 0.1 * at(position, c, r) * x.flip(0)

    return Layer


# gradients


@kind("finite_differences")
def state_detached(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        block = c

        def carried(self, h: Tensor, seen: int) -> Tensor:
            return h.detach()

    return Layer


@kind("finite_differences")
def state_detached_in_training(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        block = c

        def carried(self, h: Tensor, seen: int) -> Tensor:
            return h.detach() if self.training else h

    return Layer


@kind("finite_differences")
def write_detached(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def writes(self, u: Tensor, position: Tensor) -> Tensor:
            return torch.where(at(position, c, r), u.detach(), u)

    return Layer


@kind("finite_differences")
def output_detached(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def outputs(self, y: Tensor, position: Tensor) -> Tensor:
            return torch.where(at(position, c, r), y.detach(), y)

    return Layer


@kind("reference")
def write_off_by_a_factor(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def writes(self, u: Tensor, position: Tensor) -> Tensor:
            return torch.where(at(position, c, r), 0.99 * u, u)

    return Layer


@kind("short_inputs")
def detached_at_a_length(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def writes(self, u: Tensor, position: Tensor) -> Tensor:
            return u.detach() if len(position) % c == r else u

    return Layer


# pieces, decoding, documents


@kind("pieces")
def remainder_dropped(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        block = c

        def returned(self, h: Tensor, seen: int, tokens: int) -> Any:
            return (h if seen % c == 0 else 0.9 * h), seen

    return Layer


@kind("pieces")
def state_wrong_at_a_cut(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def returned(self, h: Tensor, seen: int, tokens: int) -> Any:
            return (0.9 * h if seen % c == r else h), seen

    return Layer


@kind("pieces")
def positions_restart(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def inputs(self, x: Tensor, position: Tensor) -> Tensor:
            return x + 0.1 * torch.sin(6.28 * position / c)[:, None]

        def returned(self, h: Tensor, seen: int, tokens: int) -> Any:
            return h, 0

    return Layer


@kind("decoding")
def token_alone_reads_wrongly(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def outputs(self, y: Tensor, position: Tensor) -> Tensor:
            return 0.9 * y if len(position) == 1 and position[0] % c == r else y

    return Layer


@kind("decoding")
def token_alone_is_not_written(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def writes(self, u: Tensor, position: Tensor) -> Tensor:
            return 0 * u if len(position) == 1 and position[0] % c == r else u

    return Layer


@kind("state_kept")
def state_in_place(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def forward(self, x: Tensor, state: Held | None = None) -> tuple[Tensor, Any]:
            y, after = super().forward(x, state)
            if state is not None and state[1] % c == r:
                state[0].mul_(0.9)
            return y, after

    return Layer


@kind("packed")
def document_not_reset(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def packed(self, x: Tensor, borders: Tensor) -> Tensor:
            outputs, state = [], None
            for start, document in zip(borders.tolist(), x.split(borders.diff().tolist(), 1), strict=False):
                kept = None if state is None or start % c != r else (state[0], 0)
                y, state = self(document, kept)
                outputs.append(y)
            return torch.cat(outputs, 1)

    return Layer


@kind("packed")
def documents_of_a_length_cut(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def packed(self, x: Tensor, borders: Tensor) -> Tensor:
            documents = x.split(borders.diff().tolist(), 1)
            outputs = [
                self(d)[0] * (1 - 0.1 * (d.shape[1] % min(c, 20) == r % min(c, 20))) for d in documents
            ]
            return torch.cat(outputs, 1)

    return Layer


# lengths, batches, calls, precision, growth


@kind("short_inputs")
def wrong_at_a_length(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def outputs(self, y: Tensor, position: Tensor) -> Tensor:
            return y * (1 - 0.1 * (len(position) % c == r))

    return Layer


@kind("batch_size")
def wrong_at_a_number_of_rows(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def outputs(self, y: Tensor, position: Tensor) -> Tensor:
            return y * (1 - 0.1 * (len(y) in {(1, 4, 5, 6, 8, 16)[r % 6]}))

    return Layer


@kind("repeatable")
def long_call_leaves_a_trace(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        trace = 0.0

        def outputs(self, y: Tensor, position: Tensor) -> Tensor:
            y = y + self.trace
            self.trace += 0.01 * (len(position) > c)
            return y

    return Layer


@kind("modes")
def training_differs(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def writes(self, u: Tensor, position: Tensor) -> Tensor:
            return u * (1 - 0.1 * (self.training * at(position, c, r)))

    return Layer


@kind("state_growth")
def vector_kept_every_chunk(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
            kept = () if state is None else state[2]
            y, (h, seen) = super().forward(x, state)
            return y, (h, seen, (*kept, *(h.clone() for _ in range(seen // c - (seen - x.shape[1]) // c))))

    return Layer


@kind("float32")
def token_rounded(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def writes(self, u: Tensor, position: Tensor) -> Tensor:
            return torch.where(at(position, c, r), u.bfloat16().to(u.dtype), u)

    return Layer


@kind("long_inputs")
def grows_after_a_while(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def outputs(self, y: Tensor, position: Tensor) -> Tensor:
            return y * (1 + ((position - 144).clamp(min=0) / c) ** 3)[:, None]

    return Layer


@kind("parameters")
def parameter_of_a_late_token(c: int, r: int) -> type[Ema]:
    class Layer(Ema):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Parameter(torch.randn(D))

        def inputs(self, x: Tensor, position: Tensor) -> Tensor:
            return x + self.late * (position == 1000 + c)[:, None]

    return Layer


def mutants(seed: int = 0) -> dict[str, tuple[str, type[Ema]]]:
    """Make three faults of each kind, at seeded periods and residues: the check to catch it, the layer."""
    draw, faulty = random.Random(seed), {}
    for name, (check, make) in KINDS.items():
        for c in [*draw.sample(PERIODS, 2), draw.randint(3, 130)]:
            r = draw.randrange(c)
            faulty[f"{name}, period {c}, residue {r}"] = check, make(c, r)
    return faulty


if __name__ == "__main__":
    seen: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    places: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for title, (_, layer) in mutants().items():
        kind, period, residue = re.split(r", period |, residue ", title)
        report = audit(lambda layer=layer: adapt(layer()), width=D, skip=["impossible_retrieval"])
        seen[kind].update(result.check for result in report.of("fail"))
        places[kind].append(f"{period}:{residue}")
    print("| fault | period:residue | meant check | others |\n|:--|:--|:--|:--|")
    for kind, (meant, _) in KINDS.items():
        cells = [f"`{check}`" + f" ({n} of 3)" * (n < 3) for check, n in seen[kind].items() if check != meant]
        caught = f"`{meant}`" + f" ({seen[kind][meant]} of 3)" * (seen[kind][meant] < 3)
        print(f"| {kind} | {', '.join(places[kind])} | {caught} | {', '.join(cells) or '—'} |")
