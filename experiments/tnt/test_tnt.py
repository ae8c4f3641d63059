"""TNT against its equations token by token, and its speed against fine chunks."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.tnt.tnt import TNT
from titans_core import AttentionConfig, LanguageModel, MemoryConfig, ModelConfig, watch
from titans_core.audit import audit
from titans_core.audit.variants import variant_factory
from titans_core.blocks import Positions
from titans_core.memory import NeuralMemory, Writes

VARIANT = "experiments.tnt.tnt:TNT"


def config(options: dict, **memory) -> ModelConfig:
    small = {"heads": 2, "chunk_size": 4, **TNT.preset_memory, **memory}
    return ModelConfig(
        variant=VARIANT, options=options, vocab_size=17, d_model=16, n_layers=2, persistent_tokens=3,
        memory=MemoryConfig(**small), attention=AttentionConfig(heads=2),
    )  # fmt: skip


def block(memory: dict | None = None, **options) -> TNT:
    torch.manual_seed(0)
    options = {"global_chunk": 6, "local_chunks": [2, 4], "shard": 12} | options
    tnt = LanguageModel(config(options, surprise_bound=None, **memory or {})).double().blocks[0]
    with torch.no_grad():
        for p in tnt.parameters():
            p += 0.1 * torch.randn_like(p)
    assert isinstance(tnt, TNT)
    return tnt


def naive(block: TNT, x: Tensor, errors: dict | None = None) -> Tensor:
    """Eqs. 5 to 7 for one row [1, T, D], a token and a head at a time.

    ``errors`` takes ``||M(k_t) - v_t||^2`` by memory, time, head and token t: before and after the token is
    written, and at the end of its shard.
    """
    z = block.norm(x)
    q, projected, _ = block.shared._project_tokens(z, block.shared.zero_conv_state())
    reads = torch.zeros_like(q)
    for index, memory in enumerate((block.shared, *block.local)):
        assert isinstance(memory, NeuralMemory)
        shared, size = memory is block.shared, memory.config.chunk_size
        writes = Writes(projected.k, projected.v, *memory.gates(z))
        for h in range(memory.heads):
            fresh = [W[h] for W in memory.initial_weights]
            weights = start = fresh
            keys = torch.zeros(memory.head_dim, memory.head_dim, dtype=x.dtype)
            for t in range(x.shape[1]):
                if not shared and t % block.options.shard == 0:
                    weights, keys = fresh, torch.zeros_like(keys)
                position = t if shared else t % block.options.shard
                if position % size == 0:
                    start = weights
                k, v, theta = writes.k[0, t, h], writes.v[0, t, h], writes.theta[0, t, h]
                keys = keys + torch.outer(k, k)
                a = k @ start[0]
                error = 2 * (F.silu(a) @ start[1] - v)
                sigmoid = a.sigmoid()
                slope = sigmoid * (1 + a * (1 - sigmoid))
                gradient = [torch.outer(k, (error @ start[1].T) * slope), torch.outer(F.silu(a), error)]
                before = weights
                weights = [W - theta * g for W, g in zip(weights, gradient, strict=True)]
                if errors is not None:
                    since = 0 if shared else t - t % block.options.shard
                    now = F.silu(writes.k[0, since : t + 1, h] @ weights[0]) @ weights[1]
                    after = (now - writes.v[0, since : t + 1, h]).square().sum(-1)
                    first = F.silu(k @ before[0]) @ before[1] - v
                    errors[index, "surprise", h, t], errors[index, "written", h, t] = first @ first, after[-1]
                    errors.update({(index, "final", h, since + i): e for i, e in enumerate(after)})
                query, at = q[0, t, h], start if shared else weights
                if not shared and block.options.projection != "none":
                    query = query @ keys
                    norm = query.norm().clamp(min=1) if block.options.projection == "clipped" else 1
                    query = query / norm
                reads[0, t, h] += F.silu(query @ at[0]) @ at[1]
    return x + block.shared.output(reads, z)


@pytest.mark.parametrize("projection", ["clipped", "keys", "none"])
def test_tnt_equals_published_recurrence(projection):
    tnt = block(projection=projection)
    x = torch.randn(1, 29, 16, dtype=torch.float64, requires_grad=True)
    y, _ = tnt.mix(x, None, Positions(torch.arange(29)[None]))
    expected, weight = naive(tnt, x), torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    inputs = [x, *(p for name, p in tnt.named_parameters() if not name.startswith("mlp"))]
    grads, expected_grads = (torch.autograd.grad((each * weight).sum(), inputs) for each in (y, expected))
    for grad, right in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("cuts", [[29], [5, 12, 12]])
def test_traces_equal_the_recurrence_and_split_at_shards(cuts):
    tnt, errors, state = block(), {}, None
    x = torch.randn(1, 29, 16, dtype=torch.float64)
    with torch.no_grad(), watch(tnt) as seen:
        for part, at in zip(x.split(cuts, 1), torch.arange(29)[None].split(cuts, 1), strict=True):
            _, state = tnt.mix(part, state, Positions(at))
    with torch.no_grad():
        naive(tnt, x, errors)
    traces = seen.traces(2)
    assert [trace.restarts.tolist() for trace in traces] == [[], [12, 24], [12, 24]]
    for (index, name, h, t), error in errors.items():
        torch.testing.assert_close(getattr(traces[index], name)[t, h], error, rtol=1e-9, atol=1e-9)
    shared, local = traces[0].own.position[..., 0], traces[1].own.position[..., 0]
    assert (shared[:6] == -1).all()  # the first chunk is read before it is written
    assert (shared[6:] < torch.arange(6, 29)[:, None] // 6 * 6).all()
    assert (local >= torch.arange(29)[:, None] // 12 * 12).all()


@pytest.mark.parametrize("length", [7, 12, 17])
def test_shard_after_a_detached_state_starts_from_the_weights_of_its_own_step(length):
    tnt, at = block({"conv": False}), torch.arange(12 + length)[None]
    x = torch.randn(1, 12 + length, 16, dtype=torch.float64)
    with torch.no_grad():  # the global memory is carried: here it writes and reads nothing
        tnt.shared.theta.bias.fill_(-1e9)
        for W in tnt.shared.initial_weights:
            W.zero_()
        _, state = tnt.mix(x[:, :12], None, Positions(at[:, :12]))
        starts = [W for memory in tnt.local for W in memory.initial_weights]
        for W in starts:  # a step of the optimiser
            W.add_(0.1 * torch.randn_like(W))
    y, _ = tnt.mix(x[:, 12:], state, Positions(at[:, 12:]))
    expected = naive(tnt, x[:, 12:])
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    grads, expected_grads = (torch.autograd.grad(each.sin().sum(), starts) for each in (y, expected))
    assert all(g.any() for g in expected_grads)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-8, atol=1e-9)


def test_local_memory_does_not_read_beyond_its_shard():
    tnt = block(local_chunks=[4])
    x = torch.randn(1, 24, 16, dtype=torch.float64, requires_grad=True)
    for W in tnt.shared.initial_weights:
        torch.nn.init.zeros_(W)
    y, _ = tnt.mix(x, None, Positions(torch.arange(24)[None]))
    reach = torch.autograd.grad(y[0, 20].sum(), x)[0][0].abs().sum(-1)
    # the convolution of the shard's first key sees three tokens more
    assert reach[:9].max() == 0
    assert reach[12:21].min() > 0


def test_shard_that_is_no_multiple_of_the_local_chunk_is_refused():
    with pytest.raises(ValueError, match=r"options\.shard: 12 is not a multiple of the local chunk 5"):
        LanguageModel(config({"local_chunks": [5], "shard": 12}))


@pytest.mark.slow
def test_tnt_passes_audit():
    report = audit(
        variant_factory(VARIANT, options={"global_chunk": 8, "local_chunks": [2, 4], "shard": 8}), length=40
    )
    assert [f"{r.check}: {r.finding}" for r in report.of("fail")] == []
