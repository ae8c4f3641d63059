"""The online rule of a linear memory in blocks: the recurrence, whatever the length and the gates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titans_kernels import find_rule, forms_used, neural_memory
from titans_kernels.memory import op
from titans_kernels.memory.forms import online
from titans_kernels.memory.rules.momentum_delta import MomentumDelta

ONLINE = {"chunk_size": 1, "surprise_bound": None}


def made(T: int, *, B: int = 2, H: int = 2, D: int = 5, F: int = 4, momentum: bool = True, seed: int = 0):
    """Arguments of `neural_memory`, all of them leaves, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = random(B, T, H, D), random(B, T, H, D), random(B, T, H, F)
    k = torch.nn.functional.normalize(k, dim=-1)
    alpha, eta, theta = (torch.sigmoid(random(B, T, H)) for _ in range(3))
    eta = eta if momentum else torch.zeros_like(eta)
    given = [q, k, v, 0.3 * alpha, eta, 0.5 * theta, random(B, H, D, F), random(B, H, D, F)]
    given += [torch.sigmoid(random(B, T, H, 1))]
    return [x.detach().requires_grad_() for x in given]


def computed(given: list[Tensor], backend: str, **options) -> list[Tensor]:
    *tokens, W, S, extra = given
    rule = options.get("rule", "paper")
    own = (find_rule(rule) if isinstance(rule, str) else rule).extra_gates
    y, state = neural_memory(
        *tokens, (W,), (S,), extra=extra if own else None, backend=backend, **ONLINE, **options
    )
    outputs = [y, *state.weights, *state.momentum]
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in outputs]
    loss = torch.stack([(x * w).sum() for x, w in zip(outputs, weights, strict=True)]).sum()
    return [x.detach() for x in outputs] + list(torch.autograd.grad(loss, given if own else given[:-1]))


@pytest.mark.parametrize(
    "rule", ["paper", "gated_delta", "mdn", MomentumDelta(tied=True), MomentumDelta(angle=2.0)], ids=str
)
@pytest.mark.parametrize("T", [1, 7, 31, 32, 33, 96, 101, 18 * 32, 41 * 32 + 5])
@pytest.mark.parametrize("compiled", [True, False])
def test_it_is_the_recurrence_forward_and_every_gradient(monkeypatch, T, rule, compiled):
    if not compiled:
        monkeypatch.setattr(online, "COMPILED", 0)
    given = made(T)
    torch.testing.assert_close(
        computed(given, "online", rule=rule), computed(given, "reference", rule=rule), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(
    "rule", ["paper", "gated_delta", "mdn", MomentumDelta(tied=True), MomentumDelta(angle=2.0)], ids=str
)
def test_gates_at_their_ends(rule):
    given = made(40, momentum=False)
    with torch.no_grad():
        # all is forgotten, nothing is, nothing is written
        given[3][:, 5], given[3][:, 17], given[5][:, 9] = 1.0, 0.0, 0.0
    found, expected = (computed(given, backend, rule=rule) for backend in ("online", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("rule", ["paper", "gated_delta", "mdn"])
def test_packed_documents_start_afresh(rule):
    given = [x[:1].detach().requires_grad_() for x in made(50)]
    given[6:8] = [x[0].detach().requires_grad_() for x in given[6:8]]
    borders = torch.tensor([0, 13, 13, 46, 50], dtype=torch.int32)
    found, expected = (
        computed(given, backend, rule=rule, cu_seqlens=borders) for backend in ("online", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_auto_takes_it_where_it_serves():
    *tokens, W, S, _ = made(8)
    for rule, options, served in (
        ("paper", ONLINE, True),
        ("gated_delta", ONLINE, True),
        ("paper", ONLINE | {"chunk_size": 2}, False),
        ("paper", ONLINE | {"surprise_bound": 1.0}, False),
        ("yaad", ONLINE, False),
    ):
        forms_used(forget=True)
        neural_memory(*tokens, (W,), (S,), rule=rule, **options)
        assert ("neural_memory: online" in forms_used()) == served, (rule, options)


class OnAGPU(Tensor):
    """A tensor that says it is there, which is all that the choice of a form asks."""

    is_cuda = True


def test_a_gpu_takes_it_too():
    *tokens, W, _, _ = made(8)
    inputs = op.Inputs.of(*(x.as_subclass(OnAGPU) for x in tokens))
    for chunk_size, taken in ((1, True), (16, False)):
        form = op.choose("auto", inputs, (W,), op.Options(chunk_size, "silu", None, None))
        assert (form.name == "online") == taken


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chunk_size": 4, "surprise_bound": None}, "it supports chunk_size 1, not 4"),
        (ONLINE | {"rule": "huber"}, "does not support the rule"),
    ],
)
def test_a_call_that_it_does_not_serve_is_refused_by_name(options, reason):
    *tokens, W, S, _ = made(8)
    with pytest.raises(ValueError, match=rf"^backend: online does not support this call: .*{reason}"):
        neural_memory(*tokens, (W,), (S,), backend="online", **options)


def test_float32_at_length_is_near_float64():
    given = made(2048, D=32, F=32)
    exact, *_ = computed(given, "online")
    rounded, *_ = computed([x.detach().float().requires_grad_() for x in given], "online")
    assert (rounded - exact).norm() < 1e-5 * exact.norm()


def test_the_state_keeps_no_more_than_itself_in_memory():
    for T in (31, 320):
        *tokens, W, S, _ = made(T)
        _, state = neural_memory(*tokens, (W,), (S,), backend="online", **ONLINE)
        for x in (*state.weights, *state.momentum):
            assert x.untyped_storage().nbytes() == x.nbytes
