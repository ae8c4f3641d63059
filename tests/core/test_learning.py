"""Losses equal cross-entropies of the logits; gradients reach every parameter and are exact; models learn."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import titans_core.model
from tests.core.small import MEMORY_VARIANTS, SWITCHES, VARIANTS, config, model, tokens
from titans_core import AttentionConfig, LanguageModel, MemoryConfig, ModelConfig


# lmm is enough for `make test-fast`
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "switch"), [
    *((v, "default") for v in MEMORY_VARIANTS), *(("lmm", switch) for switch in ("later_version", "gated")),
])  # fmt: skip
def test_every_parameter_of_the_memory_has_the_gradient_finite_differences_give(variant, switch):
    m = model(variant, **SWITCHES[switch])
    x, y = tokens(2, 17), tokens(2, 17, seed=2)

    def loss() -> Tensor:
        return F.cross_entropy(m(x).logits.flatten(0, 1), y.flatten())

    parameters = {n: p for n, p in m.named_parameters() if ".memory." in n or "persistent" in n}
    kinds = ["w_o", "alpha", "eta", "theta", "initial_weights"]
    kinds += [f"{part}_{n}" for part in ("w", "conv") for n in "qkv"]
    assert all(any(k in n for n in parameters) for k in kinds)
    grads = torch.autograd.grad(loss(), list(parameters.values()))
    generator = torch.Generator().manual_seed(3)
    for (name, p), grad in zip(parameters.items(), grads, strict=True):
        assert grad.norm() > 1e-8, f"{name} is not trained"
        # along the gradient itself and one random direction
        for direction in (grad / grad.norm(), torch.randn(p.shape, generator=generator, dtype=p.dtype)):
            direction = direction / direction.norm()
            slope, step = (grad * direction).sum(), 1e-5
            with torch.no_grad():
                p += step * direction
                up = loss()
                p -= 2 * step * direction
                down = loss()
                p += step * direction
            error = abs((up - down) / (2 * step) - slope)
            assert error <= 1e-5 * grad.norm(), f"{name}: {error / grad.norm():.1e}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_batch_is_learned_by_heart(variant):
    torch.manual_seed(0)
    m = LanguageModel(config(variant).model_copy(update={"d_model": 32}))
    optimizer, x = torch.optim.AdamW(m.parameter_groups(0.1), lr=1e-2), tokens(2, 17)
    for _ in range(300):
        loss = F.cross_entropy(m(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten())
        if loss < 0.05:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
    assert loss < 0.05


@pytest.mark.parametrize("variant", VARIANTS)
def test_step_keeps_no_graph(variant):
    """Autograd keeps what is changed in place after it was saved in a cycle that is never freed."""
    m, x = LanguageModel(config(variant)), tokens(2, 22)  # rows end inside a chunk
    parameters = [weakref.ref(p) for p in m.parameters()]
    m(x[:, :-1], targets_BT=x[:, 1:]).losses.mean().backward()
    del m
    gc.collect()
    assert not [p for p in parameters if p() is not None]


@pytest.mark.slow
def test_deep_memory_trains_on_long_rows_at_default_settings():
    torch.manual_seed(0)
    m = LanguageModel(ModelConfig(vocab_size=64, d_model=8, n_layers=1, memory=MemoryConfig(depth=4, heads=1),
                                  attention=AttentionConfig(heads=1)))  # fmt: skip
    optimizer = torch.optim.AdamW(m.parameter_groups(0.1), lr=4e-4)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(200):
        x = torch.randint(0, 64, (1, 4097), generator=generator)
        x[:, 1::2] = x[:, :-1:2]  # every second token repeats the one before it
        loss = F.cross_entropy(m(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert torch.isfinite(torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0))
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("positions", [1, 7, 42, 1000])
def test_losses_and_gradients_are_those_of_all_logits_at_once(monkeypatch, positions):
    m, row = model(), tokens(2, 22)
    x, targets = row[:, :-1], row[:, 1:]
    expected = F.cross_entropy(m(x).logits.transpose(1, 2), targets, reduction="none")
    weights = torch.rand(2, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected_grads = torch.autograd.grad((expected * weights).sum(), list(m.parameters()))
    monkeypatch.setattr(titans_core.model, "LOGITS_PER_BLOCK", positions * 40)
    out = m(x, targets_BT=targets)
    assert out.logits is None
    torch.testing.assert_close(out.losses, expected)
    actual = torch.autograd.grad((out.losses * weights).sum(), list(m.parameters()))
    torch.testing.assert_close(actual, expected_grads)


def test_no_more_logits_are_held_than_allowed(monkeypatch):
    m, row, sizes = model(), tokens(2, 22), []
    m.head.register_forward_hook(lambda head, given, logits: sizes.append(logits.numel()))
    monkeypatch.setattr(titans_core.model, "LOGITS_PER_BLOCK", 10 * 40)
    sizes_saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes_saved.append(t.numel()) or t, lambda t: t):
        losses = m(row[:, :-1], targets_BT=row[:, 1:]).losses
    assert max(sizes) == 10 * 40
    # the graph keeps features and targets, but no logits
    assert 10 * 40 not in sizes_saved
    losses.sum().backward()
    assert max(sizes) == 10 * 40
