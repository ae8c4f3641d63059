"""`NeuralMemory` as a standalone layer."""

import pytest
import torch
from torch.nn import functional as F

from tests.core.small import model
from titans_core import Documents, MemoryConfig, NeuralMemory, record
from titans_core.telemetry import healthy_limits, out_of_range, weight_norm
from titans_kernels import neural_memory


@pytest.mark.parametrize("forget_to", ["zero", "initial"])
def test_telemetry_reports_the_surprise_before_the_write(forget_to):
    memory = model(conv=False, chunk_size=1, forget_to=forget_to).blocks[0].memory
    x = torch.randn(2, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with record(memory) as seen, torch.no_grad():
        memory(x)
    cache, errors = memory.start(2), []
    for t in range(20):  # a token at a time: the cache then holds the weights before each token
        k, v, *_ = memory._project_tokens(x[:, t : t + 1], {})[1]
        errors.append((memory.predict(k, cache.start.weights) - v).square().sum(-1).mean())
        _, cache = memory(x[:, t : t + 1], cache)
    assert seen.summary()["surprise"] == pytest.approx(torch.stack(errors[1:]).mean().item())
    weights = list(memory.absolute_weights(cache.start.weights))
    norms = [sum(w[i].square().sum() for w in weights).sqrt() for i in range(2)]
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
    for read, message in ((x[:1, :13], "cache: 5 tokens into a chunk"), (x[:, :16], "cache: 2 sequences")):
        given = layer(read)[1]
        with pytest.raises(ValueError, match=message):
            layer(x[:1, 16:], given, documents)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_memory_that_forgets_all_is_as_it_began_where_it_forgets_to_its_initial_weights(depth):
    x = torch.randn(1, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for forget_to in ("zero", "initial"):
        memory = model(forget_to=forget_to, depth=depth, momentum=False, conv=False).blocks[0].memory
        _, cache = memory(x)
        with torch.no_grad():
            memory.alpha.bias.fill_(1e6)
            memory.theta.bias.fill_(-1e6)
        _, cache = memory(x[:, :8], cache)
        expected = [W.detach()[None] if forget_to == "initial" else torch.zeros_like(W)[None]
                    for W in memory.initial_weights]  # fmt: skip
        torch.testing.assert_close(list(memory.absolute_weights(cache.start.weights)), expected)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_carried_state_trains_the_initial_weights_that_it_forgets_to(depth):
    x = torch.randn(1, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    memory = model(forget_to="initial", depth=depth).blocks[0].memory
    with torch.no_grad():
        _, cache = memory(x)
    y, _ = memory(x, cache)
    grads = torch.autograd.grad(y.square().sum(), list(memory.initial_weights))
    assert all(dW.norm() > 1e-4 for dW in grads)


@pytest.mark.parametrize("forget_to", ["zero", "initial"])
def test_a_memory_that_overshoots_is_named(forget_to):
    repeated = torch.zeros(1, 400, dtype=torch.long)
    for limits, wrong in (({"surprise_bound": None}, True), ({"write_budget": 1.0}, False)):
        net = model(max_theta=1.0, theta_bias=2.0, chunk_size=16, forget_to=forget_to, **limits)
        with record(net) as seen, torch.no_grad():
            state = net(repeated).state
        message = out_of_range(seen.summary(), healthy_limits(net))
        assert (message or "").startswith("memory out of range: ") == wrong
        if not wrong:
            assert weight_norm(net, state)["weight_norm"] == pytest.approx(seen.summary()["weight_norm"])


def test_models_without_a_memory_have_no_limits():
    net = model("mamba2")
    assert healthy_limits(net) == {}
    assert weight_norm(net, net(torch.zeros(1, 9, dtype=torch.long)).state) == {}
    assert out_of_range({}, {}) is None


@pytest.mark.parametrize(("chunk_size", "backend"), [(1, "online"), (8, "chunked"), (8, "autograd")])
def test_where_only_the_last_layer_is_written_the_others_are_features(chunk_size, backend):
    """Token by token: the gradient of the whole memory with respect to its last layer alone."""
    options = {"written": "last", "depth": 3, "chunk_size": chunk_size, "surprise_bound": None}
    memory = model(conv=False, qk_norm=False, backend=backend, **options).blocks[0].memory
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 33, 16, dtype=torch.float64, generator=generator)
    (q, k), v = (memory.project(x, "qk", {})[0]), memory._project_tokens(x, {})[1].v
    gates = memory._project_tokens(x, {})[1][2:5]
    below, W = list(memory.feature_weights), memory.initial_weights[0]
    assert len(below) == 2
    assert len(memory.initial_weights) == 1

    def apply(weights: torch.Tensor, x_HE: torch.Tensor) -> torch.Tensor:
        x = x_HE[:, None]
        for B in below:
            x = torch.nn.functional.silu(x @ B)
        return (x @ weights)[:, 0]

    S, start, reads = torch.zeros_like(W), W, []
    for t in range(x.shape[1]):
        start = W if t % chunk_size == 0 else start
        alpha, eta, theta = (gate[0, t, :, None, None] for gate in gates)
        loss = (apply(start, k[0, t]) - v[0, t]).square().sum()
        (gradient,) = torch.autograd.grad(loss, start, create_graph=True)
        S = eta * S - theta * gradient
        W = (1 - alpha) * W + S
        reads.append(apply(W, q[0, t]))
    writes = memory._project_tokens(x, {})
    y, after = memory.extend(*writes[:2], memory.start(1).memory)
    expected, found = [torch.stack(reads)[None], W[None]], [y, after.memory().weights[0]]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    leaves = [p for name, p in memory.named_parameters() if not name.startswith(("w_o", "output"))]
    sums = (sum(part.square().sum() for part in both) for both in (found, expected))
    grads = [torch.autograd.grad(total, leaves, retain_graph=True) for total in sums]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk_size", [1, 8])
def test_polynomial_features_are_those_of_all_products(depth, chunk_size):
    """A memory of the E^2 products has the same reads, from a first layer with the same rows."""
    memory = model(feature_degree=2, depth=depth, chunk_size=chunk_size, surprise_bound=None).blocks[0].memory
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 21, 16, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        memory.polynomial.coefficients_HI.mul_(torch.rand(2, 3, generator=generator))
    q, writes, _ = memory._project_tokens(x, memory.start(2).conv_state)
    a = memory.polynomial.coefficients_HI

    def phi(x: torch.Tensor) -> torch.Tensor:
        one, products = torch.ones_like(x[..., :1]), x[..., :, None] * x[..., None, :]
        return torch.cat([a[:, :1] * one, a[:, 1:2] * x, a[:, 2:] * products.flatten(-2)], -1)

    plain_q, plain_k = memory.project(x, "qk", memory.start(2).conv_state)[0]
    first, *rest = memory.initial_weights
    rows, columns = torch.triu_indices(8, 8)
    same = first.new_zeros(2, 1 + 8 + 64, first.shape[-1])
    same[:, :9] = first[:, :9]
    products = first[:, 9:] / (1 + (rows != columns).double()).sqrt()[:, None]
    same[:, 9 + 8 * rows + columns] = products
    same[:, 9 + 8 * columns + rows] = products
    options = {"chunk_size": chunk_size, "backend": "reference"}
    expected, after = neural_memory(phi(plain_q), phi(plain_k), *writes[1:5], (same, *rest), **options)
    y, state = memory.extend(q, writes, memory.start(2).memory)
    found = [y, *state.memory().weights[1:], *state.memory().momentum[1:]]
    wanted = [expected, *after.weights[1:], *after.momentum[1:]]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    leaves = [p for name, p in memory.named_parameters() if not name.startswith(("w_o", "output"))]
    grads = [torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (y, expected)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_keys_are_subtracted_from_queries_before_the_norm(qk_norm):
    """As in MDN's code, on the layer without its convolution; a read at earlier weights does the same."""
    c = MemoryConfig(heads=3, query_correction=True, conv=False, qk_norm=qk_norm)
    memory = NeuralMemory(12, c).double()
    assert memory.log_correction_H is not None
    assert (memory.log_correction_H.exp() < 1).all()
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k = (F.silu(x @ w.weight.T).unflatten(-1, (3, 4)) for w in (memory.w_q, memory.w_k))
    q = torch.stack([q[:, :, h] - memory.log_correction_H[h].exp() * k[:, :, h] for h in range(3)], 2)
    if qk_norm:
        q, k = (y / y.norm(dim=-1, keepdim=True) for y in (q, k))
    _, found, writes, _ = memory.retrieve(x)
    torch.testing.assert_close((found, writes.k), (q, k), rtol=1e-12, atol=1e-12)
    read, _ = memory.read(x, memory.start(2).start.weights, {})
    expected = memory.output(memory.predict(q, memory.start(2).start.weights), x)
    torch.testing.assert_close(read, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(read.sum(), memory.log_correction_H)
    assert (gradient != 0).all()


NO_MATRIX = "^memory.theta_per: matrix is not supported by the rule"


@pytest.mark.parametrize(("options", "message"), [
    *(({"residual": "input", **field}, "residual: input is not supported with .*; use none")
      for field in ({"written": "last"}, {"output_activation": "silu"}, {"feature_degree": 2})),
    ({"rule": "delta_ttt"}, "^memory.chunk_size: 64 is not supported by the rule delta_ttt; use 1$"),
    ({"start_rank": 2, "depth": 1}, "start_rank: 2 needs expansion 1, written all and depth 2 or more"),
    ({"start_rank": 2, "activation": "swiglu"}, "start_rank: 2 is not supported with activation swiglu"),
    ({"theta_per": "matrix", "write_budget": 1.0},
     r"theta_per: matrix is not supported with write_budget 1\.0; use head"),
    ({"theta_per": "matrix", "rule": "omega"}, f"{NO_MATRIX} omega"),
    ({"theta_per": "matrix", "rule": "delta_ttt"}, f"{NO_MATRIX} delta_ttt"),
    ({"theta_per": "matrix", "rule": "mdn", "rule_options": {"angle": 1.0}}, f"{NO_MATRIX} mdn"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NeuralMemory(32, MemoryConfig(heads=2, **options))


def test_layers_may_start_at_half_the_identity_plus_a_low_rank():
    layer = NeuralMemory(32, MemoryConfig(heads=2, start_rank=2, depth=3))
    first, *later = layer.start_weights
    assert len(later) == 2
    assert first.std() < 0.03
    for W in later:
        assert torch.linalg.matrix_rank(W - 0.5 * torch.eye(16)).tolist() == [2, 2]
