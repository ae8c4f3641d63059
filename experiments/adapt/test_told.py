"""Facts inserted into texts: asked for twice, in the given distance, and with none of the measured words."""

import random
import re

import pytest

from experiments.adapt import measure, told


@pytest.mark.parametrize("part", ["NAMES", "WORDS", "KINDS"])
def test_training_and_measuring_share_no_word(part):
    assert set(getattr(told, part)).isdisjoint(getattr(measure, part))


def test_facts_are_told_before_they_are_asked_for_and_the_text_stays():
    plain = "word " * 20_000
    text = told.with_facts(plain, random.Random(0))
    sentences = re.findall(r"\n\n(.*?)\n\n", text)
    assert re.sub(r"\n\n.*?\n\n", "", text) == plain
    asked = [
        s for s in sentences if re.match(r"Now,|As we know|The .* (that .* chose|of .*) was|Question", s)
    ]
    facts = len(sentences) - len(asked)
    assert facts == int(len(plain) / told.CHARACTERS / told.EVERY)
    assert facts < len(asked) <= 2 * facts
    for sentence in asked:
        word = re.findall(r'"(\w+)"', sentence)[-1]
        before = text[: text.index(sentence)]
        assert f'"{word}"' in before
