"""Questions about a small world, after bAbI (Weston et al. 2015, arXiv 1502.05698).

`style="prose"` is a story in sentences. `style="compact"` is for byte-level models of some 64 to 512
bytes of context: people are A-M, places a-m, things n-z;

    Ak.  A moved to k          A+x.  A got x             A-x.  A dropped x
    ?Ak  where is A? k         ?xk   where is x? k       ?x<kj  where was x before k? j
    ?A@kY  is A at k? Y or N   ?A#2  how many things does A carry? 2
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from titans_core.config import Frozen
from titans_platform.errors import UsageError
from titans_platform.tasks import GeneratedTask, Heuristic
from titans_platform.tasks.items import (
    Item,
    ItemTokenizer,
    Piece,
    fill,
    lowercase_words,
    make_item,
    prose,
    scatter,
)
from titans_platform.tasks.story import (
    HEURISTICS,
    MARKS,
    NUMBERS,
    PEOPLE,
    PLACES,
    THINGS,
    VERBS,
    Fact,
    Guess,
    Kind,
    World,
    read_story,
)

QUESTIONS = {
    "one_fact": ("?{subject}", "Where is {subject}?"),
    "two_facts": ("?{subject}", "Where is the {subject}?"),
    "three_facts": ("?{subject}<{place}", "Where was the {subject} before the {place}?"),
    "yes_no": ("?{subject}@{place}", "Is {subject} in the {place}?"),
    "counting": ("?{subject}#", "How many things is {subject} carrying?"),
}
"""For each kind, the compact question and the one in prose."""
ATTEMPTS = 200
"""Most stories that are drawn to find one with enough distinct answers."""
Story = list[tuple[Fact, str]]
"""Facts, each with its sentence."""
Count = Annotated[int, Field(ge=2, le=13)]


class ReasoningOptions(Frozen):
    """The kind of question, the style of the story, and the size of the world."""

    kind: Kind = "one_fact"
    style: Literal["prose", "compact"] = "prose"
    people: Count = 4
    places: Count = 6
    things: Annotated[int, Field(ge=1, le=13)] = 5
    facts: Annotated[int, Field(ge=1)] | None = None
    """Facts of a story, with filler between them; None: facts fill the row."""
    questions: Annotated[int, Field(ge=1)] = 1
    """The last one ends the row; the others are at random positions in the story."""
    max_count: Annotated[int, Field(ge=1, le=6)] = 2
    """counting: the largest answer."""


class Question(NamedTuple):
    """A question's subject (a person or thing), its place (if any), and the answer."""

    subject: str
    place: str
    answer: str


