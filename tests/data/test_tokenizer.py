"""Tokenizers: ids, special tokens, fingerprints, and errors on a corrupt file."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from titans_platform.config import VOCABULARIES
from titans_platform.data import load_tokenizer, sources
from titans_platform.data.tokenizer import TextStream, write_tokenizer
from titans_platform.errors import UsageError
from titans_platform.objectives import check_vocabulary
from titans_platform.objectives.next_token import NextToken
from titans_platform.study.grid import known_studies, load_study, resolve
from titans_platform.tasks.items import count_tokens, encode_item, make_item

HUB = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
"""The tokenizer that the studies name at the paper's scales."""


def json_tokenizer(path: Path, *special: str, more: int = 0) -> Path:
    words = {word: i for i, word in enumerate([*special, "<unk>", "hello", "world", *map(str, range(more))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(path))
    return path


def test_bytes_and_letters_round_trip_and_letters_of_several_tokens_are_waited_for():
    tokenizer, text = load_tokenizer("byte"), "Titans — ñ 記憶\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([tokenizer.bos, *tokenizer.encode(text), tokenizer.pad]) == text
    assert (tokenizer.bos, tokenizer.pad, tokenizer.vocab_size) == (256, 257, VOCABULARIES["byte"])
    assert [ids.tolist() for ids in tokenizer.encode_batch(["ab", "é"])] == [[97, 98], [195, 169]]
    tokenizer = load_tokenizer("dna")
    assert tokenizer.encode("ACGTNacgtn") == [0, 1, 2, 3, 4] * 2
    assert tokenizer.decode([tokenizer.bos, *tokenizer.encode("gattRcÄ"), tokenizer.pad]) == "GATTNCN"
    assert tokenizer.vocab_size == VOCABULARIES["dna"] == 8
    assert streamed(load_tokenizer("byte"), "x記y", 0) == ["x", "", "", "記", "y", ""]
    stream = TextStream(load_tokenizer("byte"))
    assert ([stream.add(0xFF) for _ in range(9)], stream.end()) == ([*[""] * 7, "\ufffd" * 8, ""], "\ufffd")


def streamed(tokenizer, text: str, first: int) -> list[str]:
    """Return the text that each token from ``first`` on adds, and the rest."""
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, ids[:first])
    return [*map(stream.add, ids[first:]), stream.end()]


@pytest.mark.parametrize("first", [0, 1, 5])
def test_text_comes_as_its_tokens_do(sentencepiece_model, first):
    text = "a memory 記憶 learns"
    assert "".join(streamed(load_tokenizer("byte"), text, first)) == text.encode()[first:].decode()
    tokenizer = load_tokenizer(str(sentencepiece_model))
    before = tokenizer.decode(tokenizer.encode("memory after chunk")[:first])
    assert before + "".join(streamed(tokenizer, "memory after chunk", first)) == "memory after chunk"


@pytest.mark.parametrize("kind", ["byte", "plain", "special"])
def test_tokenizer_is_handed_over_with_its_special_tokens(kind, tmp_path):
    special = ("<s>", "<pad>") if kind == "special" else ()
    given = load_tokenizer("byte" if kind == "byte" else str(json_tokenizer(tmp_path / "own.json", *special)))
    (tmp_path / "out").mkdir()
    there = load_tokenizer(str(write_tokenizer(given, tmp_path / "out")))
    text = "hello world 記 \n\x00 é hello"
    assert there.encode(text) == given.encode(text)
    assert there.decode(given.encode(text)) == given.decode(given.encode(text))
    assert (there.bos, there.pad) == (given.bos, given.pad)
    # a program that knows no more than the files begins each text as in training
    plain = Tokenizer.from_file(str(there.path))
    assert plain.encode("hello").ids == [given.bos, *given.encode("hello")]
    names = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    collected = [plain.token_to_id(names[f"{which}_token"]) for which in ("bos", "eos", "pad")]
    assert collected == [given.bos, given.bos, given.pad]


def test_sentencepiece_round_trips_and_fingerprints_are_of_the_content(sentencepiece_model, tmp_path):
    tokenizer = load_tokenizer(str(sentencepiece_model))
    ids = tokenizer.encode("token after token")
    assert tokenizer.decode([tokenizer.bos, *ids, tokenizer.pad]) == "token after token"
    assert tokenizer.bos == 1, "its own start piece"
    assert tokenizer.pad not in {tokenizer.bos, *ids}
    assert tokenizer.vocab_size == 32
    assert tokenizer.encode_batch(["token after token"])[0].tolist() == ids
    copy = tmp_path / "another_name.model"
    shutil.copyfile(sentencepiece_model, copy)
    first, second = load_tokenizer(str(sentencepiece_model)), load_tokenizer(str(copy))
    other = load_tokenizer(str(json_tokenizer(tmp_path / "t.json")))
    assert first.fingerprint == second.fingerprint
    assert len({first.fingerprint, other.fingerprint, load_tokenizer("byte").fingerprint}) == 3


def test_json_uses_its_own_special_tokens_or_new_ids(tmp_path):
    tokenizer = load_tokenizer(str(json_tokenizer(tmp_path / "t.json", "<pad>", "<s>")))
    assert (tokenizer.pad, tokenizer.bos) == (0, 1)
    assert tokenizer.encode("hello world") == [3, 4]
    assert (tokenizer.decode([1, 3, 4, 0]), tokenizer.vocab_size) == ("hello world", 8)
    tokenizer = load_tokenizer(str(json_tokenizer(tmp_path / "t.json")))
    assert tokenizer.bos == 3, "behind the three known ids"
    assert tokenizer.pad == 0, "<unk> serves"
    assert tokenizer.vocab_size == 4


@pytest.mark.parametrize(("name", "content"), [
    ("missing.model", None), ("words.txt", b"hello"), ("broken.model", b"not a model"),
    ("broken.json", b"{"), ("other.json", b'{"a": 1}'),
])  # fmt: skip
def test_bad_tokenizer_is_one_line(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"^data\.tokenizer: .*" + name) as error:
        load_tokenizer(str(path))
    assert "\n" not in str(error.value)
    assert "`byte`" in str(error.value)


def test_hub_repository_is_its_tokenizer_json_and_missing_files_name_it(tmp_path, monkeypatch):
    import huggingface_hub

    path = json_tokenizer(tmp_path / "tokenizer.json", "<pad>", "<s>")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *names: str(path))
    assert load_tokenizer("some-lab/model-1.5").fingerprint == load_tokenizer(str(path)).fingerprint

    def offline(repository, name):
        raise OSError(f"{repository} has no {name}\nand no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    error = r"^data\.tokenizer: a-lab/gpt .* \(a-lab/gpt has no tokenizer\.json and"
    with pytest.raises(UsageError, match=error):
        load_tokenizer("a-lab/gpt")
    with pytest.raises(UsageError) as error:
        load_tokenizer("tokenizers/llama2-32k.model")
    assert str(error.value).startswith("data.tokenizer: no file tokenizers/llama2-32k.model; give")
    assert f"--set data.tokenizer={HUB}" in str(error.value)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with one tokenizer, of Llama 2's special tokens and number of ids; who was asked for it."""
    import huggingface_hub

    asked: list[str] = []
    path = json_tokenizer(tmp_path / "llama.json", "<s>", "</s>", more=32_000 - 5)
    download = lambda repository, name: asked.append(repository) or str(path)  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def test_every_study_has_room_for_the_tokenizer_that_it_names(hub):
    naming = [name for name, path in known_studies().items() if HUB in path.read_text()]
    assert {"ablation", "language", "long_context"} <= set(naming)
    for study in map(load_study, naming):
        # a search has no rows; its cells are the base's
        for scale, row in itertools.product(study.scales, study.rows[:1]):
            run = resolve(study, scale, row)
            if not run.data.tokenizer.endswith(".json"):  # a file that its user makes
                check_vocabulary(run, NextToken(run, None).tokenizer())
    assert set(hub) == {HUB}


@pytest.mark.usefixtures("hub")
def test_too_few_ids_are_refused_before_the_data_are_asked_for(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(sources.HubSource, "__init__", lambda *_: pytest.fail("the data were asked for"))
    data = {"tokenizer": HUB, "sources": [{"kind": "hub", "dataset": "some/corpus"}]}
    (tmp_path / "run.yaml").write_text(json.dumps({"model": {"vocab_size": 31_999}, "data": data}))
    error = refused("data", "prepare", tmp_path / "run.yaml", "--root", tmp_path / "root")
    assert f"model.vocab_size: 31999 is less than the 32000 of tokenizer {HUB}" in error


def test_text_within_a_row_has_no_space_of_a_document_start(tmp_path):
    words = {piece: i for i, piece in enumerate(["<unk>", "\u2581", "\u2581\u2581", "\n", *"is:74a"])}
    llama = Tokenizer(models.BPE(words, [("\u2581", "\u2581")], unk_token="<unk>"))
    space = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    llama.normalizer = normalizers.Sequence(space)
    llama.save(str(path := tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(path))
    whole = tokenizer.encode("is: 74")
    item = make_item([("is:", False), (" 74", True)])
    assert encode_item(item, tokenizer, 1 + len(whole))[0][1:] == whole
    assert count_tokens(item, tokenizer) == 1 + len(whole)
    byte = load_tokenizer("byte")
    assert (byte.adds_space, byte.encode_within(" 74")) == (False, byte.encode(" 74"))
