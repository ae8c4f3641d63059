"""The world of the reasoning tasks: who is where and carries what, and heuristics that read its stories."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from titans_platform.tasks.items import WORDS

Action = Literal["move", "get", "drop"]
Kind = Literal["one_fact", "two_facts", "three_facts", "yes_no", "counting"]

PEOPLE, PLACES, THINGS = (WORDS[kind] for kind in ("people", "places", "things"))
VERBS: dict[Action, tuple[str, ...]] = {
    "move": ("went to", "moved to", "travelled to", "walked to"),
    "get": ("got", "picked up", "took", "grabbed"),
    "drop": ("dropped", "put down", "left", "discarded"),
}
MARKS: dict[Action, str] = {"move": "", "get": "+", "drop": "-"}
ACTIONS: dict[str, Action] = {word: a for a, mark in MARKS.items() for word in (*VERBS[a], mark)}
_PROSE_VERBS = "|".join(word for words in VERBS.values() for word in words)
PROSE_FACT = re.compile(rf"({'|'.join(PEOPLE)}) ({_PROSE_VERBS}) the (\w+)\.\n")
NUMBERS = ("none", "one", "two", "three", "four", "five", "six")


class Fact(NamedTuple):
    """`person` moved to place `target`, or picked up or dropped thing `target`."""

    action: Action
    person: str
    target: str


class World:
    """People who move between places, pick things up and put them down.

    It holds what the facts so far imply; a person or thing without a fact is nowhere.
    """

    def __init__(self, people: Sequence[str], places: Sequence[str], things: Sequence[str]) -> None:
        self.people, self.places, self.things = people, places, things
        # places where each person has been
        self.been: dict[str, set[str]] = {}
        # people who have put something down
        self.dropped: set[str] = set()
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
            self.been.setdefault(fact.person, set()).add(fact.target)
            for thing in self.carried(fact.person):
                self.visits[thing].append(fact.target)
        elif fact.action == "get":
            self.holder_of[fact.target] = fact.person
            self.visits.setdefault(fact.target, [self.place_of[fact.person]])
        else:
            self.holder_of[fact.target] = None
            self.dropped.add(fact.person)

    def carried(self, person: str) -> list[str]:
        """Things `person` carries."""
        return [thing for thing, holder in self.holder_of.items() if holder == person]

    def reachable(self, person: str) -> list[str]:
        """List the things that `person` could pick up here: those here and those without a fact so far."""
        place = self.place_of[person]
        lying = [thing for thing in self.things if self.holder_of.get(thing) is None]
        return [thing for thing in lying if self.visits.get(thing, [place])[-1] == place]

    def next_fact(self, rng: random.Random, *, things: bool, drops: float, alone: bool) -> Fact:
        """Draw a random fact that is possible now.

        Args:
            rng: what it is drawn with.
            things: people also pick things up and put them down.
            drops: probability that somebody who holds a thing puts one down.
            alone: people go where nobody is, if there is such a place.
        """
        person = rng.choice(self.people)
        current = self.place_of.get(person)
        if things and current is not None:
            roll = rng.random()
            if roll < 0.35 and (near := self.reachable(person)):
                return Fact("get", person, rng.choice(near))
            if roll > 1 - drops and (held := self.carried(person)):
                return Fact("drop", person, rng.choice(held))
        others = [place for place in self.places if place != current]
        taken = set(self.place_of.values()) if alone else set()
        return Fact("move", person, rng.choice([place for place in others if place not in taken] or others))


class ParsedStory(NamedTuple):
    """A story and a question as the heuristics see them."""

    facts: list[Fact]
    history: list[str]
    """Places in the order in which people went there."""
    world: World
    subject: str
    """The first name in the question."""
    place: str
    """The last name in the question."""
    words: dict[str, str]
    """yes, no and numbers as the style writes them."""


Guess = Callable[[ParsedStory], Sequence[str]]
"""The answers that a heuristic guesses among."""


def commonest(names: Iterable[str]) -> list[str]:
    """Return the names that occur most often."""
    counts = Counter(names)
    return [name for name, count in counts.items() if count == max(counts.values())]


def _place_before(story: ParsedStory, target: str) -> list[str]:
    """Return the place named last before the last fact about ``target``."""
    last = max((i for i, fact in enumerate(story.facts) if fact.target == target), default=0)
    return [fact.target for fact in story.facts[:last] if fact.action == "move"][-1:]


def _picked_up(story: ParsedStory, less: int) -> list[str]:
    """Return the word for the number of things that the person picked up, minus ``less``."""
    count = sum(fact.person == story.subject and fact.action == "get" for fact in story.facts)
    return [story.words[str(min(max(count - less, 0), 6))]]


def _yes_if(holds: Callable[[ParsedStory], bool]) -> Guess:
    return lambda story: [story.words["yes" if holds(story) else "no"]]


def read_story(before: str, world: World, *, compact: bool) -> ParsedStory:
    """Facts and question of the text before an answer; the facts are applied to a new ``world``."""
    if compact:
        text, question = before.rsplit("?", 1)
        matches = re.findall(r"([A-M])([+-]?)([a-z])\.", re.sub(r"\?[^.]*\.", "", text))
        names = [name for name in question if name.isalpha()]
        words = {"yes": "Y", "no": "N"} | {str(n): str(n) for n in range(len(NUMBERS))}
    else:
        text, question = before.rsplit("\n", 1)
        matches = PROSE_FACT.findall(text + "\n")
        names = re.findall("|".join(PEOPLE + PLACES + THINGS), question)
        words = {"yes": "yes", "no": "no"} | {str(n): name for n, name in enumerate(NUMBERS)}
    facts = [Fact(ACTIONS[word], person, target) for person, word, target in matches]
    for fact in facts:
        world.apply(fact)
    history = [fact.target for fact in facts if fact.action == "move"]
    return ParsedStory(facts, history, world, names[0], names[-1], words)


def _carried(story: ParsedStory) -> list[int]:
    """Return the number of things that each person carries."""
    return [len(story.world.carried(person)) for person in story.world.place_of]


def _counts(story: ParsedStory) -> list[str]:
    return [story.words[str(count)] for count in _carried(story)]


def _place_guesses(one: str, all_of: str, places: Callable[[ParsedStory], list[str]]) -> dict[str, Guess]:
    """Guesses among the places of all people or things; ``one`` and ``all_of`` name whose."""
    return {
        "the place named last": lambda story: story.history[-1:],
        f"{one} place": places,
        f"the commonest of {all_of} places": lambda story: commonest(places(story)),
        f"the commonest of {all_of} places but the last": lambda story: commonest(
            place for place in places(story) if place != story.world.latest_place
        ),
    }


HEURISTICS: dict[Kind, dict[str, Guess]] = {
    "one_fact": _place_guesses("a person's", "the people's", lambda told: [*told.world.place_of.values()]),
    "two_facts": {
        **_place_guesses(
            "a thing's", "the things'", lambda told: [visits[-1] for visits in told.world.visits.values()]
        ),
        "the place named before the thing": lambda told: _place_before(told, told.subject),
    },
    "three_facts": {
        "the place named last": lambda told: told.history[-1:],
        "a place where a thing was": lambda told: [
            place for visits in told.world.visits.values() for place in visits if place != told.place
        ],
        "the commonest place named": lambda told: commonest(p for p in told.history if p != told.place),
        "the place named before the place asked about": lambda told: _place_before(told, told.place),
    },
    "yes_no": {
        "yes if the person was ever there": _yes_if(lambda t: Fact("move", t.subject, t.place) in t.facts),
        "yes if it is the place named last": _yes_if(lambda t: t.place == t.history[-1]),
        "no if the person moved last": _yes_if(
            lambda t: [fact.person for fact in t.facts if fact.action == "move"][-1] != t.subject
        ),
    },
    "counting": {
        "a person's count": _counts,
        "the commonest count": lambda told: commonest(_counts(told)),
        "the largest count": lambda told: [told.words[str(max(_carried(told)))]],
        "things picked up by the person": lambda told: _picked_up(told, 0),
        "things picked up by the person, less one": lambda told: _picked_up(told, 1),
    },
}
"""Of each kind, ways to guess that do not follow the person or thing in question."""
