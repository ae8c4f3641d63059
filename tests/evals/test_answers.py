"""Answers are correct: solvers that read only an item's text reproduce them."""

import random
import re
from collections import Counter
from functools import cache

import pytest

from tests.evals.small import BYTE
from titans_platform.config import TaskConfig
from titans_platform.tasks import build_generated
from titans_platform.tasks.reasoning import NUMBERS, PEOPLE, PLACES, THINGS, VERBS


@cache
def items(task, length, count, **options):
    made, rng = build_generated(TaskConfig(task=task, options=options)), random.Random(str(options))
    return [made.item(rng, length, BYTE) for _ in range(count)]


# --- needle


@pytest.mark.parametrize("kind", ["passkey", "number", "uuid"])
def test_compact_needles_are_there_once_and_queried(kind):
    for item in items("needle", 96, 200, kind=kind, style="compact", digits=3, needles=4, queries=3):
        needles = re.findall(r"([A-Z]):([0-9a-f]{3});", item.text)
        assert len(needles) == len(dict(needles)) == 4
        assert len({before[-2] for before, _ in item.questions()}) == 3
        for before, answer in item.questions():
            assert before.endswith(f"?{before[-2]}:")
            assert dict(needles)[before[-2]] == answer
        assert re.fullmatch(r"[a-z ]*", re.sub(r"([A-Z]):[0-9a-f]{3};", "", item.text.partition("?")[0]))


@pytest.mark.parametrize("kind", ["passkey", "number", "uuid"])
def test_ruler_needles_are_there_once_and_asked_for(kind):
    value = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-\w{12}" if kind == "uuid" else r"\d{7}"
    pattern = rf"One of the special magic (?:number|uuid)s for ([\w-]+) is: ({value})\."
    for item in items("needle", 700, 50, kind=kind):
        ((key, stated),) = re.findall(pattern, item.text)
        ((before, answer),) = item.questions()
        assert answer == f" {stated}"
        assert before.endswith(f"for {key} mentioned in the provided text is")
        assert item.text.count(stated) == 2


@pytest.mark.parametrize("style", ["compact", "ruler"])
def test_depth_is_uniform(style):
    length = 128 if style == "compact" else 1600
    depths = []
    for item in items("needle", length, 1000, kind="number", style=style):
        if style == "compact":
            haystack = item.text.partition("?")[0]
        else:
            haystack = item.text.split("afterwards.\n")[1].split("\nWhat is")[0]
        start, end = re.search(r"[A-Z]:\d\d;|One of the special.*?is: \d+\. ", haystack).span()
        depths.append(start / (len(haystack) - (end - start)))
    counts = Counter(min(int(depth * 5), 4) for depth in depths)
    # a fifth each; 4.5 standard deviations of a binomial of 1000 draws is 57
    assert all(abs(counts[fifth] - 200) < 57 for fifth in range(5)), counts
    assert min(depths) < 0.01
    assert max(depths) > 0.99


