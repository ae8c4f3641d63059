"""Generation does not depend on how prompts are split, nor on their lengths within a batch."""

import random

import pytest
import torch

from tests.core.small import SWITCHES, VARIANTS, model, tokens
from titans_core import LanguageModel, Reading, Sampling, Writing

WARM = Sampling(temperature=0.7, top_k=30, top_p=0.95, seed=3)


def drawn(variant: str, seed: int) -> tuple[LanguageModel, random.Random]:
    """A model of the variant with all other options random, and the generator for further draws."""
    rng = random.Random(f"{variant}{seed}")
    chunk = rng.choice([1, 2, 3, 5, 8])
    memory = {
        "depth": rng.choice([1, 2, 3]), "chunk_size": chunk, "conv": rng.random() < 0.7,
        "gates_per": rng.choice(["token", "chunk"]),
        "rule": rng.choice(["paper", "paper", SWITCHES["robust"]["rule"]]),
    }  # fmt: skip
    segment, attention = chunk * rng.choice([1, 2, 3]), {"conv": rng.random() < 0.7}
    persistent, window = rng.choice([0, 3]), rng.choice([1, 6, None])
    return model(variant, persistent, window, segment=segment, attention=attention, **memory), rng


def prompts(lengths: list[int]) -> list[list[int]]:
    return [row[:n] for n, row in zip(lengths, tokens(len(lengths), 60).tolist(), strict=True)]


def after(m: LanguageModel, reading: Reading, probe: list[int]) -> torch.Tensor:
    """Logits of every token of ``probe``, as a continuation of a sequence."""
    with torch.no_grad():
        out = m(torch.tensor([[*reading.ahead, *probe]]), reading.state)
    return out.logits[0, -len(probe) :]


def collected(writing: Writing, rows: int) -> list[list[int]]:
    written: list[list[int]] = [[] for _ in range(rows)]
    for row, token in writing:
        written[row].append(token)
    return written


def alone(m: LanguageModel, known: list[int], n: int) -> list[int]:
    """Greedy continuation by n tokens, with the whole sequence recomputed for each."""
    with torch.no_grad():
        for _ in range(n):
            known = [*known, int(m(torch.tensor([known])).logits[0, -1].argmax())]
    return known[len(known) - n :]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_pieces_and_steps_are_one_reading(variant, seed):
    m, rng = drawn(variant, seed)
    (text,) = prompts([rng.randint(20, 45)])
    reading, at = Reading(), 0
    while at < len(text):  # single tokens as often as longer pieces
        n = rng.choice([1, 1, rng.randint(1, 20)])
        reading = m.read(text[at : at + n], reading)
        at += n
    assert (reading.tokens, len(reading.ahead)) == (len(text), 1)
    probe = tokens(1, 9, seed=2)[0].tolist()
    with torch.no_grad():
        expected = m(torch.tensor([text + probe])).logits[0, -9:]
    torch.testing.assert_close(after(m, reading, probe), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_of_different_lengths_are_each_as_if_alone(variant, seed):
    m, rng = drawn(variant, seed)
    rows = prompts([rng.randint(1, 25) for _ in range(4)])
    written = collected(writing := m.stream(rows, 6), len(rows))
    probe = tokens(1, 5, seed=2)[0].tolist()
    for row, actual, reading in zip(rows, written, writing.readings, strict=True):
        assert actual == alone(m, row, 6)
        with torch.no_grad():
            expected = m(torch.tensor([row + actual + probe])).logits[0, -5:]
        torch.testing.assert_close(after(m, reading, probe), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_row_draws_does_not_depend_on_its_neighbours(variant):
    m, rows = model(variant), prompts([9, 4, 17])
    result = m.generate(rows, 8, sampling=WARM)
    assert result == m.generate(rows, 8, sampling=WARM)
    for i, row in enumerate(rows):
        assert m.generate([row], 8, sampling=WARM.model_copy(update={"seed": WARM.seed + i})) == [result[i]]
    assert result != m.generate(rows, 8, sampling=WARM.model_copy(update={"seed": 99}))


def test_every_token_is_read_once_and_a_written_one_by_itself():
    m, calls = model("lmm"), []

    def counted(tokens_BT, state, last):
        calls.append(tuple(tokens_BT.shape))
        return m(tokens_BT, state, last=last)

    assert len(list(Writing(counted, prompts([10, 30, 12]), 5))) == 15
    # the shortest generates five tokens while the others read on; the longest reads its rest in one piece
    assert calls == [(3, 10), *[(3, 1)] * 4, *[(2, 1)] * 2, (1, 14), *[(1, 1)] * 4]


def test_long_prompt_is_read_in_pieces_and_bad_input_is_one_line(monkeypatch):
    monkeypatch.setattr("titans_core.generation.PREFILL_TOKENS", 7)
    m, rows = model("mac"), prompts([33, 41])
    assert m.generate(rows, 4) == [alone(m, row, 4) for row in rows]
    m = model("lmm")
    with pytest.raises(ValueError, match="max_new_tokens: 0 is less than 1"):
        m.generate([[1]], 0)
    with pytest.raises(ValueError, match="prompts: row 1 is empty; it needs at least one token"):
        m.generate([[1], []], 3)


def test_reading_and_an_ended_row_can_be_continued_repeatedly():
    m, (book, *questions) = model("mac"), prompts([40, 5, 3, 0])
    read = m.read(book)
    first = m.generate(questions, 6, start=read)
    assert first == [alone(m, book + question, 6) for question in questions]
    assert first == m.generate(questions, 6, start=read)
    m, (prompt,) = model("mag"), prompts([13])
    writing = m.stream([prompt], 5)
    head = [token for _, token in writing]
    assert m.generate([[]], 7, start=writing.readings[0]) == [alone(m, prompt + head, 7)]


def test_stop_tokens_and_a_reader_end_a_row():
    m, rows = model("lmm"), prompts([8, 11])
    whole = m.generate(rows, 12)
    stop = whole[0][4]
    cut = [row[: row.index(stop)] if stop in row else row for row in whole]
    writing = m.stream(rows, 12, stop=[stop])
    assert collected(writing, 2) == cut
    assert writing.readings[0].tokens == 8 + len(cut[0])
    m, rows, actual = model("lmm"), prompts([8, 11]), [[], []]
    writing = m.stream(rows, 9)
    for row, token in writing:
        actual[row].append(token)
        if len(actual[0]) == 3:
            writing.end(0)
    assert actual == [alone(m, rows[0], 3), alone(m, rows[1], 9)]


@pytest.mark.parametrize(("options", "kept"), [
    ({}, 5), ({"top_k": 2}, 2), ({"top_p": 0.5}, 2), ({"top_p": 1e-9}, 1), ({"top_k": 3, "top_p": 0.75}, 2),
])  # fmt: skip
def test_tokens_are_drawn_as_often_as_they_are_likely(options, kept):
    p = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64)
    likeliest = p.argsort(descending=True)[:kept]
    expected = torch.zeros_like(p).index_put((likeliest,), p[likeliest] / p[likeliest].sum())
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    sampling = Sampling(temperature=2.0, **options)
    actual = sampling.draw((2 * p.log()).expand(1000, -1), grid).bincount(minlength=5) / 1000
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-3)
