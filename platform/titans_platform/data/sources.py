"""Text sources: the standard library's own code, local files, Hub datasets; each a stream of documents."""

from __future__ import annotations

import glob
import os
import platform
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from titans_platform.config import SourceConfig
from titans_platform.errors import UsageError, one_line

# not on every machine: distributions ship these apart, or leave them out of slim images
STDLIB_LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "idlelib", "ensurepip", "lib2to3", "distutils",
    "tkinter", "turtledemo", "venv", "lib-dynload",
}  # fmt: skip
KINDS = (".txt", ".py", ".jsonl", ".parquet")
COMPRESSED = (".gz", ".xz")


class Document(NamedTuple):
    """One document of a source."""

    text: str
    key: str
    """What decides whether it is kept for validation: equal keys go to the same side."""
    done: float | None
    """Share of the source read so far, where it is known."""
    share: float = 1.0
    """Share of what is left of ``max_tokens`` that it may take."""


class TextSource(ABC):
    """A stream of documents, the same at every reading of an unchanged source."""

    label: str
    """Its name in tables."""
    python: str | None = None
    """Version of the Python whose own text it is."""

    @abstractmethod
    def identity(self) -> Any:
        """JSON that changes when the source changes. Raises UsageError where it cannot be found."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """The documents in order. Raises UsageError naming what cannot be read."""


class StdlibSource(TextSource):
    """The Python standard library's source text, by file; a file is one document."""

    label = "stdlib"

    def __init__(self):
        self.folder = Path(sysconfig.get_paths()["stdlib"])
        self.python = platform.python_version()

    def files(self) -> list[str]:
        """Paths inside the library, with forward slashes, sorted."""
        found = (path.relative_to(self.folder) for path in self.folder.rglob("*.py"))
        return sorted(path.as_posix() for path in found if self._shared_by_all(path))

    @staticmethod
    def _shared_by_all(path: Path) -> bool:
        """Whether every full or slim install of this version, on any platform, has the file."""
        parts = path.parts
        if any(part in STDLIB_LEFT_OUT or part.startswith(("test", "config-")) for part in parts[:-1]):
            return False
        tests_or_local = ("test", "_sysconfigdata", "sitecustomize", "usercustomize", "turtle.py")
        return "idle_test" not in parts and not parts[-1].startswith(tests_or_local)

    def identity(self) -> Any:
        """Version, and name and size of every file."""
        return [self.python, [[name, (self.folder / name).stat().st_size] for name in self.files()]]

    def documents(self) -> Iterator[Document]:
        """The files in order; one that is not text in its declared encoding is left out."""
        files = self.files()
        for i, name in enumerate(files):
            try:
                with tokenize.open(self.folder / name) as file:
                    yield Document(file.read(), name, i / len(files))
            except (SyntaxError, UnicodeDecodeError):
                continue


class RecordSource(TextSource):
    """Records that ``datasets`` streams; ``field`` names the source in errors."""

    def __init__(self, source: SourceConfig, field: str, cache: Path, label: str):
        self.source, self.field, self.cache = source, field, cache
        self.label = f"{source.kind}:{label}"

    def texts(self, what: str, builder: str, text_field: str, **options: Any) -> Iterator[str]:
        """The ``text_field`` of every record; ``what`` names them in errors. Raises UsageError."""
        if "HF_HOME" not in os.environ:
            # dataset cards are fetched there, whatever cache_dir says; logins stay where they are
            os.environ.setdefault("HF_HUB_CACHE", str(self.cache / "hub"))
        import datasets

        options |= {"streaming": True, "cache_dir": str(self.cache)}
        where = f"{self.field}.text_field"
        try:
            with _quiet(datasets):
                for record in datasets.load_dataset(builder, **options):
                    if text_field not in record:
                        known = ", ".join(record)
                        raise UsageError(f"{where}: {what} has no field {text_field}; it has {known}")
                    if not isinstance(text := record[text_field] or "", str):
                        raise UsageError(f"{where}: {text_field} of {what} is not text")
                    yield text
        except UsageError:
            raise
        except Exception as error:  # decompression, Arrow, JSON, HTTP and its own have no common base
            raise UsageError(f"{self.field}: {what} cannot be read: {one_line(error, 160)}") from error


