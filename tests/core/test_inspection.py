"""Per-token traces of a watched memory, against a token-by-token run."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.core.small import MEMORY_VARIANTS, SWITCHES, model, tokens
from titans_core import LanguageModel, MemoryTrace, NeuralMemory, watch


def traces(net: LanguageModel, row: Tensor, *cuts: int, nearest: int = 3) -> list[MemoryTrace]:
    state, at = None, (0, *cuts, row.shape[1])
    with watch(net) as seen, torch.no_grad():
        for start, end in pairwise(at):
            state = net(row[:, start:end], state).state
    return seen.traces(nearest)


def one_memory(length: int = 21, nearest: int = 4, **switches):
    """The trace of one memory, and the inputs and state of each token from a token-by-token run."""
    memory: NeuralMemory = model(**switches).blocks[0].memory
    x = torch.randn(1, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with watch(memory) as seen, torch.no_grad():
        memory(x)
    (trace,) = seen.traces(nearest)
    caches, inputs = [memory.start(1)], []
    with torch.no_grad():
        for t in range(length):
            inputs.append(memory._project_tokens(x[:, t : t + 1], caches[-1].conv_state))
            caches.append(memory(x[:, t : t + 1], caches[-1])[1])
    return memory, trace, inputs, caches


def error(memory: NeuralMemory, writes, cache) -> Tensor:
    return (memory.predict(writes.k, cache.memory.memory().weights) - writes.v).square().sum(-1)[0, 0]


KINDS = [{}, {"chunk_size": 1}, {"depth": 1}, SWITCHES["robust"], {"surprise_bound": None}]
KINDS += [{"forget_to": "initial"}, {"forget_to": "initial", "depth": 1}, {"write_budget": 1.0}]


@pytest.mark.parametrize("switches", [*KINDS, {"rule": "experiments.tnt.tnt:ReadStart"}], ids=str)
def test_errors_gates_and_norms_are_those_of_single_tokens(switches):
    memory, trace, inputs, caches = one_memory(**switches)
    writes = [w for _, w, _ in inputs]
    for name, states in (("surprise", caches), ("written", caches[1:]), ("final", caches[-1:] * 21)):
        expected = [error(memory, w, cache) for w, cache in zip(writes, states, strict=False)]
        torch.testing.assert_close(getattr(trace, name), torch.stack(expected), rtol=1e-9, atol=1e-9)
    for name in ("alpha", "eta", "theta"):
        expected = torch.cat([getattr(w, name)[0] for w in writes])
        torch.testing.assert_close(getattr(trace, name), expected)
    known, size = ~trace.weight_norm.isnan()[:, 0], memory.config.chunk_size
    assert known.tolist() == [t % size == size - 1 or t == 20 for t in range(21)]
    for t in known.nonzero().flatten().tolist():
        weights, momentum = caches[t + 1].memory.memory()
        for name, layers in (("weight_norm", memory.absolute_weights(weights)), ("momentum_norm", momentum)):
            norm = sum(W[0].square().sum((-1, -2)) for W in layers) ** 0.5
            torch.testing.assert_close(getattr(trace, name)[t], norm, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("switches", [{}, {"write_budget": 1.0, "max_theta": 2.0}], ids=str)
def test_nearest_keys_and_their_shares_make_the_read_of_a_linear_memory(switches):
    """A linear memory's content is the sum over tokens of their share times the gradient's error."""
    _, trace, inputs, caches = one_memory(7, 7, depth=1, chunk_size=8, persistent=0, **switches)
    last = caches[-1].memory
    torch.testing.assert_close(trace.coefficient, last.c[0].T, rtol=1e-9, atol=1e-12)
    q, k = inputs[-1][0][0, 0], torch.cat([w.k[0] for _, w, _ in inputs])
    cosine = F.cosine_similarity(q, k, -1)  # [T, H]
    expected, order = cosine.sort(0, descending=True)
    torch.testing.assert_close(trace.own.similarity[-1], expected.T)
    assert torch.equal(trace.own.position[-1], order.T)
    taken = last.c[0].T * (k * q).sum(-1)
    by_token = torch.zeros_like(taken).scatter(0, trace.own.position[-1].T, trace.own.share[-1].T)
    torch.testing.assert_close(by_token, taken / taken.abs().sum(0), rtol=1e-9, atol=1e-12)
    whole = (q[:, None] @ last.memory().weights[0][0])[:, 0]
    start = last.beta[0][:, None] * (q[:, None] @ last.weights[0][0])[:, 0]
    written = -torch.einsum("th,hte->he", taken, last.errors[0][0])
    torch.testing.assert_close(start + written, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", MEMORY_VARIANTS)
def test_traces_of_a_text_in_pieces_equal_the_whole(variant):
    net, row = model(variant), tokens(1, 37)
    whole, pieces = traces(net, row), traces(net, row, 1, 5, 16, 30)
    assert [trace.name for trace in whole] == ["blocks.0.memory", "blocks.1.memory"]
    for one, other in zip(whole, pieces, strict=True):
        assert (one.context is not None) == (variant == "mac")
        for name in ("surprise", "written", "final", "alpha", "coefficient"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-9)
        for a, b in zip((one.own, one.context), (other.own, other.context), strict=True):
            if a is not None and b is not None:
                torch.testing.assert_close(a.similarity, b.similarity, rtol=1e-9, atol=1e-9, equal_nan=True)
                assert torch.equal(a.position, b.position)
    assert not [m for m in net.modules() if isinstance(m, NeuralMemory) and m.watcher]


def test_reads_of_a_segment_find_earlier_keys_and_watching_changes_nothing():
    first, *_ = traces(model("mac"), tokens(1, 37))
    position = first.context.position
    assert position.shape == (37, 2, 3)
    assert (position[:16] == -1).all()
    assert set(position[16:32].flatten().tolist()) <= set(range(16))
    assert set(position[32:].flatten().tolist()) <= set(range(32))
    net, row = model("mag"), tokens(1, 20)
    with torch.no_grad():
        expected = net(row).logits
        with watch(net):
            assert torch.equal(net(row).logits, expected)
    with pytest.raises(ValueError, match="watch: a batch of 2 sequences"), watch(net):
        net(tokens(2, 20))
