"""Compiled products leave hooks, wrappers and parametrisations of linear layers in force."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.core.small import model, tokens
from titans_core import LanguageModel, NeuralMemory
from titans_core.layers import Linear, is_plain
from titans_core.projections import project_gates


class LoRA(Linear):
    """A frozen linear layer and a low-rank correction of it, in the manner of adapters."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.down = nn.Parameter(torch.randn(2, layer.in_features, dtype=layer.weight.dtype))
        self.up = nn.Parameter(torch.randn(layer.out_features, 2, dtype=layer.weight.dtype))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.down.T @ self.up.T


class Wrapper(nn.Module):
    """Scales what its layer returns; it has the attributes that adapters have."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer, self.out_features = layer, layer.out_features

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, input: Tensor) -> Tensor:
        return 1.5 * self.layer(input)


class Doubled(nn.Module):
    def forward(self, X: Tensor) -> Tensor:
        return 2 * X


def parametrized(layer: nn.Linear) -> nn.Linear:
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def hooked(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda module, given, y: 1.5 * y)
    return layer


def replaced(layer: nn.Linear) -> nn.Linear:
    layer.forward = lambda input: 1.5 * nn.Linear.forward(layer, input)
    return layer


CHANGES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "hook": hooked, "lora": LoRA, "wrapper": Wrapper, "parametrization": parametrized, "forward": replaced,
}  # fmt: skip


def names(variant: str) -> list[str]:
    """The linear layers of a block and the head."""
    found = [name for name, m in model(variant).named_modules() if isinstance(m, nn.Linear)]
    return [name for name in found if name == "head" or name.startswith("blocks.0.")]


def run(m: LanguageModel, targets: bool = True) -> Tensor:
    x = tokens(2, 65)
    output = m(x[:, :-1], targets_BT=x[:, 1:]) if targets else m(x[:, :-1])
    return output.losses if targets else output.logits


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("variant", ["mac", "mag"])
def test_a_changed_layer_is_called(variant, change):
    """Each changes the losses as it does those from logits of a model whose every layer is called."""
    plain = run(model(variant))
    for name in names(variant):
        m = model(variant)
        parent, _, own = name.rpartition(".")
        setattr(m.get_submodule(parent), own, CHANGES[change](m.get_submodule(name)))
        changed = run(m)
        assert (changed - plain).abs().max() > 1e-9, f"{name} was not called"
        for module in m.modules():  # no layer is plain: every one is called
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, given, y: None)
        torch.testing.assert_close(run(m), changed, rtol=1e-9, atol=1e-10)
        logits, targets = run(m, targets=False).mT, tokens(2, 65)[:, 1:]
        from_logits = nn.functional.cross_entropy(logits, targets, reduction="none")
        torch.testing.assert_close(from_logits, changed, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag"])
def test_a_hook_of_the_memory_s_norm_is_called(variant):
    m = model(variant)
    norm = next(x for x in m.modules() if isinstance(x, NeuralMemory)).output_norm
    plain, doubled = run(m), norm.register_forward_hook(lambda module, given, y: 2 * y)
    assert (run(m) - plain).abs().max() > 1e-9
    doubled.remove()
    norm.register_forward_hook(lambda module, given, y: None)
    torch.testing.assert_close(run(m), plain, rtol=1e-9, atol=1e-10)


class Int8(nn.Module):
    """A layer whose weight is quantised, and takes activations as they are."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.scale = layer.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((layer.weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("bias", layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale).T.to(x.dtype) + self.bias


def test_gates_of_quantised_layers_take_the_input_as_it_is():
    torch.manual_seed(0)
    layers, x = [Int8(nn.Linear(8, 3)), nn.Linear(8, 2)], torch.randn(2, 5, 8)
    for layer, gate in zip(layers, project_gates(layers, x), strict=True):
        torch.testing.assert_close(gate, torch.sigmoid(layer(x)))


def test_plain_layers_are_those_of_their_own_class_without_hooks():
    layer = Linear(3, 3)
    assert is_plain(layer, nn.Linear(3, 3))
    handle = layer.register_forward_pre_hook(lambda module, given: None)
    assert not is_plain(nn.Linear(3, 3), layer)
    handle.remove()
    assert is_plain(layer)
    for change in CHANGES.values():
        assert not is_plain(change(Linear(3, 3)))
