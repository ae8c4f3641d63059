"""Log-likelihoods of rows that share a pass, and rows that are read in pieces."""

import math
import random

import pytest
import torch

from tests.evals.small import BYTE
from titans_core import BLOCKS, LanguageModel
from titans_platform.evals import Request, Scorer, scoring


def direct(model, request, max_length):
    """Log-likelihood of each token of the continuation, from a pass over this row alone."""
    tokens = request.context + request.continuation
    row = [BYTE.bos, *tokens[max(0, len(tokens) - (max_length - 1)) :]]
    logprobs = model(torch.tensor([row])).logits[0].log_softmax(-1)
    places = range(max(0, len(row) - 1 - len(request.continuation)), len(row) - 1)
    greedy = all(int(logprobs[i].argmax()) == row[i + 1] for i in places)
    return math.fsum(float(logprobs[i, row[i + 1]]) for i in places), greedy


def small(tiny_run, variant):
    torch.manual_seed(0)
    fields = {"variant": variant, "attention": {"heads": 2, "segment_size": 16}}
    fields |= {"memory": tiny_run.model.memory.model_dump() | BLOCKS[variant].preset_memory}
    return LanguageModel(type(tiny_run.model).model_validate(tiny_run.model.model_dump() | fields)).double()


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal", "transformer", "gated_deltanet"])
@pytest.mark.parametrize("max_length", [40, 1000])
def test_scores_are_those_of_each_row_alone(variant, max_length, tiny_run, monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_PER_BLOCK", 2000)
    # questions of one to four endings, some of which begin alike, after contexts of any length
    rng, model = random.Random(0), small(tiny_run, variant)
    text = lambda n: rng.choices(range(97, 100), k=n)  # noqa: E731
    asked = [Request(text(3), text(60))]
    for context in (text(rng.randrange(60)) for _ in range(12)):
        asked += [Request(context, text(rng.randrange(9))) for _ in range(rng.randint(1, 4))]
    rng.shuffle(asked)
    with torch.inference_mode():
        actual = Scorer(model, BYTE, torch.device("cpu"), 200).score(asked, max_length)
        expected = [direct(model, request, max_length) for request in asked]
    for score, (logprob, greedy) in zip(actual, expected, strict=True):
        # scores are taken in float32
        assert score.logprob == pytest.approx(logprob, rel=1e-5, abs=1e-5)
        assert score.greedy == greedy


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

    assert (rows("lmm", 50), rows("lmm", 100)) == (2, 1)
    assert rows("lmm", 130) == scoring.MAX_PARALLEL_ROWS
    kept = small(tiny_run, "transformer").state_bytes(130) + 130 * scoring.TOKEN_BYTES
    monkeypatch.setattr(scoring, "PARALLEL_BYTES", 3 * kept)
    assert (rows("transformer", 130), rows("transformer", 10_000)) == (3, 1)
