"""A small world: people walk between places, pick things up and put them down. Stories are its history."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Action = Literal["move", "get", "drop"]


class Fact(NamedTuple):
    """One thing that happened: `person` moved to place `target`, or got or dropped thing `target`."""

    action: Action
    person: str
    target: str


@dataclass(frozen=True)
class Names:
    """Who and what there is."""

    people: tuple[str, ...]
    places: tuple[str, ...]
    things: tuple[str, ...]


@dataclass
class World:
    """What is known after the facts so far; a person or thing no fact has named is nowhere."""

    names: Names
    place_of: dict[str, str] = field(default_factory=dict)
    """Where each person is."""
    holder_of: dict[str, str | None] = field(default_factory=dict)
    """Who carries each thing seen so far; None: it lies where it was put down."""
    visits: dict[str, list[str]] = field(default_factory=dict)
    """Places each thing has been at, in order, without immediate repeats."""
    latest_place: str = ""
    """Where someone went last."""

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
        return [
            thing
            for thing in self.names.things
            if thing not in self.holder_of
            or (self.holder_of[thing] is None and self.visits[thing][-1] == here)
        ]

    def next_fact(self, rng: random.Random, *, things: bool) -> Fact:
        """Something that may happen now; `things`: picking up and putting down too."""
        person = rng.choice(self.names.people)
        here = self.place_of.get(person)
        if things and here is not None:
            roll = rng.random()
            if roll < 0.35 and (near := self.reachable(person)):
                return Fact("get", person, rng.choice(near))
            if roll > 0.85 and (held := self.carried(person)):
                return Fact("drop", person, rng.choice(held))
        return Fact("move", person, rng.choice([place for place in self.names.places if place != here]))
