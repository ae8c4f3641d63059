"""Sources: their documents, how they are split, and error messages."""

import gzip
import itertools
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import small
from tests.data.small import PREPARE, config, documents
from titans_platform.data import PreparedData, encode, prepare, sources
from titans_platform.data.encode import split_documents
from titans_platform.data.sources import CORPUS, Document
from titans_platform.errors import UsageError


def documents_of(prepared: PreparedData, split: str) -> list[str]:
    rows = getattr(prepared.sources[0], split)
    if not rows.info.tokens:
        return []
    span = rows.read(0, rows.info.tokens)
    begins = [*span.starts.nonzero()[0].tolist(), rows.info.tokens]
    return [prepared.tokenizer.decode(span.tokens[a:b].tolist()) for a, b in itertools.pairwise(begins)]


def splits(source: dict, root: Path, **fields) -> tuple[list[str], list[str]]:
    """The texts of both sides, of which none is on both."""
    prepared = prepare(config(source, **fields), root)
    train, validation = documents_of(prepared, "train"), documents_of(prepared, "validation")
    assert not set(train) & set(validation)
    return train, validation


def test_no_document_is_in_both_splits_also_where_it_is_repeated(tmp_path):
    contents = (f"text of file {i}" for i in range(50))
    source = small.texts(tmp_path / "many", *contents, validation_fraction=0.2)
    train, validation = splits(source, tmp_path / "root")
    assert (len(train), len(validation)) == (40, 10)
    assert set(splits(source, tmp_path / "root", seed=1)[1]) != set(validation)
    texts = (f"document {i % 10}" for i in range(100))
    source = documents(tmp_path / "t.jsonl", *texts, validation_fraction=0.3)
    train, validation = splits(source, tmp_path / "root")
    assert (len(train), len(validation)) == (70, 30)


def test_one_file_is_split_by_position_and_max_tokens_leaves_validation_a_share(tmp_path):
    lines = [f"line {i:03d}\n" for i in range(100)]
    source = small.texts(tmp_path / "book", "".join(lines), validation_fraction=0.1)
    prepared = prepare(config(source), tmp_path / "root")
    (train,), (validation,) = documents_of(prepared, "train"), documents_of(prepared, "validation")
    assert train + validation == "".join(lines)
    assert validation.strip().splitlines() == [line.strip() for line in lines[91:]]
    assert list(prepared.validation(4))
    source = small.texts(tmp_path / "words", "word " * 1000, validation_fraction=0.2, max_tokens=100)
    prepared = prepare(config(source), tmp_path / "root")
    manifest = prepared.sources[0].manifest
    assert (manifest.train.tokens, manifest.validation.tokens) == (80, 20)


@pytest.mark.parametrize(("text", "fraction", "kept"), [
    ("a" * 100, 0.2, "a" * 20),  # no border at all: by characters
    ("one two three four five", 0.4, " five"), ("short", 0.05, None),
    ("text\n\n\n\n", 0.5, None),  # what would be kept is blank
    ("one two three four five", 0.0, None),
])  # fmt: skip
def test_where_one_document_is_cut(text, fraction, kept):
    placed = list(split_documents(iter([Document(text, text, None)]), fraction, seed=0))
    assert "".join(document.text for document, _ in placed) == text
    assert [document.text for document, validation in placed if validation] == [kept] * (kept is not None)


def test_splits_keep_the_fraction():
    for n, fraction, kept in ((1, 0, 0), (2, 0.01, 1), (10, 0.99, 9), (10, 0, 0), (10, 1, 10)):
        documents = [Document(f"text {i}", str(i), None) for i in range(n)]
        placed = list(split_documents(iter(documents), fraction, seed=0))
        assert sum(validation for _, validation in placed) == kept
        assert [document for document, _ in placed] == documents
    for seed in range(4):  # copies lie on one side
        placed = split_documents((Document(key, key, None) for key in "abb"), 0.2, seed)
        assert 0 < sum(validation for _, validation in placed) < 3
    documents = (Document("text", str(i), None) for i in range(4000))
    assert 300 < sum(validation for _, validation in split_documents(documents, 0.1, seed=0)) < 500


def test_corpus_is_the_same_everywhere_and_names_its_documents(tmp_path):
    """Neither the machine nor the version of Python is part of what cells are named by."""
    prepared = prepare(config({"kind": "corpus", "max_tokens": 200_000}, length=64), tmp_path / "a")
    assert prepared.fingerprint == "14d86477dc9d"
    validation = documents_of(prepared, "validation")
    assert any("import " in text for text in validation)
    assert any("Captain Wentworth" in text or "Elizabeth" in text for text in validation)
    prose = prepare(config({"kind": "corpus", "subset": "prose", "max_tokens": 50_000}), tmp_path / "a")
    assert not any("import " in text for text in documents_of(prose, "train"))
    assert prose.labels == ["corpus:prose"]
    records = [json.loads(line) for line in lzma.decompress(CORPUS.read_bytes()).splitlines()]
    notices = CORPUS.with_name("LICENCES.txt").read_text()
    assert len({record["id"] for record in records}) == len(records) > 300
    for record in records:
        assert {"title", "author", "source", "licence", "text"} <= record.keys()
        assert record["source"] in notices
    assert not any("gutenberg" in r["text"].lower() for r in records if r["id"].startswith("prose/"))
    prose, code = (sum(len(r["text"]) for r in records if r["id"][0] == part) for part in "pc")
    assert 2e6 < prose < code < 2.6e6


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_corpus_is_refused(tmp_path, monkeypatch, damage):
    whole, path = CORPUS.read_bytes(), tmp_path / "corpus.jsonl.xz"
    path.write_bytes(whole[:-100] if damage == "cut" else lzma.compress(lzma.decompress(whole)[:-1]))
    monkeypatch.setattr(sources, "CORPUS", path)
    with pytest.raises(UsageError, match=r"corpus\.jsonl\.xz: .*; install titans-lab again$"):
        prepare(config({"kind": "corpus"}), tmp_path / "root")


