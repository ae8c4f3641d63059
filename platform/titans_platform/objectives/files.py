"""Files of objectives that read their own: opening one, keeping a copy, the stream of training items; series.

Shapes: N steps and C channels of a series.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import yaml
from numpy.typing import NDArray
from pyarrow import csv, json, parquet

from titans_platform.config import RunConfig
from titans_platform.data import NotPrepared
from titans_platform.data.stream import SourceOrder
from titans_platform.errors import UsageError, one_line
from titans_platform.files import COMPRESSED, OPENERS, write_bytes

R = TypeVar("R")


def read_opened(path: Path, read: Callable[[Any], R], field: str) -> R:
    """``read`` of a file, decompressed as its suffix says. Raises UsageError that names ``field``."""
    try:
        with OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
            return read(file)
    except Exception as error:  # decompression and pyarrow have no common base
        raise UsageError(f"{field}: {path} cannot be read: {one_line(error)}") from None


def _read_npy(file: Any) -> pa.Table:
    values = np.atleast_1d(np.load(file, allow_pickle=False))
    values_NC = values.astype(np.float64).reshape(len(values), -1)
    return pa.table({str(i): column for i, column in enumerate(values_NC.T)})


def _read_csv(file: Any, texts: Sequence[str]) -> pa.Table:
    types = dict.fromkeys(texts, pa.string())  # a label such as 01 is no number
    return csv.read_csv(file, convert_options=csv.ConvertOptions(column_types=types))


READERS: dict[str, Callable[[Any, Sequence[str]], pa.Table]] = {
    ".csv": _read_csv,
    ".jsonl": lambda file, _: json.read_json(file),
    ".parquet": lambda file, _: parquet.read_table(io.BytesIO(file.read())),
    ".npy": lambda file, _: _read_npy(file),
}
"""Readers by suffix: of an open file and the columns that are text whatever they look like."""


def read_table(name: str, field: str, texts: Sequence[str] = ()) -> pa.Table:
    """Read the columns of a file of a type in READERS, optionally compressed, those in ``texts`` as text.

    Raises UsageError with ``field``.
    """
    path = Path(name.lower())
    suffix = path.with_suffix("").suffix if path.suffix in OPENERS else path.suffix
    if suffix not in READERS:
        raise UsageError(f"{field}: {name}: unsupported file type; use {', '.join(READERS)}, {COMPRESSED}")
    table = read_opened(Path(name).expanduser(), lambda file: READERS[suffix](file, texts), field)
    if twice := [column for column, n in Counter(table.column_names).items() if column and n > 1]:
        raise UsageError(f"{field}: {name} has the column {twice[0]} more than once; rename one")
    return table


class ItemStream:
    """The training batches of one worker: a function of the seed and the step, for any world size.

    Every item is drawn once per epoch, in a new order each epoch. ``make(step, indices)`` makes the batch of
    the items at ``indices``.
    """

    def __init__(
        self, items: int, cfg: RunConfig, rank: int, world_size: int,
        make: Callable[[int, NDArray[np.int64]], Any],
    ):  # fmt: skip
        self.batch_size, self.make = cfg.optim.global_batch_size, make
        self.share = slice(rank, None, world_size)
        self._order = SourceOrder(items, str(cfg.seed))

    def batch(self, step: int) -> Any:
        """Return this worker's items of the global batch of ``step`` (0-based)."""
        samples = np.arange(step * self.batch_size, (step + 1) * self.batch_size)[self.share]
        return self.make(step, self._order.at(samples))


def save_copy(table: pa.Table, path: Path) -> None:
    """Save a table as Parquet with checksums, also if the file exists, which repairs a damaged one."""
    out = pa.BufferOutputStream()
    parquet.write_table(table, out, write_page_checksum=True)
    write_bytes(path, out.getvalue().to_pybytes())


def load_copy(path: Path) -> pa.Table:
    """Load a table that `save_copy` wrote. Raises NotPrepared; UsageError if it is damaged."""
    if not path.is_file():
        raise NotPrepared("objective.options: the data are not prepared; run titans train on them first")
    try:
        return parquet.ParquetFile(path, page_checksum_verification=True).read()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: damaged: {one_line(error)}; run titans train again") from None


NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")


class SeriesTable(NamedTuple):
    """The values of a series and the names of its channels."""

    values_NC: NDArray[np.float64]
    channels: tuple[str, ...]


def save_series(table: SeriesTable, path: Path) -> None:
    """Save a copy of the series."""
    save_copy(pa.table([*table.values_NC.T], [*table.channels]), path)


def load_series(path: Path) -> SeriesTable:
    """Load the copy of a series. Raises NotPrepared; UsageError if it is damaged."""
    table = load_copy(path)
    values_NC = np.stack([column.to_numpy() for column in table.columns], 1)
    return SeriesTable(values_NC, tuple(table.column_names))


