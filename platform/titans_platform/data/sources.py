"""Text sources, each a stream of documents: the shipped corpus, files of several kinds, the Hub."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import logging
import lzma
import os
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from titans_kernels import Registry
from titans_platform.config import SourceConfig
from titans_platform.errors import UsageError, one_line
from titans_platform.files import COMPRESSED, OPENERS, hash_of, opened, read_json, write_json
from titans_platform.text import plain

log = logging.getLogger(__name__)

CORPUS = Path(__file__).parent / "corpus" / "corpus.jsonl.xz"
CORPUS_SHA256 = "b9f54f9ef265a5799d324573853f64d232adbe24263e98a088573cb2e4142ea2"
"""Hash of the uncompressed file, which tools/build_corpus.py builds."""

PART_BYTES = 256 * 2**20
"""Compressed size of a part; a source of less than two parts is not split."""
PART_TOKENS = 2**27
"""A source with a smaller ``max_tokens`` is not split."""
PART_DOCUMENTS = 256
"""A source of fewer documents is not split: its validation fraction is exact."""
HUB_BYTES = 2**30
"""A smaller Hub dataset is not split."""
MANY_FILES = 8
"""A Hub dataset of unknown size is split if it has at least this many files."""
QUIET = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "DATASETS_VERBOSITY": "critical"}
QUIET |= {"HF_UPDATE_DOWNLOAD_COUNTS": "0"}
"""Settings that `datasets` reads when it is imported: no bars, no log of errors that it also raises, and no
request per local file to its download counter, which takes seconds when offline."""
WITHOUT_TEXT = 1000
"""Records without the text field, from the first on, after which a source is refused."""
ROWS = 256
"""Rows of a Parquet file that are read at once."""


def _read_text(file: Any, field: str) -> Iterator[str]:
    yield file.read().decode("utf-8")


def _read_lines(file: Any, field: str) -> Iterator[Any]:
    for number, line in filter(lambda numbered: numbered[1].strip(), enumerate(file, 1)):
        try:
            # an integer of any length
            yield json.loads(line, parse_int=float)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from None
        except RecursionError:
            # an unused field is nested more deeply than Python's parser goes
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


Part = Sequence[int]
"""First file and the one after the last; of a Hub dataset, shard index and number of shards."""


class SourcePlan(NamedTuple):
    """Division of a source into parts."""

    parts: Sequence[Part] = ()
    """The argument of `TextSource.documents` for each part; empty: the source is not split."""
    revision: str | None = None
    """The commit of a Hub dataset; all parts are of one."""


WHOLE = SourcePlan()


class Document(NamedTuple):
    """One document of a source."""

    text: str
    key: str
    """Decides whether the document is held out: equal keys go to the same split."""
    done: float | None
    """Fraction of the source read so far, if known."""
    share: float = 1.0
    """Fraction of the remaining ``max_tokens`` that it may take."""


class TextSource(ABC):
    """A stream of documents, the same at every reading of an unchanged source."""

    @abstractmethod
    def __init__(self, source: SourceConfig, field: str, cache: Path):
        """``field`` names the source in errors, ``cache`` is a folder for the `datasets` library."""

    label: str
    """Its name in tables."""
    skipped: str = ""
    """The files at its path that `identity` passed over, in words."""

    @abstractmethod
    def identity(self) -> Any:
        """JSON that changes when the source changes. Raises UsageError if the source is not found."""

    def plan(self) -> SourcePlan:
        """Split the source for several processes; depends only on the source."""
        return WHOLE

    @abstractmethod
    def documents(self, part: Part | None = None, revision: str | None = None) -> Iterator[Document]:
        """Yield the documents in order, of a part or of all. Raises UsageError naming what cannot be read."""


class CorpusSource(TextSource):
    """The prose and code that the platform ships (`corpus/LICENCES.txt`), the same on every machine."""

    def __init__(self, source: SourceConfig, field: str, cache: Path):
        self.subset = source.subset
        self.label = f"corpus:{self.subset}" if self.subset else "corpus"

    def identity(self) -> Any:
        """Return the corpus's checksum."""
        return CORPUS_SHA256

    def documents(self, part: Part | None = None, revision: str | None = None) -> Iterator[Document]:
        """Chapters and source files, mixed. Raises UsageError if the file is corrupt."""
        try:
            lines = lzma.decompress(CORPUS.read_bytes())
        except (OSError, lzma.LZMAError) as error:
            raise UsageError(f"{CORPUS}: cannot be read ({error}); install titans-lab again") from error
        if hashlib.sha256(lines).hexdigest() != CORPUS_SHA256:
            raise UsageError(f"{CORPUS}: its checksum differs from {CORPUS_SHA256}; install titans-lab again")
        records = lines.splitlines()
        for i, record in enumerate(map(json.loads, records)):
            if record["id"].startswith(self.subset or ""):
                yield Document(record["text"], record["id"], i / len(records))