def test_hub_call_is_limited_and_a_missing_dataset_is_one_line(tmp_path, monkeypatch):
    """Only as much is read as max_tokens asks for, by name, subset and split, as a stream."""
    import datasets

    calls, read = [], []

    def load_dataset(*args, **options):
        calls.append((args, options))
        for i in range(10**9):
            read.append(i)
            yield {"content": "0123456789" * 100}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources.HubSource, "_files", lambda self, revision: [])
    source = {"kind": "hub", "dataset": "some/corpus", "subset": "10BT", "split": "train"}
    limits = {"text_field": "content", "max_tokens": 5000, "validation_fraction": 0.0}
    prepared = prepare(config(source | limits), tmp_path)
    (args, options), *_ = calls
    assert args == ("some/corpus",)
    cache = str(tmp_path / "data" / "huggingface")
    assert options == {"name": "10BT", "split": "train", "streaming": True, "cache_dir": cache}
    assert prepared.labels == ["hub:some/corpus/10BT"]
    assert prepared.sources[0].manifest.train.tokens == 5000
    # documents are looked at ahead: a split's window and one group for the tokenizer
    assert len(read) < 10_000

    def load_dataset(*args, **options):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'some/corpus' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UsageError, match=r"^data\.sources\.0: some/corpus cannot be read: .*doesn't exist"):
        prepare(config({"kind": "hub", "dataset": "some/corpus"}), tmp_path)


@pytest.mark.parametrize(("name", "content", "says"), [
    ("missing.txt", None, r"^data\.sources\.0\.path: no file, folder or match"),
    ("*.parquet", None, r"^data\.sources\.0\.path: no file, folder or match"),
    ("empty", None, r"^data\.sources\.0\.path: .*empty: no file of a supported type; use "),
    ("image.png", b"\x89PNG", r"^data\.sources\.0\.path: .*\.txt, \.py, \.jsonl, .*\.parquet"),
    ("blank.txt", b" \n\n", r"^data\.sources\.0: files:blank\.txt is empty"),
    ("none.jsonl", b"", r"^data\.sources\.0: .*none\.jsonl"),
    ("other.jsonl", b'{"body": "x"}\n', r"^data\.sources\.0\.text_field: .*no field text; it has body"),
    ("number.jsonl", b'{"text": 3}\n', r"^data\.sources\.0\.text_field: text of .* is not text"),
    ("broken.jsonl", b'{"text": "a"}\n{"te', r"^data\.sources\.0: .*broken\.jsonl cannot be read"),
    ("latin.txt", "é".encode("latin-1"), r"^data\.sources\.0: .*latin\.txt cannot be read"),
    ("broken.txt.gz", gzip.compress(b"text" * 999, mtime=0)[:20],
     r"^data\.sources\.0: .*broken\.txt\.gz cannot be read"),
    ("broken.jsonl.xz", b"not xz", r"^data\.sources\.0: .*broken\.jsonl\.xz cannot be read"),
    ("broken.parquet", b"PAR1", r"^data\.sources\.0: .*broken\.parquet cannot be read"),
])  # fmt: skip
def test_bad_files_are_named_in_one_line(tmp_path, capfd, name, content, says):
    (tmp_path / "empty").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=says) as error:
        prepare(config({"kind": "files", "path": str(tmp_path / name)}), tmp_path / "root")
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == "", "the library says nothing beside"


@pytest.mark.slow
def test_nothing_is_left_in_the_home_folder(tmp_path):
    home, dataset = tmp_path / "home", tmp_path / "dataset"
    home.mkdir()
    dataset.mkdir()
    files = documents(dataset / "train.jsonl", "a record of the dataset", "another record")
    data = config(files, {"kind": "hub", "dataset": str(dataset)})
    command = [sys.executable, "-c", PREPARE, data.model_dump_json(), str(tmp_path / "root")]
    unset = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")
    env = {key: value for key, value in os.environ.items() if key not in unset} | {"HOME": str(home)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert (done.returncode, len(done.stdout.split()), done.stderr) == (0, 1, "")
    assert not list(home.rglob("*"))


def test_a_few_long_documents_do_not_set_the_share_of_a_source(monkeypatch):
    monkeypatch.setattr(encode, "WINDOW_CHARACTERS", 1000)
    for seed in range(4):
        documents = (Document(400 * "x", str(i), None) for i in range(2000))
        assert 60 < sum(validation for _, validation in split_documents(documents, 0.05, seed)) < 140
        few = (Document(400 * "x", str(i), None) for i in range(8))
        assert any(validation for _, validation in split_documents(few, 0.01, seed))
