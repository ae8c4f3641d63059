"""Questions over a small world, in the manner of bAbI (Weston et al. 2015, arXiv 1502.05698), own code.

`style="prose"` is a story in sentences. `style="compact"` is for byte-level models of some 64 to 512
bytes of context: people are A-M, places a-m, things n-z;

    Ak.  A moved to k          A+x.  A got x             A-x.  A dropped x
    ?Ak  where is A? k         ?xk   where is x? k       ?x<kj  where was x before k? j
    ?A@kY  is A at k? Y or N   ?A#2  how many things does A carry? 2
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from titans_core.config import Frozen
from titans_platform.errors import UsageError
from titans_platform.evals.items import Item, Tokenizer, fill, item_of, murmur, prose, scatter
from titans_platform.evals.registry import GeneratedTask, register

Kind = Literal["one_fact", "two_facts", "three_facts", "yes_no", "counting"]

PEOPLE = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jacob",
          "Karin", "Lucas", "Maria")  # fmt: skip
PLACES = ("kitchen", "garden", "office", "hallway", "bathroom", "bedroom", "library", "cellar", "attic",
          "garage", "balcony", "pantry", "studio")  # fmt: skip
THINGS = ("apple", "football", "milk", "newspaper", "umbrella", "bottle", "teapot", "wallet", "camera",
          "banana", "key", "vase", "scarf")  # fmt: skip
VERBS = {
    "move": ("went to", "moved to", "travelled to", "walked to"),
    "get": ("got", "picked up", "took", "grabbed"),
    "drop": ("dropped", "put down", "left", "discarded"),
}
MARKS = {"move": "", "get": "+", "drop": "-"}
QUESTIONS = {
    "one_fact": ("?{subject}", "Where is {subject}?"),
    "two_facts": ("?{subject}", "Where is the {subject}?"),
    "three_facts": ("?{subject}<{place}", "Where was the {subject} before the {place}?"),
    "yes_no": ("?{subject}@{place}", "Is {subject} in the {place}?"),
    "counting": ("?{subject}#", "How many things is {subject} carrying?"),
}
"""Of each kind, in compact style and in prose."""
NUMBERS = ("none", "one", "two", "three", "four", "five", "six")
ATTEMPTS = 2000
Count = Annotated[int, Field(ge=2, le=13)]


class ReasoningOptions(Frozen):
    """The kind of question, the style of the story, and the size of the world."""

    kind: Kind = "one_fact"
    style: Literal["prose", "compact"] = "prose"
    people: Count = 4
    places: Count = 6
    things: Annotated[int, Field(ge=1, le=13)] = 3
    facts: Annotated[int, Field(ge=1)] | None = None
    """Facts of a story, the rest of the row being filler between them; None: facts fill the row."""
    questions: Annotated[int, Field(ge=1)] = 1
    """The last one ends the row; further ones stand anywhere in the story."""
    max_count: Annotated[int, Field(ge=1, le=6)] = 2
    """counting: answers are 0 to this, equally often."""


class Fact(NamedTuple):
    """One thing that happened: `person` moved to place `target`, or got or dropped thing `target`."""

    action: Literal["move", "get", "drop"]
    person: str
    target: str


class World:
    """People who walk between places, pick things up and put them down; stories are its history.

    It is what is known after the facts so far: a person or thing no fact has named is nowhere.
    """

    def __init__(self, people: Sequence[str], places: Sequence[str], things: Sequence[str]) -> None:
        self.people, self.places, self.things = people, places, things
        # where each person is
        self.place_of: dict[str, str] = {}
        # who carries each thing seen so far; None: it lies where it was put down
        self.holder_of: dict[str, str | None] = {}
        # places each thing has been at, in order, without immediate repeats
        self.visits: dict[str, list[str]] = {}
        # where someone went last
        self.latest_place = ""

    def apply(self, fact: Fact) -> None:
        """Update the state by `fact`."""
        if fact.action == "move":
            self.place_of[fact.person] = self.latest_place = fact.target
            for thing in self.carried(fact.person):
                self.visits[thing].append(fact.target)
        elif fact.action == "get":
            self.holder_of[fact.target] = fact.person
            self.visits.setdefault(fact.target, [self.place_of[fact.person]])
        else:
            self.holder_of[fact.target] = None

    def carried(self, person: str) -> list[str]:
        """Things `person` carries."""
        return [thing for thing, holder in self.holder_of.items() if holder == person]

    def reachable(self, person: str) -> list[str]:
        """Things `person` could pick up here: those lying here, and those nobody has seen yet."""
        here = self.place_of[person]
        lying = [thing for thing in self.things if self.holder_of.get(thing) is None]
        return [thing for thing in lying if self.visits.get(thing, [here])[-1] == here]

    def next_fact(self, rng: random.Random, *, things: bool) -> Fact:
        """Something that may happen now; `things`: picking up and putting down too."""
        person = rng.choice(self.people)
        here = self.place_of.get(person)
        if things and here is not None:
            roll = rng.random()
            if roll < 0.35 and (near := self.reachable(person)):
                return Fact("get", person, rng.choice(near))
            if roll > 0.85 and (held := self.carried(person)):
                return Fact("drop", person, rng.choice(held))
        return Fact("move", person, rng.choice([place for place in self.places if place != here]))


class Question(NamedTuple):
    """Whom or what is asked about, the second name the question holds if any, and the answer."""

    subject: str
    place: str
    answer: str


@register
class Reasoning(GeneratedTask):
    """Answers that follow from the story so far.

    Answers are balanced: yes and no, and every count, are drawn before the story is made to fit; places
    are interchangeable, so each is the answer equally often, and the latest no more often than the others.
    """

    name = "reasoning"
    Options = ReasoningOptions

    def __init__(self, options: ReasoningOptions | None = None) -> None:
        super().__init__(options)
        self._compact = self.options.style == "compact"
        letters = "ABCDEFGHIJKLM", "abcdefghijklm", "nopqrstuvwxyz"
        names = letters if self._compact else (PEOPLE, PLACES, THINGS)
        sizes = self.options.people, self.options.places, self.options.things
        self._names = [tuple(known[:size]) for known, size in zip(names, sizes, strict=True)]
        if self.options.kind == "counting" and self.options.max_count > self.options.things:
            raise UsageError(
                f"options.max_count: {self.options.max_count} exceeds things: {self.options.things}"
            )

    @property
    def chance(self) -> float:
        """What the commonest answer gets; a place named in the question is never its answer."""
        places = self.options.places
        return {
            "one_fact": 1 / places,
            "two_facts": 1 / places,
            "three_facts": 1 / (places - 1),
            "yes_no": 1 / 2,
            "counting": 1 / (self.options.max_count + 1),
        }[self.options.kind]

    def item(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> Item:
        """A story with its questions; filler (compact: small letters) takes what is left of the row."""
        targets = [self._draw_target(rng) for _ in range(self.options.questions)]
        for _ in range(ATTEMPTS):
            story = self._story(rng, length, tokenizer)
            asks = self._place_asks(rng, story, targets)
            if asks is not None:
                break
        else:
            raise UsageError(
                f"options.facts: no story that {length} tokens hold answers {self.options.kind};"
                " use longer rows, more facts, or fewer people"
            )
        *sentences, last = self._tell(rng, story, asks)
        depths = sorted(rng.random() for _ in sentences)
        seed = rng.getrandbits(64)

        def build(characters: int) -> Item:
            filler, borders = self._filler(characters, random.Random(seed))
            if self.options.facts is None:
                borders = [characters]
            offsets = [borders[int(depth * len(borders))] for depth in depths]
            return item_of([*scatter(filler, sentences, offsets), *last])

        return fill(build, length, tokenizer)

    def _draw_target(self, rng: random.Random) -> str | None:
        """The answer a question must have; None: whatever it is."""
        if self.options.kind == "yes_no":
            return rng.choice("YN")
        if self.options.kind == "counting":
            return str(rng.randint(0, self.options.max_count))
        return None

    def _story(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> list[tuple[Fact, str]]:
        """Facts with their sentences: `options.facts`, or as many as leave space for the questions."""
        things = self.options.kind in ("two_facts", "three_facts", "counting")
        world = World(*self._names)
        space = length - 1 - self.options.questions * self._question_cost(tokenizer)
        story: list[tuple[Fact, str]] = []
        while self.options.facts is None or len(story) < self.options.facts:
            fact = world.next_fact(rng, things=things)
            sentence = self._sentence(fact, rng)
            space -= len(tokenizer.encode(sentence))
            if self.options.facts is None and space < 0:
                break
            world.apply(fact)
            story.append((fact, sentence))
        return story

    def _question_cost(self, tokenizer: Tokenizer) -> int:
        """Most tokens a question and its answer take."""
        kind = self.options.kind
        person, place, thing = (max(names, key=len) for names in self._names)
        subject = thing if kind in ("two_facts", "three_facts") else person
        answer = {"yes_no": "Y", "counting": "1"}.get(kind, place)
        # three: how much longer than `one` or `yes` a number can be, in characters
        slack = 3 if not self._compact and kind in ("yes_no", "counting") else 0
        pieces = self._question(Question(subject, place, answer))
        return slack + sum(len(tokenizer.encode(text)) for text, _ in pieces)

    def _place_asks(
        self, rng: random.Random, story: list[tuple[Fact, str]], targets: list[str | None]
    ) -> list[tuple[int, str | None]] | None:
        """After how many facts each question is put, where it can have its target; None where one cannot."""
        times: dict[str | None, list[int]] = {target: [] for target in targets}
        world = World(*self._names)
        for time, (fact, _) in enumerate(story, start=1):
            world.apply(fact)
            for target, feasible in times.items():
                if self._candidates(world, target):
                    feasible.append(time)
        asks = []
        for index, target in enumerate(targets):
            feasible = times[target]
            if index == len(targets) - 1:
                # it ends the row
                feasible = [time for time in feasible if time == len(story)]
            if not feasible:
                return None
            asks.append((rng.choice(feasible), target))
        return sorted(asks, key=lambda ask: ask[0])

    def _candidates(self, world: World, target: str | None) -> list[Question]:
        """What can be asked now with `target` as the answer."""
        match self.options.kind:
            case "one_fact":
                return [Question(person, "", place) for person, place in world.place_of.items()]
            case "two_facts":
                return [Question(thing, "", visits[-1]) for thing, visits in world.visits.items()]
            case "three_facts":
                return [
                    Question(thing, place, visits[i])
                    for thing, visits in world.visits.items()
                    for i, place in enumerate(visits[1:])
                    if visits.count(place) == 1
                ]
            case "yes_no":
                return self._yes_no(world, target == "Y")
            case _:
                people = [person for person in world.place_of if str(len(world.carried(person))) == target]
                return [Question(person, "", str(target)) for person in people]

    def _yes_no(self, world: World, yes: bool) -> list[Question]:
        """Questions with that answer, over pairs of people who are apart.

        yes names the one's own place, no the other's: person and place alone then say nothing about
        the answer, each pair of them being asked about as often with either.
        """
        places = world.place_of.items()
        others = [(person, here, there) for person, here in places for there in world.place_of.values()]
        apart = [(person, here if yes else there) for person, here, there in others if here != there]
        if not apart:
            # everyone is in one place: any other will do
            apart = [(person, p) for person, here in places for p in world.places if (p == here) == yes]
        return [Question(person, place, "Y" if yes else "N") for person, place in apart]

    def _tell(
        self, rng: random.Random, story: list[tuple[Fact, str]], asks: list[tuple[int, str | None]]
    ) -> Iterator[list[tuple[str, bool]]]:
        """The story's sentences and questions in order, each as pieces."""
        world = World(*self._names)
        before = ""
        for time, (fact, sentence) in enumerate(story, start=1):
            world.apply(fact)
            yield [(sentence, False)]
            while asks and asks[0][0] == time:
                (_, target), *asks = asks
                question = self._pose(rng, world, target, before)
                before = question.subject
                pieces = self._question(question)
                # nothing follows the last answer
                yield pieces if asks else pieces[:-1]

    def _pose(self, rng: random.Random, world: World, target: str | None, before: str) -> Question:
        """A question that holds in `world`, on another subject than `before` where there is one.

        The place named last is the answer no more often than any other: guessing it gives chance.
        """
        questions = self._candidates(world, target)
        questions = [question for question in questions if question.subject != before] or questions
        if self.options.kind in ("one_fact", "two_facts"):
            latest = rng.random() < 1 / self.options.places
            fitting = [q for q in questions if (q.answer == world.latest_place) == latest]
            questions = fitting or questions
        return rng.choice(questions)

    def _filler(self, characters: int, rng: random.Random) -> tuple[str, Sequence[int]]:
        """Exactly `characters` characters, and the places at which a sentence may stand."""
        if self._compact:
            return murmur(rng, characters), range(characters + 1)
        filler = prose(rng, characters - 1) + "\n" if characters else ""
        return filler, [0, *(match.end() for match in re.finditer(r"\. ", filler)), characters]

    def _sentence(self, fact: Fact, rng: random.Random) -> str:
        if self._compact:
            return f"{fact.person}{MARKS[fact.action]}{fact.target}."
        return f"{fact.person} {rng.choice(VERBS[fact.action])} the {fact.target}.\n"

    def _question(self, question: Question) -> list[tuple[str, bool]]:
        """Prompt, answer, and what separates it from what follows."""
        subject, place, answer = question
        compact, plain = QUESTIONS[self.options.kind]
        prompt = (compact if self._compact else plain).format(subject=subject, place=place)
        if self._compact:
            return [(prompt, False), (answer, True), (".", False)]
        if self.options.kind == "counting":
            answer = NUMBERS[int(answer)]
        answer = {"Y": "yes", "N": "no"}.get(answer, answer)
        return [(prompt, False), (f" {answer}", True), ("\n", False)]
