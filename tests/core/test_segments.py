"""MAC's segments in one compiled call: equal to one segment after the other with PyTorch's operators."""

import pytest
import torch

from tests.core.small import SWITCHES, config, tokens
from tests.kernels.cases import needs_compiler
from titans_core import LanguageModel
from titans_core.blocks import mac
from titans_kernels import native

pytestmark = needs_compiler
SUPPORTED = [
    "default", "linear", "deep", "online", "no_conv", "no_momentum", "no_decay", "unbounded", "wide_gelu",
    "write_budget", "forget_to_initial", "linear_to_initial",
]  # fmt: skip
OTHERS = {
    "no_output_gate": {"output": ("norm",)},
    "plain_values": {"value_norm": False, "qk_norm": False, "max_theta": 0.05},
    "bounded_decay": {"max_alpha": 0.25},
    "no_persistent": {"persistent": 0},
    "no_positions": {"attention": {"positions": "none"}},
    "plain_attention": {"attention": {"conv": False, "qk_norm": False}},
    "short_convolution": {"conv": 2, "attention": {"conv_kernel": 6}},
}
CASES = {name: SWITCHES[name] for name in SUPPORTED} | OTHERS


def model(**options) -> LanguageModel:
    torch.manual_seed(0)
    net = LanguageModel(config("mac", **options)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


def results(net: LanguageModel, x: torch.Tensor, starts: torch.Tensor | None, cuts: list[int]) -> list:
    """Losses and the gradient of every parameter; a row in pieces of ``cuts`` tokens."""
    losses, state, first = [], None, 0
    for cut in cuts:
        part, targets = (x[:, i : i + cut] for i in (first, first + 1))
        own = None if starts is None else starts[:, first : first + cut]
        out = net(part, targets_BT=targets, state=state, document_starts=own)
        losses.append(out.losses)
        state, first = out.state if starts is None else None, first + cut
    found = torch.cat(losses, 1)
    return [found, *torch.autograd.grad(found.sin().sum(), list(net.parameters()), materialize_grads=True)]


def both(monkeypatch, *arguments) -> tuple[list, list, int]:
    """With the compiled call and without, and how often it was made."""
    made, attend = [], mac.attend_segments
    with monkeypatch.context() as patch:
        patch.setattr(mac, "attend_segments", lambda *args: made.append(1) or attend(*args))
        found = results(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(mac, "serves_segments", lambda *args: False)
        return found, results(*arguments), len(made)


def assert_same(found: list, expected: list) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() <= 1e-9 * y.norm() + 1e-12


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_single_segments(monkeypatch, name):
    net, x = model(**CASES[name]), tokens(3, 53)
    found, expected, calls = both(monkeypatch, net, x, None, [52])
    assert calls == 2  # blocks
    assert_same(found, expected)


PACKED = ["default", "no_conv", "write_budget", "forget_to_initial", "short_convolution"]


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_of_any_length(monkeypatch, name):
    net, x = model(**CASES[name]), tokens(2, 48)
    starts = torch.zeros(2, 47, dtype=torch.bool)
    starts[0, [0, 1, 2, 19]] = starts[1, [0, 16, 33]] = True
    found, expected, calls = both(monkeypatch, net, x, starts, [47])
    assert calls == 2
    assert_same(found, expected)


@pytest.mark.parametrize("cuts", [[16, 32, 4], [32, 20], [5, 47], [20, 32]])
def test_the_state_and_its_gradient_are_carried(monkeypatch, cuts):
    net, x = model(), tokens(2, 53)
    found, expected, calls = both(monkeypatch, net, x, None, cuts)
    assert calls
    assert_same(found, expected)
    assert_same(found, results(net, x, None, [52]))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_nothing(threads, torch_threads):
    net, x = model(), tokens(5, 33)
    expected = results(net, x, None, [32])
    torch_threads(threads)
    assert_same(results(net, x, None, [32]), expected)


def test_large_projections_are_left_to_pytorch(monkeypatch):
    monkeypatch.setattr("titans_kernels.attention.MAX_BYTES", 0)
    net, x = model(), tokens(2, 33)
    assert both(monkeypatch, net, x, None, [32])[2] == 0


def test_without_a_compiler_pytorch_does_it(monkeypatch):
    net, x = model(), tokens(2, 33)
    expected = results(net, x, None, [32])
    monkeypatch.setenv("TITANS_NATIVE", "0")
    native.library.cache_clear()
    try:
        assert_same(results(net, x, None, [32]), expected)
    finally:
        monkeypatch.undo()
        native.library.cache_clear()


@pytest.mark.parametrize("then", [torch.float32, torch.float64])
def test_a_state_of_another_precision_is_continued(then):
    """A state from autocast, or from before the model was converted, is not read as the model's dtype."""
    net, x = model().float(), tokens(2, 80)
    with torch.no_grad():
        exact = net.double()(x[:, :64]).logits[:, 32:]
        net = net.float()
        with torch.autocast("cpu", torch.bfloat16, enabled=then is torch.float32):
            state = net(x[:, :32]).state
        found = net.to(then)(x[:, 32:64], state).logits
    torch.testing.assert_close(found, exact.to(then), rtol=0.1, atol=0.1)