class RecordSource(TextSource):
    """Files and datasets; ``field`` names the source in errors."""

    def __init__(self, source: SourceConfig, field: str, cache: Path, label: str):
        self.source, self.field, self.cache = source, field, cache
        self.label = f"{source.kind}:{label}"

    def contents(self, files: Iterable[File]) -> list[list[str]]:
        """Return name and hash of each file; hashes are kept, so that only changed files are read again."""
        known = read_json(kept := self.cache / "hashes.json") or {}
        hashes, stamped = [], {}
        for file in files:
            with self._readable(file.name):
                value = known.get(key := f"{file.name} {file.bytes} {file.stamp}") or file.hash()
            hashes.append([file.name, value])
            stamped |= {key: value} if file.stamp else {}
        if stamped.keys() - known.keys():
            write_json(kept, known | stamped)
        return hashes

    def read(self, file: File, done: float | None = None) -> Iterator[Document]:
        """Yield the documents of a file; ``done`` is the share of the source before it. Raises UsageError."""
        with self._readable(name := file.name):
            # of some formats and compressions an empty file is no file
            if file.bytes or "://" in name:
                with opened(name) as stream:
                    records = READERS[kind_of(Path(name)) or ""](stream, self.source.text_field)
                    # keyed by text, so that duplicates go to the same split
                    yield from (Document(text, text, done) for text in self.texts(name, records))

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        """Raise every error as a UsageError that names the field and what cannot be read."""
        try:
            yield
        except UsageError:
            raise
        except Exception as error:  # decompression, Arrow, JSON, HTTP and file systems have no common base
            raise UsageError(f"{self.field}: {name} cannot be read: {one_line(error, 160)}") from error

    def texts(self, name: str, records: Iterable[Any]) -> Iterator[str]:
        """Yield the ``text_field`` of every record. Raises UsageError."""
        key, field, names, number, lacking = self.source.text_field, f"{self.field}.text_field", (), 0, 0
        for number, record in enumerate(records, 1):
            text, names = (record.get(key), record.keys()) if isinstance(record, dict) else (record, {key})
            lacking += key not in names
            if lacking == number == WITHOUT_TEXT:
                break
            text = text.decode("utf-8") if isinstance(text, bytes) else text
            if text is not None and not isinstance(text, str):
                raise UsageError(f"{field}: {key} of {name} is not text")
            yield plain(text or "")
        if lacking and lacking == number:
            raise UsageError(f"{field}: {name} has no field {key}; it has {', '.join(names)}")
        if lacking:
            log.warning("%s: %s: skipped %d of %d records without %s", field, name, lacking, number, key)


class File(NamedTuple):
    """A file of a source, here or in a bucket."""

    name: str
    """A local path, or an fsspec URL."""
    bytes: int
    stamp: str = ""
    """Changes when the inode changes, which an edit cannot avoid; empty: unknown, or too young to tell."""
    content: str = ""
    """Hash of the content, if the file system has one."""

    def hash(self) -> str:
        """Return the hash of the content. Raises OSError, and what the file system of a URL raises."""
        if self.content or "://" not in self.name:
            return self.content or hash_of(Path(self.name))
        import fsspec

        with fsspec.open(self.name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]  # type: ignore[arg-type]


