"""`NeuralMemory` by itself."""

from __future__ import annotations

import pytest
import torch

from tests.core.small import model
from titans_core import Documents, MemoryConfig, NeuralMemory, record
from titans_kernels import read_memory


def test_telemetry_reports_the_surprise_before_the_write():
    memory = model(conv=False, chunk_size=1).blocks[0].memory
    x = torch.randn(2, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with record(memory) as seen, torch.no_grad():
        memory(x)
    cache, errors = memory.start(2), []
    for t in range(20):  # a token at a time: the cache then holds the weights before each token
        k, v, *_ = memory._tokens(x[:, t : t + 1], {})[1]
        errors.append((read_memory(k, cache.start.weights) - v).square().sum(-1).mean())
        _, cache = memory(x[:, t : t + 1], cache)
    assert seen.summary()["surprise"] == pytest.approx(torch.stack(errors[1:]).mean().item())
    norms = [sum(w[i].square().sum() for w in cache.start.weights).sqrt() for i in range(2)]
    assert seen.summary()["weight_norm"] == pytest.approx(torch.stack(norms).mean().item())


def test_the_memory_is_a_layer_of_its_own():
    torch.manual_seed(0)
    layer = NeuralMemory(24, MemoryConfig(heads=3, chunk_size=8))
    assert all(torch.isfinite(p).all() and p.abs().max() < 20 for p in layer.parameters())
    x = torch.randn(2, 30, 24)
    whole, _ = layer(x)
    first, cache = layer(x[:, :13])
    second, _ = layer(x[:, 13:], cache)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=1e-5)


def test_packed_documents_start_from_one_state_on_a_chunk_border():
    layer, documents = model().blocks[0].memory, Documents.from_starts(torch.eye(1, 20).bool())
    x = torch.randn(2, 36, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, cache = layer(x[:1, :16])
    expected, _ = layer(x[:1, 16:], cache)
    torch.testing.assert_close(layer(x[:1, 16:], cache, documents)[0], expected, rtol=1e-10, atol=1e-10)
    for given, message in (
        (layer(x[:1, :13])[1], "cache: 5 tokens into a chunk"),
        (layer(x[:, :16])[1], "cache: it holds 2 sequences"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x[:1, 16:], given, documents)
