"""Reading of text: unused columns, names and compressions, links, line ends, names of special tokens."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.small import config
from titans_platform import cli
from titans_platform.config import SourceConfig
from titans_platform.data import encode, load_tokenizer, prepare
from titans_platform.data.sources import FilesSource, HubSource
from titans_platform.data.tokenizer import train_tokenizer, write_tokenizer
from titans_platform.evals.lm_harness import HarnessModel
from titans_platform.loading import load_config
from titans_platform.text import plain

HTML = "<p>now <s>50</s> 40 euro</p> <pad> <|endoftext|> end"
STORY = "".join(f"Line {i} of the story.\n" for i in range(400))


def texts(path: object, dataset: bool = False) -> list[str]:
    """The texts of the documents at a path, or of the dataset there."""
    where, source = {"dataset" if dataset else "path": str(path)}, HubSource if dataset else FilesSource
    opened = source(SourceConfig(kind="hub" if dataset else "files", **where), "data", Path("cache"))
    return [document.text for document in opened.documents()]


@pytest.mark.parametrize("unused", [
    '"m": "cut \\ud83d"', '"m": 1, "m": 2', '"m": NaN', '"m": 1e999', f'"m": {"9" * 5000}', '"m": [1, {}]',
    f'"m": {"[" * 9999}{"]" * 9999}', '"message": {"a": 1}, "type": "user"', '"": null',
])  # fmt: skip
def test_unused_field_of_json_does_not_stop_a_read(unused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (path := tmp_path / "a" / "a.jsonl").parent.mkdir()
    path.write_text('{"m": 0, "text": "one"}\n\n' + f'{{{unused}, "text": "two\u2028"}}\n{{"m": ""}}\n')
    assert texts(path) == texts(path.parent, dataset=True) == ["one", "two\u2028", ""]


UNUSED = {
    "map": pa.array([[("a", b"b")], []], pa.map_(pa.string(), pa.binary())),
    "union": pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [pa.array([1, 2])]),
    "list": pa.array([[{"d": [1]}], None]),
    "interval": pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
    "half": pa.array([1, None], pa.float16()), "view": pa.array([b"a", None], pa.binary_view()),
}  # fmt: skip
TEXT = {
    "string": pa.array(["one", "two"]), "large": pa.array(["one", "two"], pa.large_string()),
    "binary": pa.array([b"one", b"two"]), "dictionary": pa.array(["one", "two"]).dictionary_encode(),
    "view": pa.array(["one", "two"], pa.string_view()),
}  # fmt: skip


@pytest.mark.parametrize("form", ["file", "stream", "parquet"])
@pytest.mark.parametrize(("text", "unused"), [*((t, "list") for t in TEXT), *(("string", u) for u in UNUSED)])
def test_unused_column_of_arrow_does_not_stop_a_read(form, text, unused, tmp_path):
    table = pa.table({"text": TEXT[text], "unused": UNUSED[unused], "empty": pa.nulls(2)})
    odd = {"info": {"features": {"unused": {"_type": "Odd"}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(odd)})
    path = tmp_path / ("a.parquet" if form == "parquet" else "a.arrow")
    if form == "parquet":
        try:
            pq.write_table(table, path)
        except pa.ArrowNotImplementedError:
            pytest.skip("Parquet has no such type")
    else:
        write = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
        with write(path, table.schema) as sink:
            sink.write_table(table)
    assert texts(path) == ["one", "two"]


RECORDS = [{"text": "one", "n": 1}, {"text": "two"}]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
FILES = {
    "a.TXT": b"one", "a.Py": b"one", "a.JSONL": LINES, "a.ndjson": LINES,
    "a.json": json.dumps(RECORDS).encode(),
    "b.json": json.dumps(RECORDS[0], indent=2).encode(), "c.json": LINES, "d.json": b'["one", "two"]',
    "bom.jsonl": b"\xef\xbb\xbf" + LINES, "bom.txt": "\ufeffone".encode(), "a.txt.bz2": bz2.compress(b"one"),
    "a.txt.zst": pa.compress(b"one", "zstd", asbytes=True), "a.TXT.GZ": gzip.compress(b"one"),
    "a.ndjson.zst": pa.compress(LINES, "zstd", asbytes=True), "a.json.xz": lzma.compress(LINES),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_file_is_read_by_any_spelling_of_its_name(name, tmp_path):
    (tmp_path / name).write_bytes(FILES[name])
    several = "json" in name.lower() and name != "b.json"
    assert texts(tmp_path / name) == texts(tmp_path) == ["one", "two"][: 1 + several]


def test_other_files_are_counted(tmp_path, caplog):
    for name in ("a.txt", "b.pdf", "c.pdf", "README", "dataset_info.json"):
        (tmp_path / name).write_text('{"a": "text"}')
    for name in ("e.txt.xz", "f.parquet", "g.arrow", "h.jsonl.bz2"):
        (tmp_path / name).touch()
    (tmp_path / "i.jsonl").write_text('{"text": "x"}\n{"a": 1}\n')
    (tmp_path / "gone.txt").symlink_to("elsewhere")
    os.mkfifo(tmp_path / "pipe.txt")
    prepare(config({"kind": "files", "path": str(tmp_path)}), tmp_path / "root")
    assert "skipped 5 of 12 files: 2 .pdf, 2 that cannot be opened, 1 without suffix" in caplog.text
    assert "dataset_info.json has no field text; it has a; skipped" in caplog.text
    assert "i.jsonl: skipped 1 of 2 records without text" in caplog.text


LOOPS = {
    "itself": [("data/latest", ".")], "above": [("data/up", "..")], "file": [("data/b.txt", "a.txt")],
    "each other": [("data/x/y", "../z"), ("data/z/y", "../x")], "broken": [("data/b.txt", "gone.txt")],
    "twice": [("data/p", "."), ("data/q", "p")],
}  # fmt: skip


@pytest.mark.parametrize("pattern", ["data", "data/**/*.txt", "*/**"])
@pytest.mark.parametrize("links", LOOPS.values(), ids=LOOPS)
def test_links_are_followed_once(links, pattern, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("data/a.txt", "data/x/c.txt", "data/z/d.txt"):
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(name)
    for name, target in links:
        os.symlink(target, name)
    assert sorted(texts(pattern)) == ["data/a.txt", "data/x/c.txt", "data/z/d.txt"]


@pytest.mark.parametrize("kind", ["txt", "py", "jsonl", "json", "parquet", "hub"])
def test_line_ends_are_read_in_one_way(kind, tmp_path):
    fingerprints = set()
    for name, end in {"lf": "\n", "crlf": "\r\n", "cr": "\r"}.items():
        text = STORY.replace("\n", end)
        (tmp_path / name).mkdir()
        path = tmp_path / name / f"a.{'jsonl' if kind == 'hub' else kind}"
        if kind == "parquet":
            pq.write_table(pa.table({"text": [text]}), path)
        else:
            path.write_bytes((text if kind in ("txt", "py") else json.dumps({"text": text})).encode())
        hub = {"kind": "hub", "dataset": str(tmp_path / name)}
        source = hub if kind == "hub" else {"kind": "files", "path": str(path)}
        fingerprints.add(prepare(config(source), tmp_path / "root").fingerprint)
    assert len(fingerprints) == 1


def test_harness_and_commands_read_line_ends_as_training_does(tmp_path):
    class Scorer:
        tokenizer = load_tokenizer("byte")

        def score(self, requests, length):
            return [type("Score", (), {"logprob": r, "greedy": True}) for r in requests]

    request = lambda *args: type("Request", (), {"args": args})  # noqa: E731
    model = HarnessModel(Scorer(), 64)  # pyright: ignore[reportArgumentType]
    crlf, lf = request("a\r\nb", "c\r\nd"), request("a\nb", "c\nd")
    assert model.loglikelihood([crlf]) == model.loglikelihood([lf])
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc")
    from titans_platform.cli.model import _read_text

    assert _read_text("--read", str(path)) == plain("a\nb\nc") == texts(path)[0]


@pytest.mark.parametrize("text", [HTML, "<s>", "<pad><pad>", "a <s> b", "</s>\n<unk>"])
@pytest.mark.parametrize("kind", ["byte", "json"])
def test_names_of_special_tokens_are_text(kind, text, tmp_path):
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "tok.json"
    path.write_text(train_tokenizer([HTML * 50], 270))
    tokenizer = load_tokenizer("byte" if kind == "byte" else str(path))
    ids = tokenizer.encode(text)
    assert not {tokenizer.bos, tokenizer.pad} & {*ids}
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text])[0].tolist() == ids
    write_tokenizer(tokenizer, tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == [tokenizer.bos, *ids]


LIMITS = [{}, {"max_tokens": 3000}, {"max_tokens": 9}, {"validation_fraction": 0.3}]


@pytest.mark.parametrize("fields", LIMITS)
def test_long_text_is_tokenised_piece_by_piece(fields, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(STORY)
    source = {"kind": "files", "path": str(tmp_path / "a.txt"), "validation_fraction": 0.0} | fields
    whole = prepare(config(source, length=4), tmp_path / "whole")
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(encode, "GROUP_CHARACTERS", 100)
    pieces = prepare(config(source, length=4), tmp_path / "pieces")
    assert pieces.fingerprint == whole.fingerprint
    assert pieces.sources[0].manifest.documents == whole.sources[0].manifest.documents


@pytest.mark.parametrize("name", [
    "texts/a.TXT", "texts/a.ndjson", "texts/a.json", "texts/a.txt.bz2", "texts/h[1].txt", "texts", "texts/*",
    "**/*.txt", "file://{here}/texts/h[1].txt",
])  # fmt: skip
def test_init_takes_what_train_reads(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for i, file in enumerate(["a.TXT", "a.ndjson", "a.json", "h[1].txt", "a.txt.bz2"]):
        text = STORY.replace("Line", f"Line {i}")
        content = (json.dumps({"text": text}) if "json" in file else text).encode()
        Path("texts", file).write_bytes(bz2.compress(content) if "bz2" in file else content)
    assert cli.run(["init", "run.yaml", "--preset", "smoke", "--data", name.format(here=tmp_path)]) == 0
    assert prepare(load_config("run.yaml").data, tmp_path / "root").sources[0].manifest.documents