class FilesSource(RecordSource):
    """Local .txt and .py files (a file is one document), .jsonl and .parquet (a record is one)."""

    def __init__(self, source: SourceConfig, field: str, cache: Path):
        self.path = source.path or ""
        super().__init__(source, field, cache, Path(self.path).name)

    def files(self) -> list[Path]:
        """The files the path means, sorted. Raises UsageError where it means none."""
        kinds = f"{', '.join(KINDS)} (or with {' or '.join(COMPRESSED)})"
        expanded = os.path.abspath(os.path.expanduser(self.path))
        if os.path.isfile(expanded) and kind_of(Path(expanded)) is None:
            raise UsageError(f"{self.field}.path: {self.path} is none of {kinds}")
        # the name of what is there is no pattern
        pattern = glob.escape(expanded) if os.path.exists(expanded) else expanded
        found = glob.glob(os.path.join(pattern, "**") if os.path.isdir(expanded) else pattern, recursive=True)
        if not found:
            raise UsageError(f"{self.field}.path: no file, folder or match for {self.path}")
        files = sorted(Path(name) for name in found if os.path.isfile(name) and kind_of(Path(name)))
        if not files:
            raise UsageError(f"{self.field}.path: {self.path} has no file of the kinds {kinds}")
        return files

    def identity(self) -> Any:
        """Name, size and time of every file: an edited file is read again."""
        files = self.files()
        found: list[Any] = [[str(file), (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]
        one_document = len(files) == 1 and kind_of(files[0]) in (".txt", ".py")
        # what was prepared when one document could not be split is prepared again
        return [*found, "split by position"] if one_document and self.source.validation_fraction else found

    def documents(self) -> Iterator[Document]:
        files = self.files()
        sizes = [path.stat().st_size for path in files]
        for i, path in enumerate(files):
            # within a file nothing says how far the reader is
            done = sum(sizes[:i]) / max(1, sum(sizes)) if len(files) > 1 else None
            builder = {".jsonl": "json", ".parquet": "parquet"}.get(kind_of(path) or "", "text")
            text_field = "text" if builder == "text" else self.source.text_field
            whole = {"sample_by": "document"} if builder == "text" else {}
            # the library takes the name for a pattern
            options = {"data_files": [glob.escape(str(path))], "split": "train"} | whole
            for text in self.texts(str(path), builder, text_field, **options):
                # keyed by text, so that a document met twice is never on both sides
                yield Document(text, text, done)


class HubSource(RecordSource):
    """A dataset of the Hugging Face Hub, streamed once; a record is one document."""

    def __init__(self, source: SourceConfig, field: str, cache: Path):
        self.dataset = source.dataset or ""
        super().__init__(source, field, cache, self.dataset + (f"/{source.subset}" if source.subset else ""))

    def identity(self) -> Any:
        """Its name is in the config already; what is prepared stays until its folder is deleted."""
        return None

    def documents(self) -> Iterator[Document]:
        options = {"name": self.source.subset, "split": self.source.split}
        for text in self.texts(self.dataset, self.dataset, self.source.text_field, **options):
            yield Document(text, text, None)


def open_source(source: SourceConfig, field: str, cache: Path) -> TextSource:
    """The text source a config describes; ``field`` names it in errors, ``cache`` is the library's folder."""
    if source.kind == "stdlib":
        return StdlibSource()
    return (FilesSource if source.kind == "files" else HubSource)(source, field, cache)


def kind_of(path: Path) -> str | None:
    """One of KINDS, seen through a compression suffix; None for another."""
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix
    return suffix if suffix in KINDS else None


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """The library without bars, without logs of what it then raises, and without a request for each local
    file to a server that counts downloads, which takes seconds where there is no network.
    """
    bars, level = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    counts = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()
