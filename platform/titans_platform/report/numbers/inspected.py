"""Trace of a model's memories over a text, token by token, and its export as an Arrow table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from titans_core import LanguageModel, MemoryTrace, Nearest, watch
from titans_platform.data import Tokenizer
from titans_platform.data.tokenizer import TextStream
from titans_platform.errors import UsageError
from titans_platform.files import write_bytes

FORMAT = "1"
"""Version of the Arrow file's schema, in its metadata."""
NEAREST = 5
"""Nearest written keys that are kept for each read."""

_READ = pa.list_(pa.struct([("position", pa.int32()), ("similarity", pa.float32()), ("share", pa.float32())]))
SCHEMA = pa.schema(
    [
        # a row is one token in one head of one memory
        ("position", pa.int32()),
        ("token", pa.int32()),
        ("text", pa.string()),
        ("loss", pa.float32()),
        ("memory", pa.int16()),
        ("head", pa.int16()),
        *((name, pa.float32()) for name in ("surprise", "written", "final", "alpha", "eta", "theta")),
        *((name, pa.float32()) for name in ("weight_norm", "momentum_norm", "coefficient")),
        ("read", _READ),
        ("context", _READ),
    ]
)
MEASURED = SCHEMA.names[6:15]


@dataclass(frozen=True)
class Inspected:
    """A text, its losses, and the trace of each memory."""

    title: str
    variant: str
    tokens: list[int]
    """Document start included."""
    texts: list[str]
    """Text of each token; of a character of several tokens the last has it, the others are empty."""
    loss: Tensor
    """Nats of each token given those before it, [T]; NaN for the first."""
    traces: list[MemoryTrace]
    left_out: int = 0
    """Tokens of the text that were not read."""

    def largest(self) -> dict[str, float]:
        """The largest weight norm and surprise of a token, as `titans_core.telemetry` has them."""
        norms = [trace.weight_norm.nan_to_num(0).square().sum(-1).sqrt() for trace in self.traces]
        surprises = [trace.surprise for trace in self.traces]
        return {
            name: max(float(values.max()) for values in found)
            for name, found in (("weight_norm", norms), ("surprise", surprises))
        }


def inspect_text(
    model: LanguageModel, tokenizer: Tokenizer, text: str, title: str, max_tokens: int, nearest: int = NEAREST
) -> Inspected:
    """Read the first ``max_tokens`` tokens of ``text`` and record what each memory does.

    Raises:
        UsageError: the text is empty, or the model has no neural memory.
    """
    ids = tokenizer.encode(text)
    if not ids:
        raise UsageError("--text: the file is empty; give one with something to read")
    tokens = [tokenizer.bos, *ids[: max_tokens - 1]]
    row = torch.tensor([tokens], device=next(model.parameters()).device)
    with watch(model) as seen, torch.no_grad():
        logits = model(row).logits[0]
    traces = seen.traces(nearest)
    if not traces:
        variant = f"variant {model.config.variant} has no neural memory"
        raise UsageError(f"{title}: {variant}; inspect a run of lmm, mac, mag or mal")
    loss = F.cross_entropy(logits[:-1].float(), row[0, 1:], reduction="none").cpu()
    loss = torch.cat([loss.new_full((1,), float("nan")), loss])
    left = 1 + len(ids) - len(tokens)
    return Inspected(title, model.config.variant, tokens, token_texts(tokenizer, tokens), loss, traces, left)


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Text that each token adds; of a character of several tokens the last has it, the others ''."""
    stream = TextStream(tokenizer)
    texts = [stream.add(token) for token in tokens]
    return [*texts[:-1], texts[-1] + stream.end()]


def arrow_table(found: Inspected) -> pa.Table:
    """A row for each memory, token and head, in this order; unknown numbers are null."""
    parts = [_memory_table(found, i, trace) for i, trace in enumerate(found.traces)]
    metadata = {
        "titans.format": FORMAT,
        "titans.run": found.title,
        "titans.variant": found.variant,
        "titans.memories": ",".join(trace.name for trace in found.traces),
    }
    return pa.concat_tables(parts).replace_schema_metadata(metadata)


def write_arrow(found: Inspected, path: Path) -> None:
    """The table as an Arrow IPC file, which `pyarrow.feather.read_table` and pandas read."""
    sink, table = pa.BufferOutputStream(), arrow_table(found)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_bytes(path, sink.getvalue().to_pybytes())


def _memory_table(found: Inspected, memory: int, trace: MemoryTrace) -> pa.Table:
    T, H = trace.surprise.shape
    each = lambda values: np.repeat(np.asarray(values), H)  # noqa: E731
    columns = {
        "position": each(range(T)),
        "token": each(found.tokens),
        "text": each(found.texts),
        "loss": _nullable(each(found.loss)),
        "memory": np.full(T * H, memory),
        "head": np.tile(np.arange(H), T),
        **{name: _nullable(getattr(trace, name).flatten().numpy()) for name in MEASURED},
        "read": _reads(trace.own),
        "context": pa.nulls(T * H, _READ) if trace.context is None else _reads(trace.context),
    }
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _nullable(values: NDArray[np.floating]) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))


def _reads(near: Nearest) -> pa.Array:
    """A list for each token and head of the keys that were there."""
    position, similarity, share = (x.flatten(0, 1).numpy() for x in near)
    there = position >= 0
    numbers = [pa.array(position[there]).cast(pa.int32())]
    numbers += [_nullable(x[there]).cast(pa.float32()) for x in (similarity, share)]
    offsets = pa.array(np.concatenate([[0], there.sum(-1).cumsum()]), pa.int32())
    return pa.ListArray.from_arrays(
        offsets, pa.StructArray.from_arrays(numbers, fields=list(_READ.value_type))
    )