class Reasoning(GeneratedTask):
    """Answers that follow from the story so far.

    A story is drawn in which several questions with different answers can be asked, and each of these answers
    is equally likely, so the story without the question says little about the answer. A no-question names a
    place where the person has been before, and where somebody else is now.
    """

    name = "reasoning"
    version = 2
    Options = ReasoningOptions

    def __init__(self, options: ReasoningOptions | None = None) -> None:
        super().__init__(options)
        self._compact = self.options.style == "compact"
        letters = "ABCDEFGHIJKLM", "abcdefghijklm", "nopqrstuvwxyz"
        names = letters if self._compact else (PEOPLE, PLACES, THINGS)
        sizes = self.options.people, self.options.places, self.options.things
        self._names = [tuple(known[:size]) for known, size in zip(names, sizes, strict=True)]
        most, things = self.options.max_count, self.options.things
        if self.options.kind == "counting" and most > things:
            raise UsageError(f"options.max_count: {most} exceeds things: {things}")

    @property
    def chance(self) -> float:
        """Accuracy of the most frequent answer; a place in the question is never the answer."""
        places = self.options.places
        return {
            "one_fact": 1 / places, "two_facts": 1 / places, "three_facts": 1 / (places - 1),
            "yes_no": 1 / 2, "counting": 1 / (self.options.max_count + 1),
        }[self.options.kind]  # fmt: skip

    @property
    def heuristics(self) -> Mapping[str, Heuristic]:
        """Guesses that ignore the question, or use one name in it."""

        def read_and_guess(guess: Guess, before: str) -> Sequence[str]:
            return guess(read_story(before, World(*self._names), compact=self._compact))

        return {name: partial(read_and_guess, guess) for name, guess in HEURISTICS[self.options.kind].items()}

    def item(self, rng: random.Random, length: int, tokenizer: ItemTokenizer) -> Item:
        """Generate a story with its questions; filler (compact: lower-case words) takes the rest."""
        story = self._open_story(rng, length, tokenizer)
        if story is None:
            none = f"no story that {length} tokens hold answers {self.options.kind}"
            raise UsageError(f"options.facts: {none}; use longer rows, more facts, or fewer people")
        times, world = [], World(*self._names)
        for time, (fact, _) in enumerate(story, start=1):
            world.apply(fact)
            if self._candidates(world):
                times.append(time)
        # facts before each question; the last question ends the row
        asks = sorted([*rng.choices(times, k=self.options.questions - 1), len(story)])
        *sentences, last = self._tell(rng, story, asks)
        depths = sorted(rng.random() for _ in sentences)
        seed = rng.getrandbits(64)

        def build(characters: int) -> Item:
            filler, borders = self._filler(characters, random.Random(seed))
            if self.options.facts is None:
                borders = [characters]
            offsets = [borders[int(depth * len(borders))] for depth in depths]
            return make_item([*scatter(filler, sentences, offsets), *last])

        return fill(build, length, tokenizer)

    def _open_story(self, rng: random.Random, length: int, tokenizer: ItemTokenizer) -> Story | None:
        """Return the first story with enough distinct answers at its end, or the best of ATTEMPTS stories.

        Returns:
            None if no story has a question at its end.
        """
        most, best, options = 0, None, self.options
        needed = {
            "one_fact": min(options.people, options.places), "two_facts": min(3, options.things),
            "three_facts": 4, "yes_no": 2, "counting": min(options.people, options.max_count + 1),
        }[options.kind]  # fmt: skip
        for _ in range(ATTEMPTS):
            story, world = self._story(rng, length, tokenizer)
            answers = len({question.answer for question in self._candidates(world)})
            if answers > most:
                most, best = answers, story
            if answers >= needed:
                break
        return best

    def _story(self, rng: random.Random, length: int, tokenizer: ItemTokenizer) -> tuple[Story, World]:
        """Facts and their sentences: `options.facts` of them, or as many as leave space for questions.

        Also the world after them.
        """
        things = self.options.kind in ("two_facts", "three_facts", "counting")
        # often enough that counting only what was picked up fails
        drops = 0.5 if self.options.kind == "counting" else 0.15
        world = World(*self._names)
        space = length - 1 - self.options.questions * self._question_cost(tokenizer)
        story: Story = []
        while self.options.facts is None or len(story) < self.options.facts:
            fact = world.next_fact(rng, things=things, drops=drops, alone=self.options.kind != "yes_no")
            sentence = self._sentence(fact, rng)
            space -= len(tokenizer.encode_within(sentence))
            if self.options.facts is None and space < 0:
                break
            world.apply(fact)
            story.append((fact, sentence))
        return story, world

    def _question_cost(self, tokenizer: ItemTokenizer) -> int:
        """Most tokens a question and its answer take."""
        kind = self.options.kind
        person, place, thing = (max(names, key=len) for names in self._names)
        subject = thing if kind in ("two_facts", "three_facts") else person
        answer = {"yes_no": "Y", "counting": "1"}.get(kind, place)
        # other answers are longer by at most this many characters than `one` and `yes`
        slack = 3 if not self._compact and kind in ("yes_no", "counting") else 0
        pieces = self._question(Question(subject, place, answer))
        return slack + sum(len(tokenizer.encode_within(text)) for text, _ in pieces)

    def _candidates(self, world: World) -> list[Question]:
        """Questions that can be asked now."""
        match self.options.kind:
            case "one_fact":
                return [Question(person, "", place) for person, place in world.place_of.items()]
            case "two_facts":
                return [Question(thing, "", visits[-1]) for thing, visits in world.visits.items()]
            case "three_facts":
                moved = ((thing, at, i) for thing, at in world.visits.items() for i in range(1, len(at)))
                return [Question(thing, at[i], at[i - 1]) for thing, at, i in moved if at.count(at[i]) == 1]
            case "yes_no":
                return self._yes_no(world)
            case _:
                counts = ((person, len(world.carried(person))) for person in world.place_of)
                most = self.options.max_count
                return [Question(person, "", str(count)) for person, count in counts if count <= most]

    def _yes_no(self, world: World) -> list[Question]:
        """Places where a person is (yes), or was before while somebody else is there now (no).

        Each place comes with both answers, so the place alone says nothing about the answer.
        """
        questions, places = [], world.place_of.items()
        for person, place in places:
            for other in (who for who, home in places if home != place and place in world.been[who]):
                questions += [Question(person, place, "Y"), Question(other, place, "N")]
        return questions

    def _tell(self, rng: random.Random, story: Story, asks: list[int]) -> Iterator[list[Piece]]:
        """Sentences and questions of the story in order, as pieces."""
        world = World(*self._names)
        before = ""
        for time, (fact, sentence) in enumerate(story, start=1):
            world.apply(fact)
            yield [(sentence, False)]
            while asks and asks[0] == time:
                asks = asks[1:]
                question = self._pose(rng, world, before)
                before = question.subject
                pieces = self._question(question)
                # nothing follows the last answer
                yield pieces if asks else pieces[:-1]

    def _pose(self, rng: random.Random, world: World, before: str) -> Question:
        """Draw a question about `world`, about another subject than `before` if possible.

        All possible answers are equally likely.
        """
        questions = self._candidates(world)
        questions = [question for question in questions if question.subject != before] or questions
        answer = rng.choice(sorted({question.answer for question in questions}))
        questions = [question for question in questions if question.answer == answer]
        if self.options.kind == "counting":
            # otherwise the things that a person picked up are mostly the ones that the person carries
            questions = [question for question in questions if question.subject in world.dropped] or questions
        return rng.choice(questions)

    def _filler(self, characters: int, rng: random.Random) -> tuple[str, Sequence[int]]:
        """Return exactly `characters` characters, and the offsets at which a sentence may be inserted."""
        if self._compact:
            return lowercase_words(rng, characters), range(characters + 1)
        filler = prose(rng, characters - 1) + "\n" if characters else ""
        return filler, [0, *(match.end() for match in re.finditer(r"\. ", filler)), characters]

    def _sentence(self, fact: Fact, rng: random.Random) -> str:
        if self._compact:
            return f"{fact.person}{MARKS[fact.action]}{fact.target}."
        return f"{fact.person} {rng.choice(VERBS[fact.action])} the {fact.target}.\n"

    def _question(self, question: Question) -> list[Piece]:
        """Prompt, answer and separator."""
        subject, place, answer = question
        prompt = QUESTIONS[self.options.kind][not self._compact].format(subject=subject, place=place)
        if self._compact:
            return [(prompt, False), (answer, True), (".", False)]
        if self.options.kind == "counting":
            answer = NUMBERS[int(answer)]
        answer = {"Y": "yes", "N": "no"}.get(answer, answer)
        return [(prompt, False), (f" {answer}", True), ("\n", False)]
