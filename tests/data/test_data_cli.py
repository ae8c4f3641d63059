"""`titans data prepare` and `titans data info`."""

import pytest
import yaml

from tests.small import texts
from titans_platform.cli import run
from titans_platform.data import load_tokenizer


@pytest.fixture
def config_file(tmp_path):
    source = texts(tmp_path / "texts", *(f"document {i} " * 20 for i in range(10)), validation_fraction=0.2)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"data": {"sources": [source], "sequence_length": 16}}))
    return path


def test_prepare_then_info(config_file, tmp_path, capsys, answer):
    where = str(config_file), "--root", str(tmp_path / "runs")
    assert run(["data", "prepare", *where]) == 0
    out, err = capsys.readouterr()
    assert "files:texts" in out
    assert err == "", "no progress where there is no terminal"
    info = answer("data", "info", *where)
    source = info["sources"]["files:texts"]
    assert (source["documents"], source["tokens"]) == (10, 10 * (1 + 20 * 11))
    assert (source["train_rows"], source["validation_rows"]) == ((8 * 221 - 1) // 16, (2 * 221 - 1) // 16)
    assert run(["data", "info", *where]) == 0
    assert capsys.readouterr().out.count(info["fingerprint"]) == 1


def test_bad_config_and_info_before_prepare_are_one_line_and_exit_2(config_file, tmp_path, refused):
    wrong = "--set", "data.sources.0.path=nowhere", "--root", tmp_path / "r"
    error = "error: data.sources.0.path: no file, folder or match for nowhere"
    assert refused("data", "prepare", config_file, *wrong) == error
    assert "run titans data prepare" in refused("data", "info", config_file, "--root", tmp_path / "runs")


def test_tokenizer_is_made_of_a_corpus_and_is_the_same_again(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("the cat sat on the mat and the rat sat on the cat\n" * 20)
    made = []
    for name in ("a.json", "b.json"):
        path = str(tmp_path / name)
        assert run(["data", "tokenizer", str(tmp_path / "book.txt"), "--size", "268", "--out", path]) == 0
        made.append(load_tokenizer(path))
        assert capsys.readouterr().out == f"{path}: 268 ids, {made[-1].fingerprint}\n"
    assert made[0].fingerprint == made[1].fingerprint
    text = "the cat\nsat there, at 3 € a mat"
    assert (made[0].decode(made[0].encode(text)), len(made[0].encode(" the"))) == (text, 1)
    assert {made[0].bos, made[0].pad}.isdisjoint(made[0].encode(text))


@pytest.mark.parametrize(("size", "out", "says"), [
    (200, "t.json", "--size: 200 ids are fewer than 258"), (9000, "t.json", "--size: the text gives"),
    (300, "t.model", "--out: t.model should end in .json"),
])  # fmt: skip
def test_tokenizer_that_cannot_be_made_is_one_line(size, out, says, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("the cat sat on the mat")
    assert says in refused("data", "tokenizer", "book.txt", "--size", size, "--out", out)
    assert not (tmp_path / out).exists()
