"""Causality: an output depends on the whole past of its own document, and on nothing else."""

import pytest
import torch

from tests.core.small import CASES, SWITCHES, model, tokens
from titans_core.blocks import Positions


@pytest.mark.parametrize(("variant", "switch"), CASES)
def test_no_future_token_and_no_other_row_reaches_an_output(variant, switch):
    m = model(variant, **SWITCHES[switch])
    x = torch.randn(3, 41, 16, dtype=torch.float64, requires_grad=True)
    y, _ = m.blocks[0](x, None, Positions(torch.arange(41)[None]))
    weights = torch.randn(16, dtype=torch.float64)
    for t in (0, 7, 8, 15, 16, 17, 31, 39):
        (grad,) = torch.autograd.grad((y[1, t] * weights).sum(), x, retain_graph=True)
        assert torch.count_nonzero(grad[1, t + 1 :]) == 0, f"token {t} sees the future"
        assert torch.count_nonzero(grad[[0, 2]]) == 0, f"token {t} sees another row"
        assert grad[1, t].norm() > 0
        # memory carries the first token to every later output; attention alone loses it beyond the window
        remembers = variant != "transformer" or t < (m.config.attention.window or 41)
        assert (grad[1, 0].norm() > 0) == remembers, f"token {t}"


def test_attention_memory_is_linear_at_a_fixed_window(monkeypatch):
    sizes, inner = [], torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, attn_mask=None, **kwargs):
        sizes.append(attn_mask.numel() if attn_mask is not None else 0)
        return inner(q, k, v, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    m = model("mag")
    for length in (120, 240):
        m(tokens(1, length))
    assert sizes[2] == 2 * sizes[0] > 0
