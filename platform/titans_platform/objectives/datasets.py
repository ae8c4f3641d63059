"""The long-term forecasting benchmarks by name: file, shape, split and checksum of each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from titans_platform.errors import UsageError, one_line
from titans_platform.objectives.files import OPENERS
from titans_platform.objectives.series import Table, read_series

FOLDER = "objective.options.folder"
ETT = "https://github.com/zhouhaoyi/ETDataset, folder ETT-small"
OTHERS = "the datasets that the README of https://github.com/thuml/Time-Series-Library links to"


class Dataset(NamedTuple):
    """Specification of a benchmark's file."""

    file: str
    steps: int
    channels: int
    split: tuple[float, float, float]
    """Sizes of the training, validation and test split, in steps or as fractions."""
    source: str
    """Where its authors publish it."""
    sha256: str | None = None
    """Hash of the uncompressed file; None: unknown, only the shape is checked."""


# 12, 4 and 4 months of 30 days; by convention the rest is unused
HOURS = (12 * 30 * 24, 4 * 30 * 24, 4 * 30 * 24)
QUARTERS = (4 * HOURS[0], 4 * HOURS[1], 4 * HOURS[2])
SHARES = (0.7, 0.1, 0.2)
DATASETS = {
    "ETTh1": Dataset(
        "ETTh1.csv", 17_420, 7, HOURS, ETT, "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066"
    ),
    "ETTh2": Dataset("ETTh2.csv", 17_420, 7, HOURS, ETT),
    "ETTm1": Dataset(
        "ETTm1.csv",
        69_680,
        7,
        QUARTERS,
        ETT,
        "6ce1759b1a18e3328421d5d75fadcb316c449fcd7cec32820c8dafda71986c9e",
    ),
    "ETTm2": Dataset("ETTm2.csv", 69_680, 7, QUARTERS, ETT),
    "Weather": Dataset(
        "weather.csv",
        52_696,
        21,
        SHARES,
        OTHERS,
        "34ee981d07313e51da2a50bb600072c8ae4a69cb4b0651f4cb93a069d7a2ba63",
    ),
    "ECL": Dataset("electricity.csv", 26_304, 321, SHARES, OTHERS),
    "Traffic": Dataset("traffic.csv", 17_544, 862, SHARES, OTHERS),
}
"""Keyed by the names in the paper's Table 3."""


def read_dataset(name: str, folder: str | None, columns: Sequence[str] = ()) -> Table:
    """Read a benchmark's series from its file in ``folder``, optionally compressed as .gz or .xz.

    Raises UsageError if the file is missing or is not the standard one.
    """
    known = DATASETS[name]
    if folder is None:
        raise UsageError(f"{FOLDER}: dataset {name} needs the folder of {known.file}, from {known.source}")
    places = [Path(folder).expanduser() / f"{known.file}{suffix}" for suffix in ("", *OPENERS)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise UsageError(f"{FOLDER}: no {known.file} (or .gz, .xz) in {folder}; it is from {known.source}")
    if known.sha256 and (found := _sha256(path)) != known.sha256:
        raise UsageError(
            f"{FOLDER}: {path} is not the standard file: its sha256 is {found}, not {known.sha256}; get it "
            f"from {known.source}, or name it as objective.options.path"
        )
    table = read_series(str(path), columns, FOLDER)
    steps, channels = table.values_NC.shape
    if (steps, channels) != (known.steps, len(columns) or known.channels):
        raise UsageError(
            f"{FOLDER}: {path} has {steps} steps of {channels} channels, {name} has {known.steps} of "
            f"{known.channels}; get it from {known.source}"
        )
    return table


def _sha256(path: Path) -> str:
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, EOFError, ValueError) as error:
        raise UsageError(f"{FOLDER}: {path} cannot be read: {one_line(error)}") from None
