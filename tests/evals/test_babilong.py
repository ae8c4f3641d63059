"""BABILong: facts of bAbI in the text of a book; they decide the answer, a guess is at chance."""

import json
import random
import re
from collections import Counter
from statistics import fmean

import pytest

from tests.evals.small import BYTE
from titans_platform.config import TaskConfig
from titans_platform.errors import UsageError
from titans_platform.tasks import build_generated, build_task, encode_item
from titans_platform.tasks.babi import split_question
from titans_platform.tasks.items import count_tokens

PEOPLE, PLACES = ("Mary", "John", "Daniel"), ("garden", "office", "kitchen", "hallway")
FACT = re.compile(r"(Mary|John|Daniel) went to the (\w+)\.")
BOOK = "It was a wet day. Nobody had been seen on the moor! Was the old man asleep? He was not. " * 30


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """40 stories of two questions each, and a book."""
    folder, rng, lines = tmp_path_factory.mktemp("babi"), random.Random(0), []
    for _ in range(40):
        known: dict[str, str] = {}
        for number in range(1, 7):
            if number % 3:
                person, place = rng.choice(PEOPLE), rng.choice(PLACES)
                known[person] = place
                lines.append(f"{number} {person} went to the {place}.")
            else:
                person = rng.choice(sorted(known))
                lines.append(f"{number} Where is {person}? \t{known[person]}\t1")
    (folder / "qa1_train.txt").write_text("\n".join(lines))
    (folder / "book.txt").write_text(BOOK)
    return {"path": str(folder / "qa1_train.txt"), "books": str(folder / "book.txt")}


def made(files, **options):
    return build_generated(TaskConfig(task="babilong", options=files | options))


def solved(before: str) -> str | None:
    """The last place of whom the text asks about, of the facts after the shots."""
    asked = re.search(r"Question: Where is (\w+)\?\nAnswer:$", before)
    return dict(FACT.findall(before.split("\n\n")[-1]))[asked[1]] if asked else None


@pytest.mark.parametrize("shots", [0, 3])
def test_facts_are_all_there_in_order_and_decide_the_answer(files, shots):
    task, known = made(files, shots=shots), {split_question(item)[1:] for item in made(files)._questions()}
    stories = {tuple(split_question(item)[0]) for item in made(files)._questions()}
    for seed in range(30):
        item = task.item(random.Random(seed), 900, BYTE)
        tokens, is_answer = encode_item(item, BYTE, 900)
        assert len(tokens) == 900
        assert BYTE.pad not in tokens
        assert sum(is_answer) == len(item.pieces[-1][0])
        ((before, answer),) = item.questions()
        assert answer == f" {solved(before)}"
        text = before.split("\n\n")[-1]
        assert tuple(match[0] for match in FACT.finditer(text)) in stories
        assert len(re.findall(r"Question: (.*)\nAnswer: (\S+)\n\n", before)) <= shots
        # the question itself is no example
        facts = " ".join(match[0] for match in FACT.finditer(text))
        assert f"{facts}\nQuestion: {before.rpartition('Question: ')[2]}" not in before.rpartition("\n\n")[0]
        # what is left without the facts is the book
        assert FACT.sub("", text).partition("\nQuestion")[0].replace("  ", " ").strip()[:30] in BOOK * 2
        assert (re.search(r"Question: (.*)\nAnswer:$", before)[1], answer.strip()) in known


def test_earlier_questions_of_a_story_are_asked_where_they_can_be_answered(files):
    task, asked = made(files, asked="all"), Counter()
    for seed in range(30):
        item = task.item(random.Random(seed), 900, BYTE)
        assert len(encode_item(item, BYTE, 900)[0]) == 900
        pairs = list(item.questions())
        assert [answer for _, answer in pairs] == [f" {solved(before)}" for before, _ in pairs]
        # six lines a story, each third a question
        assert len(pairs) == len(FACT.findall(item.text)) // 2
        asked[len(pairs)] += 1
    assert set(asked) == {1, 2}
    # where they do not all fit the last ones are asked
    short = [task.item(random.Random(seed), 200, BYTE) for seed in range(30)]
    assert {len(list(item.questions())) for item in short} == {1}
    assert max(len(FACT.findall(item.text)) for item in short) == 4


