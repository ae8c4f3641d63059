"""Files of text: the kinds, how each is read, and those below a folder."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from titans_platform.files import OPENERS

ROWS = 256
"""Rows of a Parquet file that are read at once."""


def _read_text(file: Any, field: str) -> Iterator[str]:
    yield file.read().decode("utf-8")


def _read_lines(file: Any, field: str) -> Iterator[Any]:
    for line in filter(bytes.strip, file):
        try:
            # an integer of any length
            yield json.loads(line, parse_int=float)
        except RecursionError:
            # nested more deeply than Python's parser goes
            schema = pa.schema({field: pa.string()})
            only = pyarrow.json.ParseOptions(schema, unexpected_field_behavior="ignore")
            yield from pyarrow.json.read_json(io.BytesIO(line), parse_options=only).to_pylist()


def _read_json(file: Any, field: str) -> Iterator[Any]:
    """Yield the values of a JSON file, and the items of arrays among them."""
    text, at, blank = file.read().decode("utf-8-sig"), 0, re.compile(r"\s*")
    while (at := blank.match(text, at).end()) < len(text):  # pyright: ignore[reportOptionalMemberAccess]
        value, at = json.JSONDecoder(parse_int=float).raw_decode(text, at)
        yield from value if isinstance(value, list) else [value]


def _read_parquet(file: Any, field: str) -> Iterator[Any]:
    parquet = pq.ParquetFile(file if file.seekable() else io.BytesIO(file.read()))
    if parquet.metadata.num_rows:
        yield from _column(parquet.schema_arrow.names, field, parquet.iter_batches(ROWS, columns=[field]))


def _read_arrow(file: Any, field: str) -> Iterator[Any]:
    content = pa.py_buffer(file.read())
    try:
        opened = pa.ipc.open_file(content)
        batches = map(opened.get_batch, range(opened.num_record_batches))
    except pa.ArrowInvalid:
        batches = opened = pa.ipc.open_stream(content)
    yield from _column(opened.schema.names, field, batches)


def _column(names: list[str], field: str, batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    """Yield a column of text as records; of a file without it, one record with the names of its columns."""
    if field not in names:
        yield dict.fromkeys(names)
        return
    for batch in batches:
        same = map(batch.column, batch.schema.get_all_field_indices(field))
        chosen = max(same, key=lambda column: "string" in str(column.type))
        yield from ({field: value} for value in chosen.to_pylist())


READERS: dict[str, Callable[[Any, str], Iterator[Any]]] = {
    ".txt": _read_text, ".py": _read_text, ".jsonl": _read_lines, ".ndjson": _read_lines, ".json": _read_json,
    ".parquet": _read_parquet, ".arrow": _read_arrow,
}  # fmt: skip
"""Readers of an open file, by suffix, for the field that holds the text."""


def walk(folder: str) -> Iterator[str]:
    """Yield the names below a folder that are no folders, but for hidden ones and storage roots; links are
    followed, to each folder once and never to one around it. Raises OSError if a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    top, seen = os.path.realpath(folder), set()
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        store = os.path.isdir(os.path.join(real, "data", "index"))
        if real in seen or (real != top and (store or os.path.commonpath([top, real]) == real)):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield from (os.path.join(place, name) for name in names if name[0] != ".")


def kind_of(path: Path) -> str | None:
    """Return one of READERS, seen through a compression suffix; None for another."""
    suffix = (Path(path.stem) if path.suffix.lower() in OPENERS else path).suffix.lower()
    return suffix if suffix in READERS else None
