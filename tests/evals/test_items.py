"""Items: exact lengths, answer tokens, padding, and errors that name the fix."""

import random
import re

import pytest

from tests.evals.small import BYTE
from titans_platform.config import EvalConfig, TaskConfig
from titans_platform.errors import UsageError
from titans_platform.tasks import TASKS, Item, build_generated, build_task, encode_item, eval_version
from titans_platform.tasks import items as module
from titans_platform.tasks.items import answer_spans, fill, lowercase_words, make_item, prose, scatter
from titans_platform.tasks.reasoning import PEOPLE, PLACES, THINGS


class WordTokenizer:
    """A token a word with the space before it: characters and tokens do not agree."""

    vocab_size, bos, pad = 4096, 0, 1

    def __init__(self):
        self.ids: dict[str, int] = {}

    def encode(self, text):
        return [self.ids.setdefault(word, len(self.ids) + 2) for word in re.findall(r"\s*\S+|\s+$", text)]

    encode_within = encode

    def decode(self, tokens):
        words = {number: word for word, number in self.ids.items()}
        return "".join(words.get(token, "") for token in tokens)


def test_encoded_item_marks_its_answers_and_is_padded_or_refused():
    item = Item((("?K:", False), ("47", True), ("?J:", False), ("081", True)))
    tokens, answers = encode_item(item, BYTE, 12)
    assert tokens == [BYTE.bos, *b"?K:47?J:081"]
    assert [bytes(tokens[start:end]) for start, end in answer_spans(answers)] == [b"47", b"081"]
    item = Item((("ab", False), ("c", True)))
    tokens, answers = encode_item(item, BYTE, 8)
    assert (tokens, answers) == ([BYTE.bos, *[BYTE.pad] * 4, *b"abc"], [False] * 7 + [True])
    with pytest.raises(UsageError, match="4 tokens does not fit in 3"):
        encode_item(item, BYTE, 3)


def test_pieces_are_joined_and_scattered_in_order_and_the_hash_is_of_the_text():
    item = make_item([("a", False), ("", True), ("b", False), ("c", True), ("d", True)])
    assert item.pieces == (("ab", False), ("cd", True))
    assert item.hash == Item((("abcd", False),)).hash != Item((("abce", False),)).hash
    pieces = scatter("012345", [[("a", False)], [("b", True)], [("c", False)]], [0, 3, 6])
    assert "".join(text for text, _ in pieces) == "a012b345c"


@pytest.mark.parametrize("length", [14, 15, 33, 200])
def test_fill_reaches_the_length_or_the_last_word_before_it(length):
    words = WordTokenizer()

    def build(characters):
        return make_item([(("xy " * characters)[:characters] + " where? ", False), ("here", True)])

    assert len(fill(build, length, BYTE).text) + 1 == length
    tokens, _ = encode_item(fill(build, length, words), words, length)
    assert len(tokens) == length
    assert tokens.count(words.pad) <= 1


def test_rows_too_short_are_refused():
    with pytest.raises(UsageError, match="ask for longer rows"):
        fill(lambda n: make_item([("a" * (n + 10), False), ("b", True)]), 11, BYTE)
    made = build_generated(TaskConfig(task="reasoning", options={"kind": "three_facts", "style": "compact"}))
    with pytest.raises(UsageError, match="longer rows"):
        made.item(random.Random(0), 12, BYTE)


def test_filler_has_its_length_states_no_fact_and_holds_no_needle():
    rng = random.Random(0)
    for make in (prose, lowercase_words):
        assert [len(make(rng, n)) for n in (0, 1, 7, 100, 1001)] == [0, 1, 7, 100, 1001]
    world = {word.lower() for word in (*PEOPLE, *PLACES, *THINGS)}
    assert not world & {*module.NOUNS, *module.ADJECTIVES, *module.VERBS}
    assert re.fullmatch(r"[a-z ]+", lowercase_words(random.Random(1), 5000))
    assert not re.search(r"\d|special|magic", prose(random.Random(1), 5000))


GENERATED = [
    ("needle", {"kind": kind, "style": style, **more}, base)
    for kind in ("passkey", "number", "uuid")
    for style, base in (("ruler", 420), ("compact", 40))
    for more in ({}, {"needles": 3, "queries": 2})
    if style == "compact" or not more
] + [
    ("reasoning", {"kind": kind, "style": style, **more}, base)
    for kind in ("one_fact", "two_facts", "three_facts", "yes_no", "counting")
    for style, base in (("compact", 64), ("prose", 420))
    for more in ({}, {"questions": 3}, {"facts": 7})
]


@pytest.mark.parametrize(("task", "options", "base"), GENERATED)
def test_items_have_exactly_the_length_asked_for(task, options, base):
    made, rng = build_generated(TaskConfig(task=task, options=options)), random.Random(3)
    for length in (base, base + 1, base + 17, 4 * base):
        item = made.item(rng, length, BYTE)
        assert len(item.text) == length - 1
        tokens, answers = encode_item(item, BYTE, length)
        assert BYTE.pad not in tokens
        assert any(answers)


@pytest.mark.parametrize(("task", "options"), [("needle", {}), ("reasoning", {"style": "prose"})])
def test_other_tokenizers_come_within_a_word_of_it(task, options):
    made, words = build_generated(TaskConfig(task=task, options=options)), WordTokenizer()
    rng = random.Random(4)
    for length in (90, 91, 200):
        tokens, answers = encode_item(made.item(rng, length, words), words, length)
        assert len(tokens) == length
        assert tokens.count(words.pad) <= 2
        assert answers[-1]


@pytest.mark.parametrize(("task", "options", "message"), [
    ("needel", {}, "; did you mean needle?"),
    ("needle", {"digit": 2}, "options.digit: unknown key; did you mean digits?"),
    ("needle", {"queries": 2}, "queries: 2 exceed needles: 1"),
    ("recall", {"pairs": 30}, "pairs: 30 exceed keys: 26"), ("recall", {"values": "16"}, "options.values"),
    ("reasoning", {"kind": "counting", "things": 1}, "max_count"), ("babi", {}, "options.path"),
    ("perplexity", {"kind": "x"}, "valid: none"), ("recall", {"rebind": 2.0}, "options.rebind"),
])  # fmt: skip
def test_bad_options_name_the_field(task, options, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        build_task(TaskConfig(task=task, options=options))
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"perplexity generates no items.*needle"):
        build_generated(TaskConfig(task="perplexity"))


def test_eval_version_follows_the_tasks_used(monkeypatch):
    needle = EvalConfig(columns={"a": (TaskConfig(task="needle"),)})
    recall = EvalConfig(columns={"a": (TaskConfig(task="recall"),)})
    before = eval_version(needle), eval_version(recall)
    monkeypatch.setattr(TASKS["needle"], "version", TASKS["needle"].version + 1)
    after = eval_version(needle), eval_version(recall)
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True]