def test_haystack_is_read_from_a_file_and_rebound_keys_change_their_value(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("It rained.  The ship\nsailed at dawn! Nobody waved. " * 20)
    for item in items("needle", 600, 20, kind="number", path=str(path)):
        assert "The ship sailed" in item.text
        assert re.search(r"(?:^|[.!] |\n)One of the special", item.text)
    for item in items("recall", 90, 50, pairs=8, rebind=0.5):
        block, values = item.text[: 2 * 12], {}
        for key, value in re.findall(r"([A-Z])([0-9a-z])", block):
            values.setdefault(key, []).append(value)
        assert sorted(map(len, values.values())) == [1] * 4 + [2] * 4
        assert all(v[0] != v[-1] for v in values.values() if len(v) == 2)


# --- reasoning: facts are (person, action, target) in order, read off the text

ACTIONS = {verb: action for action, verbs in VERBS.items() for verb in verbs}
FACT = re.compile(rf"({'|'.join(PEOPLE)}) ({'|'.join(ACTIONS)}) the (\w+)\.")
COMPACT_FACT = re.compile(r"([A-M])([+-]?)([a-z])\.")


def facts_of(text, style):
    if style == "prose":
        return [(person, ACTIONS[verb], target) for person, verb, target in FACT.findall(text)]
    facts = re.sub(r"\?[^.]*(\.|$)", "", text)
    return [(p, {"": "move", "+": "get", "-": "drop"}[mark], t) for p, mark, t in COMPACT_FACT.findall(facts)]


def place(facts, person):
    return [target for who, action, target in facts if who == person and action == "move"][-1]


def thing_place(facts, thing):
    """Return the place of `thing` after `facts`, None before it was first picked up."""
    touched = [i for i, (_, action, target) in enumerate(facts) if target == thing and action != "move"]
    if not touched:
        return None
    who, action, _ = facts[touched[-1]]
    return place(facts if action == "get" else facts[: touched[-1]], who)


def place_before(facts, thing, where):
    history = []
    for end in range(1, len(facts) + 1):
        now = thing_place(facts[:end], thing)
        if now and (not history or history[-1] != now):
            history.append(now)
    assert history.count(where) == 1
    return history[history.index(where) - 1]


def count(facts, person):
    last = {target: (who, action) for who, action, target in facts if action != "move"}
    return sum(1 for held in last.values() if held == (person, "get"))


def solve(before, kind, style):
    facts = facts_of(before, style)
    prompt = before[before.rindex("?") + 1 :] if style == "compact" else before.rsplit("\n", 1)[-1]
    if style == "compact":
        who, where = prompt[0], prompt[-1]
        numbers, yes_no = [str(n) for n in range(7)], ("Y", "N")
    else:
        names = re.findall(rf"\b(?:{'|'.join(PEOPLE + PLACES + THINGS)})\b", prompt)
        who, where = names[0], names[-1]
        numbers, yes_no = NUMBERS, ("yes", "no")
    if kind == "one_fact":
        return place(facts, who)
    if kind == "two_facts":
        return thing_place(facts, who)
    if kind == "three_facts":
        return place_before(facts, who, where)
    if kind == "yes_no":
        return yes_no[place(facts, who) != where]
    return numbers[count(facts, who)]


KINDS = ("one_fact", "two_facts", "three_facts", "yes_no", "counting")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("style", "length"), [("compact", 128), ("prose", 512)])
@pytest.mark.parametrize("more", [{"questions": 4}, {"facts": 9}], ids=str)
def test_reasoning_answers_follow_from_the_text(kind, style, length, more):
    for item in items("reasoning", length, 60, kind=kind, style=style, **more):
        asked = list(item.questions())
        assert len(asked) == more.get("questions", 1)
        for before, answer in asked:
            assert solve(before, kind, style) == answer.strip()
        assert item.text == asked[-1][0] + asked[-1][1]
        if "facts" in more:
            assert len(facts_of(asked[-1][0], style)) == more["facts"]


@pytest.mark.parametrize("kind", KINDS)
def test_people_take_only_things_that_are_free_or_theirs(kind):
    for item in items("reasoning", 256, 30, kind=kind, style="compact", people=3, things=4):
        facts = facts_of(item.text, "compact")
        for i, (who, action, target) in enumerate(facts):
            if action == "get":
                assert thing_place(facts[:i], target) in (None, place(facts[:i], who))
                assert not any(count([f for f in facts[:i] if f[2] == target], p) for p in "ABC")
            elif action == "drop":
                assert count([f for f in facts[:i] if f[2] == target], who) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_commonest_answer_gets_no_more_than_chance(kind):
    made = build_generated(TaskConfig(task="reasoning", options={"kind": kind, "style": "compact"}))
    drawn = items("reasoning", 128, 1500, kind=kind, style="compact")
    spread = (made.chance * (1 - made.chance) / len(drawn)) ** 0.5
    answers = Counter(item.pieces[-1][0] for item in drawn)
    assert answers.most_common(1)[0][1] / len(drawn) < made.chance + 4 * spread


@pytest.mark.parametrize(("kind", "wanted"), [("one_fact", 4), ("two_facts", 3), ("counting", 3)])
def test_story_leaves_its_answer_open(kind, wanted):
    """Who knows all that can be asked after the story, but not the question, gets one over the answers."""
    enough = 0
    for item in items("reasoning", 128, 200, kind=kind, style="compact"):
        facts = facts_of(item.text, "compact")
        people = sorted({who for who, action, _ in facts if action == "move"})
        things = sorted({target for _, action, target in facts if action != "move"})
        if kind == "one_fact":
            possible = {place(facts, person) for person in people}
        elif kind == "two_facts":
            possible = {thing_place(facts, thing) for thing in things}
        else:
            possible = {count(facts, person) for person in people} & {0, 1, 2}
        enough += len(possible) >= wanted
    assert enough > 190


def test_reasoning_questions_are_about_places_seen_and_stand_anywhere():
    """Neither the place nor having been there says anything about the answer."""
    for item in items("reasoning", 128, 300, kind="yes_no", style="compact"):
        text = item.pieces[0][0]
        who, where = text[-3], text[-1]
        facts = facts_of(text, "compact")
        assert (who, "move", where) in facts
        assert any(place(facts, person) == where for person in {person for person, _, _ in facts})
    drawn = items("reasoning", 128, 200, kind="one_fact", style="compact", questions=4)
    ends = [len(before) / 128 for item in drawn for before, _ in list(item.questions())[:-1]]
    assert sum(end < 0.5 for end in ends) > 0.3 * len(ends)
    assert sum(end > 0.5 for end in ends) > 0.3 * len(ends)
