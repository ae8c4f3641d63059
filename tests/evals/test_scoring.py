"""Log-likelihoods: shared contexts are read once, without changing any score."""

import math
import random

import pytest
import torch

from titans_core import BLOCKS, LanguageModel
from titans_platform.data import load_tokenizer
from titans_platform.evals import Request, Scorer, scoring
from titans_platform.evals.scoring import FORWARD_OVERHEAD_TOKENS as PASS
from titans_platform.evals.scoring import Group, batch_groups, forks, group_by_prefix, similar_lengths

BYTE = load_tokenizer("byte")


def requests(seed=0, questions=12, longest=60):
    """Questions of one to four endings, some of which begin alike, after contexts of all lengths."""
    rng = random.Random(seed)
    text = lambda n: rng.choices(range(97, 100), k=n)  # noqa: E731
    found = []
    for _ in range(questions):
        context = text(rng.randrange(longest))
        found += [Request(context, text(rng.randrange(9))) for _ in range(rng.randint(1, 4))]
    rng.shuffle(found)
    return found


def direct(model, request, max_length):
    """Log-likelihood of each token of the continuation, from a pass over this row alone."""
    tokens = request.context + request.continuation
    row = [BYTE.bos, *tokens[max(0, len(tokens) - (max_length - 1)) :]]
    width = min(len(request.continuation), len(row) - 1)
    logprobs = model(torch.tensor([row])).logits[0].log_softmax(-1)
    places = range(len(row) - 1 - width, len(row) - 1)
    greedy = all(int(logprobs[i].argmax()) == row[i + 1] for i in places)
    return math.fsum(float(logprobs[i, row[i + 1]]) for i in places), greedy, width


def small(tiny_run, variant):
    torch.manual_seed(0)
    fields = {"variant": variant, "attention": {"heads": 2, "segment_size": 16}}
    fields |= {"memory": tiny_run.model.memory.model_dump() | BLOCKS[variant].preset_memory}
    return LanguageModel(type(tiny_run.model).model_validate(tiny_run.model.model_dump() | fields)).double()


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal", "transformer", "gated_deltanet"])
@pytest.mark.parametrize("max_length", [40, 1000])
def test_scores_are_those_of_each_row_alone(variant, max_length, tiny_run, monkeypatch):
    # so that small batches have several forks and several passes at each
    monkeypatch.setattr("titans_platform.evals.scoring.FORWARD_OVERHEAD_TOKENS", 6)
    asked, model = requests(), small(tiny_run, variant)
    with torch.inference_mode():
        found = Scorer(model, BYTE, torch.device("cpu"), 200).score(asked, max_length)
        expected = [direct(model, request, max_length) for request in asked]
    for score, (logprob, greedy, width) in zip(found, expected, strict=True):
        # scores are taken in float32
        assert score.logprob == pytest.approx(logprob, rel=1e-5, abs=1e-5)
        assert (score.greedy, score.tokens) == (greedy, width)


def test_a_context_is_read_once(tiny_run, monkeypatch):
    model, read = small(tiny_run, "lmm"), []
    encode = model.encode
    monkeypatch.setattr(model, "encode", lambda x, *rest: read.append(x.shape[:2]) or encode(x, *rest))
    context = list(range(97, 122)) * 40
    asked = [Request(context, [122] * 3) for _ in range(4)]
    Scorer(model, BYTE, torch.device("cpu"), 4000).score(asked, 2000)
    # the start and the context but for its last token, which says what comes first in each ending
    assert read == [(1, len(context)), (4, 3)]


def test_every_row_is_in_one_group_and_shares_what_its_neighbours_have():
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [9], [1, 2, 3, 4, 6], [1, 7]]
    assert group_by_prefix(rows, [3, 3, 1, 3, 1]) == [Group(3, (0, 3, 1)), Group(0, (4,)), Group(0, (2,))]
    # no more than allowed: what is scored is read by each row
    assert group_by_prefix(rows[:2], [1, 2]) == [Group(1, (0, 1))]
    asked = [request.context + request.continuation for request in requests(2, 40)]
    found = group_by_prefix(asked, [len(row) for row in asked])
    assert sorted(row for group in found for row in group.rows) == list(range(len(asked)))
    for group in found:
        assert len({tuple(asked[row][: group.shared]) for row in group.rows}) == 1


def test_batches_keep_to_their_budget_and_hold_every_group():
    groups = [Group(shared, (2 * i, 2 * i + 1)) for i, shared in enumerate((5, 40, 0, 12))]
    lengths = [8, 9, 50, 44, 3, 3, 20, 13]
    batches = batch_groups(groups, lengths, 70)
    # 54 tokens, and 21 + 12 + 6
    assert batches == [[groups[1]], [groups[3], groups[0], groups[2]]]
    assert batch_groups(groups, lengths, 1) == [[groups[i]] for i in (1, 3, 0, 2)]


def test_a_fork_more_is_made_where_it_saves_more_than_a_pass():
    start = PASS + 1
    near, far, none = Group(start, (0, 1)), Group(2 * start, (2, 3)), Group(0, (4,))
    assert [fork.position for fork in forks([far, near, none])] == [0, start, 2 * start]
    assert [fork.position for fork in forks([far._replace(shared=start + PASS), near])] == [start]
    assert similar_lengths([5, 4, 5 + PASS + 1]) == [[2], [0, 1]]


@pytest.mark.parametrize("variant", ["lmm", "mac", "transformer"])
@pytest.mark.parametrize("start", [0, 1, 63, 64, 129])
def test_long_rows_are_read_in_pieces_on_the_state(variant, start, tiny_run, monkeypatch):
    monkeypatch.setattr("titans_platform.evals.scoring.PREFILL_TOKENS", 64)
    model, tokens = small(tiny_run, variant), torch.randint(256, (2, 130))
    whole, pieces = (Scorer(model, BYTE, torch.device("cpu"), budget) for budget in (1000, 100))
    shapes = []
    model.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape[1]))
    with torch.inference_mode():
        assert torch.equal(whole.greedy(tokens, start), pieces.greedy(tokens, start))
    assert shapes == [130, 32, 32, 32, 32, 2]


def test_long_rows_are_read_side_by_side_as_memory_allows(tiny_run, monkeypatch):
    def rows(variant, length):
        return Scorer(small(tiny_run, variant), BYTE, torch.device("cpu"), 100).parallel_rows(length)

    assert rows("lmm", 50) == 2
    assert rows("lmm", 100) == 1
    assert rows("lmm", 130) == scoring.MAX_PARALLEL_ROWS
    kept = small(tiny_run, "transformer").state_bytes(130) + 130 * scoring.TOKEN_BYTES
    monkeypatch.setattr(scoring, "PARALLEL_BYTES", 3 * kept)
    assert rows("transformer", 130) == 3
    assert rows("transformer", 10_000) == 1
