"""Questions over a small world, in the manner of bAbI (Weston et al. 2015, arXiv 1502.05698), own code.

`style="prose"` is a story in sentences. `style="compact"` is for byte-level models of some 64 to 512
bytes of context: people are A-M, places a-m, things n-z;

    Ak.  A moved to k          A+x.  A got x             A-x.  A dropped x
    ?Ak  where is A? k         ?xk   where is x? k       ?x<kj  where was x before k? j
    ?A@kY  is A at k? Y or N   ?A#2  how many things does A carry? 2
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from titans_core.config import Frozen
from titans_platform.errors import UsageError
from titans_platform.evals.generated import GeneratedTask
from titans_platform.evals.items import Item, Tokenizer, fill, item_of, scatter
from titans_platform.evals.registry import register
from titans_platform.evals.words import murmur, prose
from titans_platform.evals.world import Fact, Names, World

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


class Question(NamedTuple):
    """Whom or what is asked about, the second name the question holds if any, and the answer."""

    subject: str
    place: str
    answer: str


class Ask(NamedTuple):
    """A question to be put after `time` facts; `target` is the answer it must have, None: whatever it is."""

    target: str | None
    time: int


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
        compact = self.options.style == "compact"
        self.names = Names(
            (tuple("ABCDEFGHIJKLM") if compact else PEOPLE)[: self.options.people],
            (tuple("abcdefghijklm") if compact else PLACES)[: self.options.places],
            (tuple("nopqrstuvwxyz") if compact else THINGS)[: self.options.things],
        )
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
            facts = self._story(rng, length, tokenizer)
            asks = self._place_asks(rng, facts, targets)
            if asks is not None:
                break
        else:
            raise UsageError(
                f"options.facts: no story that {length} tokens hold answers {self.options.kind};"
                " use longer rows, more facts, or fewer people"
            )
        sentences = list(self._tell(rng, facts, asks))
        depths = sorted(rng.random() for _ in sentences[:-1])
        seed = rng.getrandbits(64)

        def build(characters: int) -> Item:
            return self._lay_out(sentences, depths, characters, random.Random(seed))

        return fill(build, length, tokenizer)

    def _draw_target(self, rng: random.Random) -> str | None:
        if self.options.kind == "yes_no":
            return rng.choice("YN")
        if self.options.kind == "counting":
            return str(rng.randint(0, self.options.max_count))
        return None

    def _story(self, rng: random.Random, length: int, tokenizer: Tokenizer) -> list[tuple[Fact, str]]:
        """Facts with their sentences: `options.facts`, or as many as leave space for the questions."""
        things = self.options.kind in ("two_facts", "three_facts", "counting")
        world = World(self.names)
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
        longest = [max(names, key=len) for names in (self.names.people, self.names.places, self.names.things)]
        subject = longest[2] if self.options.kind in ("two_facts", "three_facts") else longest[0]
        answer = longest[1] if "fact" in self.options.kind else "Y" if self.options.kind == "yes_no" else "1"
        pieces = self._question(Question(subject, longest[1], answer))
        # three: how much longer than `one` or `yes` a number can be, in characters
        slack = 3 if self.options.style == "prose" and "fact" not in self.options.kind else 0
        return slack + sum(len(tokenizer.encode(text)) for text, _ in pieces)

    def _place_asks(
        self, rng: random.Random, facts: list[tuple[Fact, str]], targets: list[str | None]
    ) -> list[Ask] | None:
        """A time for each question at which it can have its answer; None where one cannot."""
        times: dict[str | None, list[int]] = {target: [] for target in targets}
        world = World(self.names)
        for time, (fact, _) in enumerate(facts, start=1):
            world.apply(fact)
            for target, feasible in times.items():
                if self._candidates(world, target):
                    feasible.append(time)
        asks = []
        for index, target in enumerate(targets):
            last = index == len(targets) - 1
            feasible = [time for time in times[target][-1:] if time == len(facts)] if last else times[target]
            if not feasible:
                return None
            asks.append(Ask(target, rng.choice(feasible)))
        return sorted(asks[:-1], key=lambda ask: ask.time) + asks[-1:]

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
        apart = [
            (person, here if yes else there)
            for person, here in world.place_of.items()
            for there in world.place_of.values()
            if here != there
        ]
        # everyone is in one place: any other will do
        alone = [
            (person, place)
            for person, here in world.place_of.items()
            for place in self.names.places
            if (place == here) == yes
        ]
        return [Question(person, place, "Y" if yes else "N") for person, place in apart or alone]

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

    def _tell(
        self, rng: random.Random, facts: list[tuple[Fact, str]], asks: list[Ask]
    ) -> Iterator[list[tuple[str, bool]]]:
        """The story's sentences and questions in order, each as pieces."""
        world = World(self.names)
        pending = list(asks)
        before = ""
        for time, (fact, sentence) in enumerate(facts, start=1):
            world.apply(fact)
            yield [(sentence, False)]
            while pending and pending[0].time == time:
                question = self._pose(rng, world, pending.pop(0).target, before)
                before = question.subject
                pieces = self._question(question)
                # nothing follows the last answer
                yield pieces if pending else pieces[:-1]

    def _lay_out(
        self,
        sentences: list[list[tuple[str, bool]]],
        depths: list[float],
        characters: int,
        rng: random.Random,
    ) -> Item:
        """Sentences spread over the filler, the last one (a question) at the end."""
        if self.options.style == "compact":
            filler = murmur(rng, characters)
            offsets = [int(depth * (characters + 1)) for depth in depths]
        else:
            filler = prose(rng, characters - 1) + "\n" if characters else ""
            borders = [0, *(i + 2 for i in range(characters - 2) if filler.startswith(". ", i)), characters]
            offsets = [borders[int(depth * len(borders))] for depth in depths]
        if self.options.facts is None:
            offsets = [characters] * len(depths)
        return item_of([*scatter(filler, sentences[:-1], offsets), *sentences[-1]])

    def _sentence(self, fact: Fact, rng: random.Random) -> str:
        if self.options.style == "compact":
            mark = {"move": "", "get": "+", "drop": "-"}[fact.action]
            return f"{fact.person}{mark}{fact.target}."
        return f"{fact.person} {rng.choice(VERBS[fact.action])} the {fact.target}.\n"

    def _question(self, question: Question) -> list[tuple[str, bool]]:
        """Prompt, answer, and what separates it from what follows."""
        subject, place, answer = question
        if self.options.style == "compact":
            mark = {"three_facts": f"<{place}", "yes_no": f"@{place}", "counting": "#"}.get(
                self.options.kind, ""
            )
            return [(f"?{subject}{mark}", False), (answer, True), (".", False)]
        prompt = {
            "one_fact": f"Where is {subject}?",
            "two_facts": f"Where is the {subject}?",
            "three_facts": f"Where was the {subject} before the {place}?",
            "yes_no": f"Is {subject} in the {place}?",
            "counting": f"How many things is {subject} carrying?",
        }[self.options.kind]
        if self.options.kind == "yes_no":
            answer = {"Y": "yes", "N": "no"}[answer]
        elif self.options.kind == "counting":
            answer = NUMBERS[int(answer)]
        return [(prompt, False), (f" {answer}", True), ("\n", False)]
