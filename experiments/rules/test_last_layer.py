"""The memory whose last layer alone is written, against a loop over its tokens."""

import pytest
import torch

from experiments.rules.last_layer import LastLayerMemory
from titans_core import LanguageModel, MemoryConfig, ModelConfig
from titans_core.projections import Projections


@pytest.mark.parametrize(("chunk_size", "backend"), [(1, "online"), (8, "chunked"), (8, "generic")])
def test_layers_below_the_last_are_features(chunk_size, backend):
    """Token by token: the gradient of the whole memory with respect to its last layer alone."""
    torch.manual_seed(0)
    options = {"chunk_size": chunk_size, "surprise_bound": None, "backend": backend}
    config = MemoryConfig(heads=2, depth=3, conv=False, qk_norm=False, **options)
    memory = LastLayerMemory(16, config).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 33, 16, dtype=torch.float64, generator=generator)
    (q, k), v = (Projections.project(memory, x, "qk", {})[0]), memory._project_tokens(x, {})[1].v
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
    y, after = memory.extend(*writes[:2], memory.start(1))
    expected, computed = [torch.stack(reads)[None], W[None]], [y, after.memory.memory().weights[0]]
    torch.testing.assert_close(computed, expected, rtol=1e-9, atol=1e-10)
    leaves = [p for name, p in memory.named_parameters() if not name.startswith(("w_o", "output"))]
    sums = (torch.stack([part.square().sum() for part in both]).sum() for both in (computed, expected))
    grads = [torch.autograd.grad(total, leaves, retain_graph=True) for total in sums]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


def test_model_continues_a_sequence():
    variant = "experiments.rules.last_layer:LastLayerLMM"
    memory = MemoryConfig(heads=2, depth=2, chunk_size=8)
    torch.manual_seed(0)
    config = ModelConfig(variant=variant, vocab_size=20, d_model=16, n_layers=1, memory=memory)
    m = LanguageModel(config).double()
    x = torch.randint(0, 20, (2, 21))
    first = m(x[:, :5])
    continued = torch.cat([first.logits, m(x[:, 5:], first.state).logits], 1)
    torch.testing.assert_close(continued, m(x).logits, rtol=1e-9, atol=1e-9)