class FilesSource(RecordSource):
    """Files of the types in READERS: a file is one document, or each of its records is."""

    def __init__(self, source: SourceConfig, field: str, cache: Path):
        self.path = source.path or ""
        super().__init__(source, field, cache, Path(self.path).name)

    def files(self) -> list[File]:
        """List the files at the path, sorted. Raises UsageError if there are none."""
        supported = f"{', '.join(READERS)}, {COMPRESSED}"
        all_files, one, odd = self._remote() if "://" in self.path else self._local()
        others = Counter(Path(file.name).suffix for file in all_files if not kind_of(Path(file.name)))
        # broken links, pipes and sockets
        others += Counter({"that cannot be opened": odd})
        if others:
            named = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in others.most_common())
            self.skipped = f"{self.path}: skipped {others.total()} of {len(all_files) + odd} files: {named}"
        if one and kind_of(Path(self.path)) is None:
            raise UsageError(f"{self.field}.path: {self.path}: unsupported file type; use {supported}")
        if not all_files and not os.path.isdir(os.path.expanduser(self.path)):
            raise UsageError(f"{self.field}.path: no file, folder or match for {self.path}")
        if not (files := sorted((f for f in all_files if kind_of(Path(f.name))), key=lambda f: Path(f.name))):
            raise UsageError(f"{self.field}.path: {self.path}: no file of a supported type; use {supported}")
        return files

    def text_bytes(self) -> int | None:
        """Bytes of text, an upper bound on the tokens; None if files are compressed or a size is unknown."""
        files, packed = self.files(), (*OPENERS, ".parquet", ".arrow")
        if any(Path(f.name).suffix.lower() in packed or ("://" in f.name and not f.bytes) for f in files):
            return None
        return sum(file.bytes for file in files)

    def _local(self) -> tuple[list[File], bool, int]:
        """List the files at a local path; also return True if the path itself is a file, and the number of
        names that are neither files nor folders. Raises UsageError.
        """
        path = os.path.abspath(os.path.expanduser(self.path))
        # an existing path is not a pattern
        if os.path.isfile(path):
            return [local_file(path)], True, 0
        with self._readable(self.path):
            if os.path.isdir(path):
                names = [*walk(path)]
            elif "**" in Path(path).parts:
                import fsspec.utils

                base = re.split(r"[*?[]", path)[0].rpartition("/")[0]
                names = [*filter(re.compile(fsspec.utils.glob_translate(path)).match, walk(base or "/"))]
            else:
                names = [name for name in glob.glob(path) if not os.path.isdir(name)]
        files = sorted(filter(os.path.isfile, names), key=Path, reverse=True)
        # each file once, whatever links to it
        unique = {os.path.realpath(name): name for name in files}
        return [local_file(name) for name in unique.values()], False, len(names) - len(files)

    def _remote(self) -> tuple[list[File], bool, int]:
        """List the files at a URL; also return True if the URL itself is a file, and 0. Raises UsageError."""
        import fsspec

        try:
            system, path = fsspec.core.url_to_fs(self.path)
            pattern = glob.has_magic(path) and not system.exists(path)
            one = not pattern and system.isfile(path)
            list_of = system.glob if pattern else system.find
            # what lists a folder would take the links in a page for its files
            listed: Any = {path: system.info(path)} if one else list_of(path, detail=True)
        except ImportError as error:
            raise UsageError(f"{self.field}.path: {one_line(error, 160)}; pip install it") from None
        except Exception as error:  # file systems have no common exception
            cause = one_line(error, 160)
            raise UsageError(f"{self.field}.path: {self.path} cannot be listed: {cause}") from error
        files = []
        for name, info in listed.items():
            if info["type"] == "file":
                content = str(next((info[key] for key in ("ETag", "etag", "md5Hash") if info.get(key)), ""))
                files.append(File(system.unstrip_protocol(name), info["size"] or 0, content=content))
        return files, one, 0

    def identity(self) -> Any:
        """Name and content of every file."""
        return self.contents(self.files())

    def plan(self) -> SourcePlan:
        """Consecutive files of at least PART_BYTES in all."""
        files, limit = self.files(), self.source.max_tokens
        few = len(files) < PART_DOCUMENTS and all(kind_of(Path(f.name)) in (".txt", ".py") for f in files)
        if few or sum(file.bytes for file in files) < 2 * PART_BYTES or (limit or PART_TOKENS) < PART_TOKENS:
            return WHOLE
        parts, first, size = [], 0, 0
        for end, file in enumerate(files, start=1):
            size += file.bytes
            if size >= PART_BYTES or end == len(files):
                parts.append([first, end])
                first, size = end, 0
        return SourcePlan(parts) if len(parts) > 1 else WHOLE

    def documents(self, part: Part | None = None, revision: str | None = None) -> Iterator[Document]:
        files = self.files()
        sizes = [file.bytes for file in files]
        first, last = part or (0, len(files))
        for i, file in list(enumerate(files))[first:last]:
            # the position within a file is unknown
            done = sum(sizes[:i]) / max(1, sum(sizes)) if len(files) > 1 else None
            try:
                yield from self.read(file, done)
            except UsageError as error:
                # settings and descriptions of datasets are .json files too
                if kind_of(Path(file.name)) != ".json" or len(files) == 1 or "text_field" not in str(error):
                    raise
                log.warning("%s; skipped", error)