def test_facts_stand_at_uniform_depths_of_the_book_or_alone(files):
    task, depths = made(files), []
    for seed in range(300):
        text = task.item(random.Random(seed), 1500, BYTE).text
        depths += [match.start() / text.index("\nQuestion") for match in FACT.finditer(text)]
    thirds = [sum(i / 3 <= depth < (i + 1) / 3 for depth in depths) / len(depths) for i in range(3)]
    assert all(abs(third - 1 / 3) < 0.06 for third in thirds), thirds
    item = made(files | {"books": None}).item(random.Random(1), 900, BYTE)
    assert not re.sub(r"\s", "", FACT.sub("", item.text)).partition("Question:")[0]
    ((before, answer),) = item.questions()
    assert answer == f" {solved(before)}"
    assert count_tokens(item, BYTE) < 300


def test_facts_decide_chance_is_a_guess_and_heuristics_have_their_scores(files):
    task, rng = made(files), random.Random(0)
    pairs = [pair for seed in range(300) for pair in task.item(random.Random(seed), 400, BYTE).questions()]
    share = lambda says: fmean(says(before) == answer.strip() for before, answer in pairs)  # noqa: E731
    assert (share(solved), task.chance) == (1.0, 1 / 4)
    scores = task.floor(400, BYTE).scores
    assert 0.25 < (named := scores["any answer named in the story"]) < 0.75
    guessed = share(lambda before: rng.choice(sorted({place for _, place in FACT.findall(before)})))
    assert abs(guessed - named) < 4 * (1 / 4 / 300) ** 0.5
    last = share(lambda before: FACT.findall(before)[-1][1])
    assert abs(last - scores["the answer named last"]) < 4 * (1 / 4 / 300) ** 0.5


def test_held_out_questions_are_not_in_the_rest_and_mistakes_name_the_field(files):
    first, last = (made(files, part=part)._questions() for part in ("first", "last"))
    assert (len(first), len(last)) == (72, 8)
    assert first + last == made(files)._questions()
    assert set(made(files, part="last").floor_items(400, BYTE)) == set(last)
    for field, value, message in (
        ("books", "absent.txt", r"options\.books: cannot read absent\.txt"),
        ("kind", "qa3", "has no qa3_"),
    ):
        with pytest.raises(UsageError, match=message):
            made(files, **{field: value}).item(random.Random(0), 400, BYTE)


# --- the Hub's version

CARD = "---\nconfigs: [{config_name: 1k, data_files: [{split: qa1, path: 1k/qa1.jsonl}]}]\n---\n"
TOLD = {"Mary": "garden", "John": "kitchen"}


def published(folder):
    """A folder as the dataset of the Hub is laid out."""
    (folder / "1k").mkdir()
    (folder / "README.md").write_text(CARD)
    with (folder / "1k" / "qa1.jsonl").open("w") as file:
        for who, place in TOLD.items():
            record = {"input": f"It rained. {who} went to the {place}. It was late.", "target": place}
            file.write(json.dumps(record | {"question": f"Where is {who}? "}) + "\n")
    return {"path": str(folder), "length": "1k"}


def test_hubs_files_are_asked_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    task = build_task(TaskConfig(task="babilong_hub", options=published(tmp_path)))
    assert (task.label, task.chance) == ("babilong_hub-qa1-1k", 1 / 2)
    item = task.item(random.Random(0), 200, BYTE)
    assert item.text in {
        f"It rained. {who} went to the {place}. It was late.\nQuestion: Where is {who}? \nAnswer: {place}"
        for who, place in TOLD.items()
    }
    with pytest.raises(UsageError, match="lengths: no story of qa1"):
        task.item(random.Random(0), 50, BYTE)


@pytest.mark.parametrize(("change", "says"), [({"kind": "qa9"}, "qa9"), ({"path": "absent"}, "absent, 1k")])
def test_what_the_hub_has_not_is_one_line(change, says, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    options = published(tmp_path) | change
    with pytest.raises(UsageError, match=f"options.path: .*{says}.* cannot be read"):
        build_task(TaskConfig(task="babilong_hub", options=options)).item(random.Random(0), 200, BYTE)
