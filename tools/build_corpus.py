"""Build the text corpus that ships with the platform: python tools/build_corpus.py FOLDER.

FOLDER holds the archives of `WHEELS`, `BROTLI` and `AUSTEN`; nothing is downloaded:

    pip download --no-deps --dest FOLDER attrs==26.1.0 click==8.5.1 flask==3.1.3 jinja2==3.1.6 \
        requests==2.34.2 rich==15.0.0 werkzeug==3.1.9
    pip download --no-deps --no-binary :all: --dest FOLDER brotli==1.1.0
    (cd FOLDER && apt-get download r-cran-janeaustenr)

A document is a chapter, a book of a poem, an act of a play, or a source file.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import re
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "platform/titans_platform/data/corpus"
BROTLI = "Brotli-1.1.0.tar.gz"
AUSTEN = "r-cran-janeaustenr_1.0.0-1_all.deb"
WHEELS = {
    "attrs-26.1.0": "MIT",
    "click-8.5.1": "BSD-3-Clause",
    "flask-3.1.3": "BSD-3-Clause",
    "jinja2-3.1.6": "BSD-3-Clause",
    "requests-2.34.2": "Apache-2.0",
    "rich-15.0.0": "MIT",
    "werkzeug-3.1.9": "BSD-3-Clause",
}
NOVELS = {"Northanger Abbey", "Persuasion", "Pride and Prejudice"}
TABLES = re.compile(r"_unicode_data|_emoji_codes|_cell_widths|_identifier\.py")
"""Modules that are data, not code."""
CODE_CHARACTERS = range(1_000, 50_001)
ORDER = 2
"""Of the orders by hash, one whose first 100,000 bytes have held-out documents at data.seed 0."""

Document = dict[str, str]


def prose(folder: Path) -> Iterator[Document]:
    """Chapters, scenes and books of works in the public domain."""
    with tarfile.open(folder / BROTLI) as archive:
        for file, title, author, heading in (
            ("alice29", "Alice's Adventures in Wonderland", "Lewis Carroll", r"(?m)^ +CHAPTER [IVX]+$"),
            ("asyoulik", "As You Like It", "William Shakespeare", r"(?m)^ACT [IVX]+$"),
            ("plrabn12", "Paradise Lost", "John Milton", r"(?m)^Book [IVX]+$"),
        ):
            member = archive.extractfile(f"Brotli-1.1.0/tests/testdata/{file}.txt")
            assert member is not None
            text = member.read().decode("ascii").replace("[The End]", "").replace("\x1a", "")
            yield from chapters(text, heading, title, author, BROTLI)
    for text in austen(folder / AUSTEN):
        title = text.split("\n", 1)[0].title().replace(" And ", " and ")
        if title in NOVELS:
            yield from chapters(text, r"(?mi)^chapter [0-9ivxl]+\.?$", title, "Jane Austen", AUSTEN)


def chapters(text: str, heading: str, title: str, author: str, source: str) -> Iterator[Document]:
    """Yield the parts of a work, each from its heading; text before the first is left out."""
    text = "\n".join(line.rstrip() for line in text.splitlines())
    starts = [match.start() for match in re.finditer(heading, text)]
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], len(text)], strict=True), 1):
        name = re.sub(r"[^a-z]+", "-", title.replace("'", "").lower())
        about = {"title": title, "author": author, "source": source, "licence": "public domain"}
        yield {"id": f"prose/{name}/{i:02d}", **about, "text": text[start:end].strip() + "\n"}


def austen(path: Path) -> Iterator[str]:
    """Yield the novels of R's package janeaustenr: character vectors in a lazy-load database."""
    packed, at = path.read_bytes(), 8
    while at < len(packed):  # an ar archive
        name, size = packed[at : at + 16].strip(), int(packed[at + 48 : at + 58])
        if name.startswith(b"data.tar"):
            with tarfile.open(fileobj=io.BytesIO(packed[at + 60 : at + 60 + size])) as archive:
                member = archive.extractfile("./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
                assert member is not None
                database = member.read()
            break
        at += 60 + size + size % 2
    else:
        raise SystemExit(f"{path}: has no data.tar")
    while database:
        unpacker = zlib.decompressobj()
        vector = unpacker.decompress(database[4:])
        database = unpacker.unused_data
        # header, flags of a character vector, its length; then flags, bytes and text of each string
        at = vector.index(b"UTF-8") + 5
        flags, length = struct.unpack_from(">2i", vector, at)
        assert flags & 0xFF == 16, "not a character vector"
        at, lines = at + 8, []
        for _ in range(length):
            size = struct.unpack_from(">i", vector, at + 4)[0]
            lines.append(vector[at + 8 : at + 8 + size].decode())
            at += 8 + size
        yield "\n".join(lines)


def code(folder: Path) -> Iterator[Document]:
    """Source files of packages under permissive licences, whole."""
    for name, licence in WHEELS.items():
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl") as archive:
            for path in sorted(archive.namelist()):
                if not path.endswith(".py") or TABLES.search(path):
                    continue
                text = archive.read(path).decode().replace("\r\n", "\n")
                if len(text) not in CODE_CHARACTERS:
                    continue
                about = {"title": path, "author": name.split("-")[0], "source": name, "licence": licence}
                yield {"id": f"code/{path}", **about, "text": text}


def licences(folder: Path, documents: list[Document]) -> Iterator[str]:
    """Yield the contents of the corpus by source, and the notices that have to be kept."""
    yield "The text of corpus.jsonl.xz, which names title, author, source and licence of every document.\n\n"
    works: dict[tuple[str, ...], list[str]] = {}
    for document in documents:
        title = f"{document['title']}, " if document["id"].startswith("prose") else ""
        work = (
            document["id"].split("/")[0],
            title + document["author"],
            document["source"],
            document["licence"],
        )
        works.setdefault(work, []).append(document["text"])
    for work, texts in sorted(works.items(), reverse=True):
        yield f"{'; '.join(work)}: {len(texts)} documents, {sum(len(t.encode()) for t in texts):,} bytes\n"
    yield (
        "\nThe prose is in the public domain. Only the text of the works is kept, not the headers of their "
        "electronic editions.\nEvery source file of code is whole, under the notice of its package below.\n\n"
    )
    for name in WHEELS:
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl") as archive:
            for path in sorted(archive.namelist()):
                if re.search(r"dist-info/licenses/(LICENSE|NOTICE)", path):
                    yield f"{'=' * 80}\n{path}\n{'=' * 80}\n\n{archive.read(path).decode()}\n"


def main() -> None:
    """Write the corpus, its notices and its table of documents; print its checksum."""
    folder = Path(sys.argv[1])
    documents = [*prose(folder), *code(folder)]
    # in the order of a hash, so that the beginning has prose and code as the whole has
    documents.sort(key=lambda document: hashlib.sha256(f"{ORDER}:{document['id']}".encode()).digest())
    lines = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents).encode()
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / "corpus.jsonl.xz").write_bytes(lzma.compress(lines, preset=9 | lzma.PRESET_EXTREME))
    (CORPUS / "LICENCES.txt").write_text("".join(licences(folder, documents)))
    for part in ("prose", "code"):
        texts = [d["text"] for d in documents if d["id"].startswith(part)]
        print(part, len(texts), "documents", sum(len(text.encode()) for text in texts), "bytes")
    print("sha256 of corpus.jsonl:", hashlib.sha256(lines).hexdigest())


if __name__ == "__main__":
    main()