class HubSource(RecordSource):
    """A dataset of the Hugging Face Hub, streamed once; a record is one document."""

    def __init__(self, source: SourceConfig, field: str, cache: Path):
        self.dataset = source.dataset or ""
        super().__init__(source, field, cache, self.dataset + (f"/{source.subset}" if source.subset else ""))

    def identity(self) -> Any:
        """None: its name is in the config; prepared data stay until their folder is deleted. Of a folder of
        this machine, the content of its files.
        """
        below = (str(path) for path in sorted(Path(self.dataset).rglob("*")) if path.is_file())
        return self.contents(map(local_file, below)) if os.path.isdir(self.dataset) else None

    def plan(self) -> SourcePlan:
        """Plan one part per file of the dataset, at its newest commit."""
        revision = self.source.revision
        if revision is None and not Path(self.dataset).exists():
            import huggingface_hub

            # the library's own errors and HTTP's have no common base; reading says what is wrong
            with suppress(Exception):
                revision = huggingface_hub.HfApi().dataset_info(self.dataset, timeout=10).sha
        if (self.source.max_tokens or PART_TOKENS) < PART_TOKENS:
            return SourcePlan((), revision)
        with self.opened(revision) as records:
            shards, known = getattr(records, "num_shards", 1), getattr(records, "info", None)
        split = ((known and known.splits) or {}).get(self.source.split)
        size = (split and split.num_bytes) or 0
        large = size > HUB_BYTES or (not size and shards >= MANY_FILES)
        return SourcePlan([[i, shards] for i in range(shards)] if large and shards > 1 else (), revision)

    def documents(self, part: Part | None = None, revision: str | None = None) -> Iterator[Document]:
        if files := self._files(revision):
            for file in files[part[0] :: part[1]] if part else files:
                yield from self.read(file)
            return
        with self.opened(revision) as records:
            if part:
                records = records.shard(index=part[0], num_shards=part[1])
            if self.source.text_field in (getattr(records, "column_names", None) or ()):
                # no other column is decoded
                records = records.select_columns([self.source.text_field])
            yield from (Document(text, text, None) for text in self.texts(self.dataset, records))

    @contextmanager
    def opened(self, revision: str | None = None, build: str = "load_dataset") -> Iterator[Any]:
        """Open the records as `datasets` streams them, or its builder. Raises UsageError."""
        # dataset cards are fetched there, whatever cache_dir says; logins stay where they are
        cards = {} if "HF_HOME" in os.environ else {"HF_HUB_CACHE": str(self.cache / "hub")}
        os.environ.update(QUIET | cards | os.environ)
        import datasets

        options: dict[str, Any] = {"revision": revision} if revision else {}
        options |= {"split": self.source.split, "streaming": True} if build == "load_dataset" else {}
        with self._readable(self.dataset):
            load = getattr(datasets, build)
            yield load(self.dataset, name=self.source.subset, cache_dir=str(self.cache), **options)

    def _files(self, revision: str | None) -> list[File]:
        """List the split's files of records, of which no other column is read; empty if others make it."""
        with self.opened(revision, "load_dataset_builder") as builder:
            nested, files = getattr(builder.config, "field", None), builder.config.data_files or {}
        named = () if nested else files.get(self.source.split, ())
        records = all(kind_of(Path(name)) not in (None, ".txt", ".py") for name in named)
        return [local_file(name) if os.path.isfile(name) else File(name, 0) for name in named if records]


def local_file(name: str) -> File:
    """Return a file of this machine."""
    stat = os.stat(name)
    # an edit within the clock's resolution of the last one would leave the same times
    young = time.time_ns() - stat.st_ctime_ns < 2 * 10**9
    stamp = "" if young else f"{stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    return File(str(Path(name)), stat.st_size, stamp)


SOURCES = Registry("data.sources.kind", TextSource, {
    "corpus": "titans_platform.data.sources:CorpusSource",
    "files": "titans_platform.data.sources:FilesSource",
    "hub": "titans_platform.data.sources:HubSource",
}, UsageError)  # fmt: skip
"""Text sources by `SourceConfig.kind`."""
