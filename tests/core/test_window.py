"""Attention in one compiled call: equal to PyTorch's form of it, with every gradient."""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import needs_compiler
from titans_core import attention
from titans_core.attention import Attention, AttentionState
from titans_core.config import AttentionConfig
from titans_core.documents import Documents
from titans_kernels.attention import MAX_SPAN

pytestmark = needs_compiler
D, HEADS, BATCH = 20, 2, 3
CASES = {"default": {}, "plain": dict.fromkeys(("silu", "conv", "qk_norm"), False)}
CASES["no_positions"] = {"positions": "none"}


def layer(window: int | None, **options) -> Attention:
    torch.manual_seed(0)
    found = Attention(D, AttentionConfig(heads=HEADS, window=window, **options)).double()
    for p in found.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return found


def inputs(T: int, persistent: int) -> list[Tensor]:
    shapes = (BATCH, T, D), *([(persistent, D)] if persistent else [])
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients(parts: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    sums = [(x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in parts]
    loss = torch.stack(sums).sum()
    return [*parts, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


def assert_both_are_equal(monkeypatch, run, calls: int = 1) -> None:
    """``run`` with the compiled call, made ``calls`` times, and without."""
    made, attend = [], attention.attend_window
    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend_window", lambda *args: made.append(1) or attend(*args))
        found = run()
    with monkeypatch.context() as patch:
        patch.setattr(attention, "serves_window", lambda *args: False)
        expected = run()
    assert len(made) == calls
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


each_kind = pytest.mark.parametrize("name", CASES)
each_span = pytest.mark.parametrize(("window", "persistent"), list(product([1, 5, 32, None], [0, 4])))


@each_kind
@each_span
def test_rows_of_any_length(monkeypatch, name, window, persistent):
    m = layer(window, **CASES[name])
    for T in (2, 33):
        x, *prefix = leaves = inputs(T, persistent)

        def run(x=x, prefix=prefix, leaves=leaves, T=T) -> list[Tensor]:
            y, after = m(x, torch.arange(T)[None], None, *prefix)
            return gradients([y, *after.keys], [*leaves, *m.parameters()])

        assert_both_are_equal(monkeypatch, run)


@each_kind
@each_span
def test_packed_documents_of_any_length(monkeypatch, name, window, persistent):
    m, T = layer(window, **CASES[name]), 40
    x, *prefix = leaves = inputs(T, persistent)
    documents = Documents.from_starts(torch.rand(BATCH, T) < 0.1)

    def run() -> list[Tensor]:
        y, after = m(x, documents.position_BT, None, prefix[0] if prefix else None, documents)
        assert after is None
        return gradients([y], [*leaves, *m.parameters()])

    assert_both_are_equal(monkeypatch, run)


@pytest.mark.parametrize(("window", "persistent"), list(product([6, None], [0, 4])))
@pytest.mark.parametrize("cuts", [[17, 3, 20], [2, 2, 1, 35]])
def test_the_keys_and_their_gradients_are_carried_and_reset(monkeypatch, window, persistent, cuts):
    m, T = layer(window), sum(cuts)
    x, *prefix = leaves = inputs(T, persistent)
    prefix = prefix[0] if prefix else None

    def run() -> list[Tensor]:
        state, parts = None, []
        for i, cut in enumerate(cuts):
            first = sum(cuts[:i])
            if i == 2:
                assert isinstance(state, AttentionState)
                state = m.reset(state, torch.tensor([False, True, False]), prefix)
            positions = torch.arange(first, first + cut)[None]
            y, state = m(x[:, first : first + cut], positions, state, prefix)
            parts.append(y)
        assert state is not None and state.keys is not None  # noqa: PT018
        return gradients([*parts, *state.keys], [*leaves, *m.parameters()])

    # single tokens are left to PyTorch
    assert_both_are_equal(monkeypatch, run, calls=sum(cut > 1 for cut in cuts))
    whole, _ = m(x, torch.arange(T)[None], None, prefix)
    torch.testing.assert_close(torch.cat(run()[: len(cuts)], 1)[::2], whole[::2], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads, torch_threads):
    m, (x, prefix) = layer(7), inputs(33, 4)
    run = lambda: gradients([m(x, torch.arange(33)[None], None, prefix)[0]], [x, prefix])  # noqa: E731
    expected = run()
    torch_threads(threads)
    torch.testing.assert_close(run(), expected, rtol=1e-12, atol=1e-12)


def test_what_is_not_supported_is_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(attention, "attend_window", None)
    m, (x,) = layer(8), inputs(20, 0)
    m(x, torch.arange(20).expand(BATCH, -1))  # positions of each row
    m(x.bfloat16().double()[:, :1], torch.zeros(1, 1, dtype=torch.long))
    m.cut = True
    m(x, torch.arange(20)[None])
    long = torch.randn(1, MAX_SPAN + 1, D, dtype=torch.float64)
    layer(None)(long, torch.arange(long.shape[1])[None])


def test_held_counts_of_any_strides_and_a_state_of_too_few_rows(monkeypatch):
    m, (x,) = layer(8), inputs(12, 0)
    with torch.no_grad():
        _, state = m(x, torch.arange(12)[None])
        at = torch.arange(12, 24)[None]
        for held_B in (torch.tensor([0, 7, 3, 7, 7, 7])[::2], torch.tensor([2])):
            assert_both_are_equal(monkeypatch, lambda h=held_B: m(x, at, state._replace(held_B=h))[0])
        with pytest.raises(RuntimeError, match="Sizes of tensors"):
            m(x, at, m(x[:1], torch.arange(12)[None])[1])
