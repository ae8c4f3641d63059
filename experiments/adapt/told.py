"""Insert facts and questions about them into texts: `python experiments/adapt/told.py IN.jsonl OUT.jsonl`.

A fact is asked for twice, 250 to 1,500 tokens later. Names, words and kinds differ from the measured ones, so
that what is learnt is to remember.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from bisect import bisect
from pathlib import Path

NAMES = re.findall(
    r"\w+",
    """
    Alice Bruno Clara David Edith Frank Greta Henry Irene James Laura Martin Nora Oscar Paula Quentin
    Ruth Stefan Thomas Ursula Vera Walter Xenia Yvonne Zoe Albert Bertha Conrad Doris Ernest Flora
    George Helen Isaac Julia Kurt Louis Mabel Norman Otto
    """,
)
WORDS = re.findall(
    r"\w+",
    """
    apple basket candle desert engine feather garden hammer island jacket kettle ladder mirror needle
    oyster pepper rabbit silver tunnel umbrella valley winter yellow zebra bottle carpet dragon elephant
    forest ginger helmet insect jungle kitchen lemon magnet napkin ocean paper pocket rocket saddle
    temple turtle vessel wagon wizard barley bridge button cherry circle cotton crystal diamond dolphin
    eagle flower fossil honey hunter iron jewel lizard market monkey mountain nickel olive onion orange
    palace parrot pearl pencil piano planet potato purple ribbon river salmon shadow spider spring sugar
    summer thistle tiger timber tobacco tomato tower trumpet tulip turnip village violin walrus whistle
    window
    """,
)
KINDS = (
    "key", "answer", "nickname", "signal", "motto", "call sign", "first choice", "lucky word", "label",
    "hidden word", "ship", "token",
)  # fmt: skip
TOLD = (
    'Please remember this: {name}\'s {kind} is "{word}".', 'Note that {name}\'s {kind} is "{word}".',
    '{name} said that the {kind} was "{word}".', 'The {kind} of {name} is "{word}".',
    '{name}\'s {kind} is "{other}". No, that was wrong: {name}\'s {kind} is "{word}".',
    '{name}\'s {kind} is "{word}". {second}\'s {kind} is "{other}".',
    '{second}\'s {kind} is "{other}". {name}\'s {kind} is "{word}".',
)  # fmt: skip
ASKED = (
    'Now, {name}\'s {kind} is "{word}".', 'As we know, {name}\'s {kind} is "{word}".',
    'The {kind} that {name} chose was "{word}".', 'The {kind} of {name} was "{word}".',
    'Question: what is {name}\'s {kind}? Answer: "{word}".',
)  # fmt: skip
CHARACTERS = 4.2
"""Of a token of English prose."""
EVERY = 350
"""Tokens of text for each fact."""


def with_facts(text: str, rng: random.Random) -> str:
    """Insert facts, and two questions about each, between the words of a text."""
    gaps = [match.start() for match in re.finditer(r"\s+", text)]
    inserted: dict[int, list[str]] = {}

    def insert(at: float, sentence: str) -> None:
        inserted.setdefault(gaps[min(bisect(gaps, at), len(gaps) - 1)], []).append(sentence)

    for _ in range(int(len(text) / CHARACTERS / EVERY)):
        name, second = rng.sample(NAMES, 2)
        word, other = rng.sample(WORDS, 2)
        names = {"name": name, "second": second, "kind": rng.choice(KINDS), "word": word, "other": other}
        at = rng.uniform(0, len(text))
        insert(at, rng.choice(TOLD).format(**names))
        for _ in range(2):
            later = at + CHARACTERS * 250 * 6 ** rng.random()
            if later < len(text):
                insert(later, rng.choice(ASKED).format(**names))
    pieces, start = [], 0
    for gap in sorted(inserted):
        pieces += [text[start:gap], *(f"\n\n{sentence}\n\n" for sentence in inserted[gap])]
        start = gap
    return "".join([*pieces, text[start:]])


def main() -> None:
    """Read the command line and write the texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    with given.texts.open(encoding="utf-8") as texts, given.out.open("w", encoding="utf-8") as out:
        for line in texts:
            record = json.loads(line)
            # a seed a text: the others stay as they are if one changes
            text = with_facts(record["text"], random.Random(f"3 {len(record['text'])}"))
            out.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
