"""Results do not depend on how a sequence is split or packed, and `state_bytes` is exact."""

from itertools import product

import pytest
import torch

from tests.core.small import CASES, SWITCHES, VARIANTS, config, model, storages, tokens
from titans_core import LanguageModel
from titans_core.state import ModelState
from titans_kernels.native import library


@pytest.mark.parametrize(("variant", "switch"), CASES)
def test_sequence_cut_anywhere_goes_on_exactly(variant, switch):
    m, x, state, logits = model(variant, **SWITCHES[switch]), tokens(2, 77), None, []
    for part in x.split([5, 20, 1, 1, 30, 20], 1):
        out = m(part, state)
        state = out.state
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), m(x).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("variant", "switch"), CASES)
def test_packed_documents_equal_documents_alone(variant, switch):
    m = model(variant, **SWITCHES[switch])
    x, starts = tokens(2, 53), torch.zeros(2, 53, dtype=torch.bool)
    starts[0, 30], starts[1, 20], starts[1, 21] = True, True, True
    parts = x[:1].split([30, 23], 1), x[1:].split([20, 1, 32], 1)
    alone = [torch.cat([m(part).logits for part in row], 1) for row in parts]
    packed = m(x, document_starts=starts).logits
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-10, atol=1e-10)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(4), dtype=packed.dtype)
    grads = lambda x: torch.autograd.grad((x * weights).sum(), list(m.parameters()))  # noqa: E731
    actual, expected = grads(packed), grads(torch.cat(alone))
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("variant", "switch"), [
    *product(VARIANTS, ["default", "no_conv", "gates_per_chunk", "robust", "later_version", "smallest"]),
    *product(["lmm", "mac"], ["gated", "gated_per_channel", "decay_per_channel", "budget_per_chunk"]),
])  # fmt: skip
def test_state_bytes_are_those_of_the_state(variant, switch):
    for dtype in (torch.float32, torch.float64):
        m = LanguageModel(config(variant, **SWITCHES[switch])).to(dtype)
        x, state = tokens(1, 64), None
        for part in x.split([3, 5, 8, 1, 1, 9, 5, 12, 20], 1):
            with torch.no_grad():
                state = m(part, state).state
            assert m.state_bytes(state.position) == storages(state), f"after {state.position} tokens"


@pytest.mark.parametrize("window", [12, None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_that_are_reset_are_new_sequences(variant, window):
    m, x = model(variant, window=window), tokens(3, 96)
    resets = None, torch.tensor([False, True, False]), torch.tensor([True, False, False])
    state, actual = None, []
    for part, reset_B in zip(x.split(32, 1), resets, strict=True):
        out = m(part, state, reset_B=reset_B)
        state = out.state
        actual.append(out.logits)
    sequences = [x[:1, :64], x[:1, 64:]], [x[1:2, :32], x[1:2, 32:]], [x[2:]]
    expected = torch.cat([torch.cat([m(part).logits for part in row], 1) for row in sequences])
    torch.testing.assert_close(torch.cat(actual, 1), expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4), dtype=expected.dtype)
    grads = lambda y: torch.autograd.grad((y * weights).sum(), list(m.parameters()))  # noqa: E731
    torch.testing.assert_close(grads(torch.cat(actual, 1)), grads(expected), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal"])
def test_rows_inside_a_chunk_cannot_be_reset(variant):
    m, x = model(variant), tokens(2, 60)
    with pytest.raises(ValueError, match=r"^reset: the state is \d+ tokens into a (chunk|segment) of"):
        m(x[:, 11:], m(x[:, :11]).state, reset_B=torch.tensor([True, False]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_splits_and_joins_by_rows(variant):
    m, x = model(variant), tokens(5, 60)
    state = m(x[:, :32]).state
    outs = [m(rows, part) for rows, part in zip(x[:, 32:].split([2, 3]), state.split([2, 3]), strict=True)]
    torch.testing.assert_close(torch.cat([out.logits for out in outs]), m(x[:, 32:], state).logits)
    joined = ModelState.cat([out.state for out in outs])
    torch.testing.assert_close(m(x[:, :9], joined).logits, m(x[:, :9], m(x[:, 32:], state).state).logits)
    with pytest.raises(ValueError, match=r"^state: has 5 rows, the input has 2;"):
        m(x[:2], joined)
    with pytest.raises(ValueError, match=r"^state: has 0 blocks, the model has "):
        m(x, joined._replace(blocks=()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("variant", ["transformer", "mal"])
def test_documents_in_one_kernel_are_documents_alone(variant):
    m = LanguageModel(config(variant, window=None)).cuda()
    x, starts = tokens(2, 53).cuda(), torch.zeros(2, 53, dtype=torch.bool, device="cuda")
    starts[0, 30], starts[1, 20], starts[1, 21] = True, True, True
    expected = m(x, document_starts=starts).logits
    with torch.autocast("cuda", torch.bfloat16):
        actual = m(x, document_starts=starts).logits.float()
    assert (actual - expected).norm() < 0.04 * expected.norm()
    for logits in (expected, actual):
        grads = torch.autograd.grad(logits.square().sum(), list(m.parameters()))
        assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("backend", ["native", "chunked", "generic", "reference"])
def test_blocks_that_are_computed_again_have_the_same_gradients(backend):
    if backend == "native" and library(torch.float64) is None:
        pytest.skip("no C++ compiler")
    x, collected = tokens(2, 40), []
    m = model(backend=backend, write_budget=1.0, forget_to="initial")
    for recompute in (False, True):
        for block in m.blocks:
            block.recompute = recompute
        out = m(x[:, 24:], m(x[:, :24]).state)
        collected.append(torch.autograd.grad(out.logits.square().sum(), list(m.parameters())))
    torch.testing.assert_close(*collected, rtol=1e-12, atol=1e-12)
