"""Losses of given targets equal the cross-entropy of the logits, for any block size."""

import pytest
import torch
from torch.nn import functional as F

import titans_core.model
from titans_core import LanguageModel, MemoryConfig, ModelConfig

VOCABULARY = 40


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    memory = MemoryConfig(heads=2, chunk_size=8)
    return LanguageModel(ModelConfig(vocab_size=VOCABULARY, d_model=16, n_layers=1, memory=memory)).double()


def rows(count: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count, length + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("positions", [1, 7, 42, 1000])
def test_losses_and_gradients_are_those_of_all_logits_at_once(model, monkeypatch, positions):
    tokens = rows(2, 21)
    x, targets = tokens[:, :-1], tokens[:, 1:]
    expected = F.cross_entropy(model(x).logits.transpose(1, 2), targets, reduction="none")
    weights = torch.rand(2, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected_grads = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
    monkeypatch.setattr(titans_core.model, "LOGITS_PER_BLOCK", positions * VOCABULARY)
    out = model(x, targets_BT=targets)
    assert out.logits is None
    torch.testing.assert_close(out.losses, expected)
    actual = torch.autograd.grad((out.losses * weights).sum(), list(model.parameters()))
    torch.testing.assert_close(actual, expected_grads)


def test_no_more_logits_are_held_than_allowed(model, monkeypatch):
    sizes: list[int] = []
    model.head.register_forward_hook(lambda head, given, logits: sizes.append(logits.numel()))
    monkeypatch.setattr(titans_core.model, "LOGITS_PER_BLOCK", 10 * VOCABULARY)
    tokens = rows(2, 21)
    held: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
        losses = model(tokens[:, :-1], targets_BT=tokens[:, 1:]).losses
    assert max(sizes) == 10 * VOCABULARY
    # the graph keeps features and targets, but no logits
    assert VOCABULARY * 10 not in held
    losses.sum().backward()
    assert max(sizes) == 10 * VOCABULARY
