"""`experiments.stream.stream`: each variant reads a long text, up to its end or a resource limit."""

import json

import pytest

from experiments.stream import stream as stream_benchmark
from experiments.stream.stream import Reader
from titans_platform import cli


def stream(*arguments: str) -> int:
    sizes = ["--preset", "smoke", "--tokens", "2500", "--every", "1000"]
    return cli.run([*sizes, *arguments], stream_benchmark.stream)


@pytest.mark.slow
def test_stream_reports_rates_of_each_variant(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("not a long book\n" * 30)
    text = ["--text", str(tmp_path / "book.txt"), "--figure", str(tmp_path / "drawn")]
    assert stream("--variants", "lmm,transformer", "--json", *text) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in result["rows"]] == ["lmm", "transformer"]
    for row in result["rows"]:
        assert [look["tokens"] for look in row["looks"]] == [1000, 2000, 2500]
        assert list(row["decode"]) == ["1024"]
        assert row["rate_ratio"] > 0
        assert row["decode_ratio"] is None
        assert row["ended"] is None
    assert (tmp_path / "drawn" / "stream.png").stat().st_size > 10_000


@pytest.mark.slow
def test_stream_ends_for_a_variant_over_the_memory_limit(capsys):
    assert stream("--variants", "lmm", "--memory-gb", "0.01") == 0
    shown = capsys.readouterr().out
    assert "lmm left after 1,000 tokens: more than 0.01 GiB" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_stream_ends_for_a_variant_that_slows_down():
    looks = [{"rate": 100.0, "peak_bytes": 1}, {"rate": 4.0, "peak_bytes": 1}]
    assert stream_benchmark._enough(looks, 8) == "25 times slower than at the start"
    assert stream_benchmark._enough(looks[:1], 8) is None


@pytest.fixture
def reader(tmp_path) -> Reader:
    (tmp_path / "book.txt").write_text("abcdefg")
    model = {"vocab_size": 260, "d_model": 16, "n_layers": 1, "memory": {"heads": 2, "chunk_size": 8}}
    return Reader({"model": model, "text": [str(tmp_path / "book.txt")], "threads": 1})


def test_stream_wraps_around_and_decoding_keeps_the_position(reader):
    assert bytes(reader._piece(5, 9)[0].tolist()) == b"fgabcdefg"
    reader.read(10)
    state = reader.place.state
    assert reader.decode(3).keys() == {"seconds"}
    assert reader.place.state is state
    assert reader.place.at == state.position == 10


def test_stream_rereads_the_first_tokens_in_turn_with_the_last(reader, monkeypatch):
    reader.read(10)
    reader.decode(1)
    reader.read(2 * stream_benchmark.PIECE)
    places = []
    prefill = stream_benchmark.prefill

    def noted(model, tokens, state):
        places.append(state.position if state else 0)
        return prefill(model, tokens, state)

    monkeypatch.setattr(stream_benchmark, "prefill", noted)
    assert reader.decode(2).keys() == {"seconds", "first_seconds"}
    assert places == [2058, 10, 2059, 11]
    places.clear()
    assert reader.again(1500)["first_seconds"] > 0
    assert places == [2058, 0, 3082, 1024]
    assert reader.place.at == 3558


@pytest.mark.parametrize(("option", "value", "line"), [
    ("--text", "nowhere.txt", "--text: no file nowhere.txt"), ("--variants", "lm", "'lm' is not one of"),
])  # fmt: skip
def test_bad_input_is_one_line(option, value, line, capsys):
    assert stream(option, value) == 2
    assert line in capsys.readouterr().err