def content(table: SeriesTable) -> str:
    """Hash of a series."""
    shape = f"{table.values_NC.shape}{table.channels}".encode()
    return hashlib.sha256(shape + np.ascontiguousarray(table.values_NC).tobytes()).hexdigest()[:16]


def read_series(name: str, columns: Sequence[str], field: str) -> SeriesTable:
    """Read the named columns of a file, or all numeric ones; a .npy file's ([N] or [N, C]) are numbered.

    Raises UsageError that names ``field`` if the file cannot be read, or a value is missing.
    """
    table, where = read_table(name, field), f"{field}: {name}"
    for column, kind in zip(table.column_names, table.schema.types, strict=True):
        # one word in a column of numbers makes the column text
        if str(kind).endswith("string") and (not columns or column in columns):
            cells = table[column].to_pylist()
            words = [row for row, cell in enumerate(cells) if not NUMBER.fullmatch(cell or "")]
            if 0 < len(words) < len(cells) / 2:
                cause = f"row {words[0]} of {column} is {cells[words[0]]!r}, and not a number"
                raise UsageError(f"{where}: {cause}; correct it, or choose objective.options.columns")
    numbers = [f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
    if missing := next((column for column in columns if column not in numbers), ""):
        raise UsageError(f"{where} has no numeric column {missing}; it has {', '.join(numbers)}")
    if not (chosen := tuple(columns or numbers)) or not len(table):
        raise UsageError(f"{where} has no numbers")
    try:
        values_NC = np.stack([table.column(key).cast(pa.float64()).to_numpy() for key in chosen], 1)
    except pa.ArrowInvalid as error:  # integers that float64 would round
        raise UsageError(f"{where} cannot be read: {one_line(error)}") from None
    if len(wrong := np.argwhere(~np.isfinite(values_NC))):
        step, channel = wrong[0]
        raise UsageError(f"{where} has no finite number in row {step} of {chosen[channel]}")
    return SeriesTable(values_NC, chosen)


def sines(steps: int, channels: int, seed: int) -> SeriesTable:
    """Generate noisy sums of three sines: a predictable series that needs no file."""
    generator, t = np.random.default_rng(seed), np.arange(steps)[:, None]
    values_NC = 0.1 * generator.standard_normal((steps, channels))
    for period in (8, 24, 36):
        values_NC += np.sin(2 * np.pi * t / period + generator.uniform(0, 2 * np.pi, channels))
    return SeriesTable(values_NC, tuple(map(str, range(channels))))


FOLDER = "objective.options.folder"


class Dataset(NamedTuple):
    """Specification of a benchmark's file."""

    file: str
    steps: int
    channels: int
    split: tuple[float, float, float]
    """Sizes of the training, validation and test split, in steps or as fractions."""
    source: str
    """Address at which its authors publish it."""
    sha256: str | None = None
    """Hash of the uncompressed file; None: unknown, only the shape is checked."""


DATASETS = {
    name: Dataset(**fields | {"split": tuple(fields["split"])})
    for name, fields in yaml.safe_load((Path(__file__).parent / "series.yaml").read_text("utf-8")).items()
}
"""Keyed by the names in the paper's Table 3."""


def read_dataset(name: str, folder: str | None, columns: Sequence[str] = ()) -> SeriesTable:
    """Read a benchmark's series from its file in ``folder``, optionally compressed.

    Raises UsageError if the file is missing or is not the standard one.
    """
    known = DATASETS[name]
    if folder is None:
        raise UsageError(f"{FOLDER}: dataset {name} needs the folder of {known.file}, from {known.source}")
    places = [Path(folder).expanduser() / f"{known.file}{suffix}" for suffix in ("", *OPENERS)]
    if (path := next((place for place in places if place.is_file()), None)) is None:
        raise UsageError(f"{FOLDER}: no {known.file} (or .gz, .xz) in {folder}; it is from {known.source}")
    if known.sha256:
        checksum = read_opened(path, lambda file: hashlib.file_digest(file, "sha256").hexdigest(), FOLDER)
        if checksum != known.sha256:
            cause = f"{path} is not the standard file: its sha256 is {checksum}, not {known.sha256}"
            fix = f"get it from {known.source}, or name it as objective.options.path"
            raise UsageError(f"{FOLDER}: {cause}; {fix}")
    table = read_series(str(path), columns, FOLDER)
    steps, channels = table.values_NC.shape
    if (steps, channels) != (known.steps, len(columns) or known.channels):
        size, right = f"{steps} steps of {channels} channels", f"{known.steps} of {known.channels}"
        raise UsageError(f"{FOLDER}: {path} has {size}, {name} has {right}; get it from {known.source}")
    return table
