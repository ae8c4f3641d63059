"""A memory file restores the state bit for bit, and only into the model that wrote it."""

import json
import os
import random
import struct
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.core.small import SWITCHES, VARIANTS, config, model, storages, tokens
from titans_core import LanguageModel, Reading
from titans_core.memory_file import load_memory, model_hash, save_memory

TEXT = tokens(1, 45)[0].tolist()


def saved(folder: Path, variant: str = "lmm") -> tuple[LanguageModel, Path]:
    """A model that has read `TEXT`, and its memory file."""
    m, path = model(variant), folder / "a.memory"
    save_memory(path, m.read(TEXT), m)
    return m, path


KINDS = ["robust", "gates_per_chunk", "no_conv", "linear", "write_budget", "forget_to_initial"]


@pytest.mark.parametrize(("variant", "switch", "length"), [
    # fresh, in a chunk, on its boundary, on a segment's
    *product(VARIANTS, ["default"], [1, 2, 17, 25, 45]), *product(["mac"], KINDS, [38]),
])  # fmt: skip
def test_saved_state_continues_bit_for_bit(variant, switch, length, tmp_path):
    m, path = model(variant, **SWITCHES[switch]), tmp_path / "a.memory"
    reading = m.read(TEXT[:length])
    assert save_memory(path, reading, m) == path.stat().st_size
    loaded = load_memory(path, m)
    assert (loaded.tokens, loaded.ahead) == (length, reading.ahead)
    assert storages(loaded.state) == storages(reading.state)
    assert type(loaded.state) is type(reading.state)
    probe = torch.tensor([[*reading.ahead, *TEXT[:13]]])
    with torch.no_grad():
        assert torch.equal(m(probe, loaded.state).logits, m(probe, reading.state).logits)


def test_copies_of_a_file_and_the_format_without_a_checksum_are_read(tmp_path):
    (m, path), fork = saved(tmp_path, "mal"), tmp_path / "b.memory"
    fork.write_bytes(path.read_bytes())
    save_memory(fork, m.read([1, 2, 3], load_memory(fork, m)), m)
    assert (load_memory(path, m).tokens, load_memory(fork, m).tokens) == (45, 48)
    assert m.generate([[7]], 5, start=load_memory(path, m)) == m.generate([[*TEXT, 7]], 5)
    m, path = saved(tmp_path)
    path.write_bytes(older(path.read_bytes()))
    assert load_memory(path, m).tokens == 45


def test_another_model_is_refused_and_a_failed_write_leaves_the_file(tmp_path, monkeypatch):
    m, path = saved(tmp_path)
    others = [model("lmm"), model("lmm", max_theta=0.2), LanguageModel(config("lmm"))]
    with torch.no_grad():
        others[0].head.weight[3, 5] += 1e-12
    for other in others:
        with pytest.raises(ValueError, match=r"a\.memory: written by another model") as caught:
            load_memory(path, other)
        assert "\n" not in str(caught.value)
    assert model_hash(model("lmm")) == model_hash(m)

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save_memory(path, Reading(None, (1,)), m)
    monkeypatch.undo()
    assert (load_memory(path, m).tokens, os.listdir(tmp_path)) == (45, ["a.memory"])


def rewritten(content: bytes, **about: str | None) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    entries = header["__metadata__"] | about
    header["__metadata__"] = {key: value for key, value in entries.items() if value is not None}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def older(content: bytes, **about: str) -> bytes:
    """The file in the older format without a checksum."""
    return rewritten(content, version="2", checksum=None, **about)


def test_flipped_bit_never_loads_as_another_memory(tmp_path):
    m, path = saved(tmp_path, "mac")
    content, rng = path.read_bytes(), random.Random(0)
    header = 8 + struct.unpack("<Q", content[:8])[0]
    places = [rng.randrange(header) for _ in range(100)] + [rng.randrange(len(content)) for _ in range(50)]
    refused: list[str] = []
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded = load_memory(path, m)
        except ValueError as error:
            refused.append(str(error))
        else:  # spaces that pad the header
            assert storages(loaded.state) == storages(m.read(TEXT).state)
    assert len(refused) > 100
    assert all("a.memory: " in line and "\n" not in line for line in refused)


@pytest.mark.parametrize(("spoil", "says"), [
    (None, "cannot be read as a memory file: No such file"),
    (lambda content: content[:-7], "cannot be read as a memory file: "),
    (lambda content: b"", "cannot be read as a memory file: "),
    (lambda content: rewritten(content, kind="x"), "a safetensors file, but not a memory file"),
    (lambda content: rewritten(content, version="9"), "written in format 9; this version reads format 3"),
    (lambda content: rewritten(content, reading='{"tensor": "x"}'), "damaged: its checksum does not match"),
    (lambda content: rewritten(content, version="2"), "damaged: its checksum does not match"),
    (lambda content: older(content, reading='{"class": "os:system", "fields": {}}'),
     "the state in the file cannot be restored: TypeError"),
])  # fmt: skip
def test_what_is_no_whole_memory_file_is_one_line(spoil, says, tmp_path):
    m, path = saved(tmp_path)
    path.write_bytes(spoil(path.read_bytes())) if spoil else path.unlink()
    with pytest.raises(ValueError, match=rf"a\.memory: {says}") as caught:
        load_memory(path, m)
    assert "\n" not in str(caught.value)
