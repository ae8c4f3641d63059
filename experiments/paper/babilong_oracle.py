"""An oracle with the facts of BABILong's rows scores 1, a guesser chance, from 0K to 128K tokens.

`python -m experiments.paper.babilong_oracle BABI BOOKS TOKENIZER`, with a folder or archive of bAbI, a
file of books and a tokenizer as `data.tokenizer` names one.
"""

import random
import re
import sys

from titans_platform.config import TaskConfig
from titans_platform.data import Tokenizer, load_tokenizer
from titans_platform.tasks import build_generated
from titans_platform.tasks.babi import Babilong, split_question
from titans_platform.tasks.items import count_tokens

KINDS = ("qa1", "qa2", "qa4", "qa5")
LENGTHS = (0, 1024, 4096, 16_384, 131_072)
ITEMS = 10


class Oracle:
    """Finds the facts in a row, and says what the story with these facts and this question answers."""

    def __init__(self, task: Babilong):
        told = [split_question(item) for item in task._questions()]
        self.known = {(tuple(facts), asked): answer for facts, asked, answer in told}
        self.answers = sorted({answer for _, _, answer in told})
        facts = sorted({fact for facts, _, _ in told for fact in facts}, key=len, reverse=True)
        self.fact = re.compile("|".join(map(re.escape, facts)))

    def answer(self, before: str) -> str | None:
        """Return the answer that the text up to it decides."""
        text, _, asked = before.rpartition("\nQuestion: ")
        return self.known.get((tuple(self.fact.findall(text)), asked.partition("\n")[0]))


def shares(task: Babilong, length: int, tokenizer: Tokenizer) -> tuple[float, float]:
    """Right answers of the oracle, and of one who draws among all answers, a hundred times an item."""
    oracle, rng = Oracle(task), random.Random(0)
    right, guessed = [], []
    for seed in range(ITEMS):
        item = task.item(random.Random(seed), length or 4096, tokenizer)
        assert not length or length - 8 <= count_tokens(item, tokenizer) <= length
        ((before, answer),) = item.questions()
        right.append(f" {oracle.answer(before)}" == answer)
        guessed += [f" {rng.choice(oracle.answers)}" == answer for _ in range(100)]
    return sum(right) / len(right), sum(guessed) / len(guessed)


def main(babi: str, books: str, name: str) -> None:
    """Print a line for each kind and length."""
    tokenizer = load_tokenizer(name)
    print(f"{'':<4} {'tokens':>8} {'oracle':>7} {'guess':>6} {'chance':>7}")
    for kind in KINDS:
        for length in LENGTHS:
            options = {"path": babi, "books": books if length else None, "kind": kind, "part": "last"}
            task = build_generated(TaskConfig(task="babilong", options=options))
            assert isinstance(task, Babilong)
            right, guessed = shares(task, length, tokenizer)
            print(f"{kind:<4} {length:>8,} {right:>7.0%} {guessed:>6.1%} {task.chance:>7.1%}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
