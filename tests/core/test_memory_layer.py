"""`NeuralMemory` as a standalone layer."""

import pytest
import torch

from tests.core.small import model
from titans_core import Documents, MemoryConfig, NeuralMemory, record
from titans_core.telemetry import healthy_limits, out_of_range, weight_norm


@pytest.mark.parametrize(("rule", "chunk"), [("paper", 1), ("experiments.tnt.tnt:ReadStart", 4)])
@pytest.mark.parametrize("forget_to", ["zero", "initial"])
def test_telemetry_reports_the_surprise_before_the_write(rule, chunk, forget_to):
    memory = model(conv=False, chunk_size=chunk, forget_to=forget_to, rule=rule).blocks[0].memory
    x = torch.randn(2, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with record(memory) as seen, torch.no_grad():
        memory(x)
    cache, errors = memory.start(2), []
    for t in range(20):  # a token at a time: the cache then holds the weights before each token
        k, v, *_ = memory._project_tokens(x[:, t : t + 1], {})[1]
        errors.append((memory.predict(k, cache.start.weights) - v).square().sum(-1).mean())
        _, cache = memory(x[:, t : t + 1], cache)
    counted = errors[chunk == 1 :]  # a chunk's first token too is read at the chunk's start
    assert seen.summary()["surprise"] == pytest.approx(torch.stack(counted).mean().item())
    weights = list(memory.absolute_weights(cache.start.weights))
    norms = [sum(w[i].square().sum() for w in weights).sqrt() for i in range(2)]
    assert seen.summary()["weight_norm"] == pytest.approx(torch.stack(norms).mean().item())


def test_only_a_memory_has_limits_and_packs_documents_on_a_border():
    net = model("mamba2")
    assert healthy_limits(net) == {}
    assert weight_norm(net, net(torch.zeros(1, 9, dtype=torch.long)).state) == {}
    assert out_of_range({}, {}) is None
    layer, documents = model().blocks[0].memory, Documents.from_starts(torch.eye(1, 20).bool())
    x = torch.randn(2, 36, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, cache = layer(x[:1, :16])
    expected, _ = layer(x[:1, 16:], cache)
    torch.testing.assert_close(layer(x[:1, 16:], cache, documents)[0], expected, rtol=1e-10, atol=1e-10)
    for read, message in ((x[:1, :13], "cache: 5 tokens into a chunk"), (x[:, :16], "cache: 2 sequences")):
        with pytest.raises(ValueError, match=message):
            layer(x[:1, 16:], layer(read)[1], documents)
    with pytest.raises(ValueError, match=r"^cache: has 1 rows, the input has 2;"):
        layer(x, cache)
    with pytest.raises(ValueError, match=r"^memory\.heads: 4 does not divide d_model 66$"):
        NeuralMemory(66, MemoryConfig(heads=4))


@pytest.mark.parametrize("depth", [1, 2])
def test_carried_state_trains_the_initial_weights_that_it_forgets_to(depth):
    x = torch.randn(1, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    memory = model(forget_to="initial", depth=depth).blocks[0].memory
    with torch.no_grad():
        _, cache = memory(x)
    y, _ = memory(x, cache)
    assert all(dW.norm() > 1e-4 for dW in torch.autograd.grad(y.square().sum(), list(memory.initial_weights)))


@pytest.mark.parametrize("forget_to", ["zero", "initial"])
def test_memory_that_overshoots_is_named(forget_to):
    repeated = torch.zeros(1, 400, dtype=torch.long)
    for limits, wrong in (({"surprise_bound": None}, True), ({"write_budget": 1.0}, False)):
        net = model(max_theta=1.0, theta_bias=2.0, chunk_size=16, forget_to=forget_to, **limits)
        with record(net) as seen, torch.no_grad():
            state = net(repeated).state
        message = out_of_range(seen.summary(), healthy_limits(net))
        assert (message or "").startswith("memory out of range: ") == wrong
        if not wrong:
            assert weight_norm(net, state)["weight_norm"] == pytest.approx(seen.summary()["weight_norm"])
