"""Interventions: each is exactly the model without the part, and nothing is left of it afterwards."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.core.small import config, model, tokens
from titans_core import LanguageModel, NeuralMemory
from titans_core.attention import Attention
from titans_core.interventions import Intervention, has_effect, intervene
from titans_kernels import accelerate

HYBRIDS = ["mac", "mag", "mal"]
OFF = {
    "memory": Intervention(memory=False), "attention": Intervention(attention="off"),
    "cut": Intervention(attention="cut"), "decay": Intervention(decay=False),
}  # fmt: skip


def logits(net: LanguageModel, x: Tensor, change: Intervention = Intervention(), **kwargs) -> Tensor:  # noqa: B008
    with torch.no_grad(), intervene(net, change):
        return net(x, **kwargs).logits


@pytest.mark.parametrize(("variant", "part", "kind"), [
    *((variant, "memory", NeuralMemory) for variant in ("lmm", *HYBRIDS)),
    *((variant, "attention", Attention) for variant in (*HYBRIDS, "transformer")),
])  # fmt: skip
def test_part_that_is_off_has_a_zero_output_projection(variant, part, kind):
    x, without = tokens(2, 45), model(variant)
    for module in (m for m in without.modules() if isinstance(m, kind)):
        torch.nn.init.zeros_(module.w_o.weight)
    off = logits(model(variant), x, OFF[part])
    torch.testing.assert_close(off, logits(without, x), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(off, logits(model(variant), x))


@pytest.mark.parametrize("gates", ["none", "alpha"])
@pytest.mark.parametrize("variant", ["lmm", *HYBRIDS])
def test_decay_off_is_a_memory_without_decay(variant, gates):
    net, x = model(variant, channel_gates=gates, alpha_bias=-2.0), tokens(2, 45)
    # the same weights in a model whose config has no decay
    other = LanguageModel(config(variant, decay=False)).double()
    other.load_state_dict({k: v for k, v in net.state_dict().items() if ".alpha." not in k})
    off = logits(net, x, OFF["decay"])
    torch.testing.assert_close(off, logits(other, x), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(off, logits(net, x))


@pytest.mark.parametrize(("variant", "length"), [
    *(("transformer", length) for length in (5, 12, 31)), ("mag", 31), ("mal", 31),
])  # fmt: skip
def test_cut_attention_does_not_cross_a_border(variant, length, monkeypatch):
    options = {"options": {"projections": "titans"}} if variant == "transformer" else {}
    net, x = model(variant, attention={"conv": False}, persistent=0, **options), tokens(2, length)
    cut, at = logits(net, x, OFF["cut"]), torch.arange(length)

    def by_hand(q, keys, prefix, window, *_):
        near = (at[:, None] >= at) & (at[:, None] - at < window) & (at[:, None] // window == at // window)
        return F.scaled_dot_product_attention(q, *keys, attn_mask=near)

    monkeypatch.setattr("titans_core.attention.window_attention", by_hand)
    torch.testing.assert_close(cut, logits(net, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*OFF, "window"])
@pytest.mark.parametrize("variant", HYBRIDS)
def test_exact_under_cuts_and_packing(variant, name):
    change = OFF.get(name, Intervention(window=8))
    net, x = model(variant, alpha_bias=-2.0), tokens(2, 45)
    whole = logits(net, x, change)
    with torch.no_grad(), intervene(net, change):
        parts, state = [], None
        for part in x.split([1, 7, 16, 9, 1, 11], 1):
            out = net(part, state)
            state = out.state
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-8, atol=1e-8)
    starts = torch.zeros(2, 45, dtype=torch.bool)
    starts[0, [0, 13, 14]] = starts[1, [0, 30]] = True
    packed = logits(net, x, change, document_starts=starts)
    torch.testing.assert_close(packed[1:, 30:], logits(net, x[1:, 30:], change), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(packed[:1, 14:], logits(net, x[:1, 14:], change), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("variant", HYBRIDS)
def test_shorter_window_is_that_of_a_model_built_with_it(variant):
    net, x = model(variant), tokens(2, 45)
    other = model(variant, window=8, segment=8)
    other.load_state_dict(net.state_dict())
    assert torch.equal(logits(net, x, Intervention(window=8)), logits(other, x))


def test_state_is_carried_across_windows_and_nothing_is_left_of_an_intervention():
    """The cache keeps the keys of the model's own window, so the window may grow again."""
    net, x = model("mag"), tokens(2, 40)
    with torch.no_grad():
        with intervene(net, Intervention(window=4)):
            state = net(x[:, :24]).state
        y = net(x[:, 24:], state).logits
        assert state.blocks[0].attention.keys.k.shape[2] == 11
    assert not torch.equal(y, logits(net, x)[:, 24:])
    net, x = model("mag"), tokens(2, 30)
    before = logits(net, x)
    with pytest.raises(RuntimeError), intervene(net, Intervention(False, "off", False, 4)):
        raise RuntimeError
    with intervene(net, OFF["memory"]):
        with intervene(net, OFF["attention"]):
            pass
        assert torch.equal(logits(net, x), logits(net, x, OFF["memory"]))
    assert torch.equal(logits(net, x), before)
    net = model("lmm", max_alpha=0.01, alpha_bias=20.0)
    memory = net.blocks[0].memory
    _, writes, _ = memory._project_tokens(torch.randn(1, 9, 16).double(), memory.zero_conv_state())
    torch.testing.assert_close(writes.alpha, torch.full_like(writes.alpha, 0.01), rtol=1e-6, atol=0)


@pytest.mark.parametrize("read", [12, 16, 20])
def test_open_segment_ends_at_the_next_border_of_a_shorter_one(read):
    """In one call, exchanged, and token by token; the model's own segments are of 32 tokens."""
    net, x = model("mac", segment=32), tokens(1, 45)

    def after(*cuts: int) -> Tensor:
        state, actual = net(x[:, :read]).state, []
        with intervene(net, Intervention(window=8)):
            for part in x[:, read:].split(list(cuts), 1):
                out = net(part, state)
                state = out.state
                actual.append(out.logits)
        return torch.cat(actual, 1)

    with torch.no_grad():
        whole, single = after(45 - read), after(*[1] * (45 - read))
        accelerate(net)
        torch.testing.assert_close(whole, after(45 - read), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(whole, single, rtol=1e-9, atol=1e-10)


def test_interventions_without_effect_and_windows_that_do_not_fit_are_known():
    for variant, expected in (
        ("lmm", {"memory", "decay"}), ("mac", {"memory", "attention", "decay"}), ("mag", set(OFF)),
        ("transformer", {"attention", "cut"}),
    ):  # fmt: skip
        assert {name for name, change in OFF.items() if has_effect(model(variant), change)} == expected
    for variant, window, why in (
        ("mac", 12, "multiple"), ("mag", 13, "longer"), ("mac", 24, "longer"), ("mag", -8, "less than 1"),
    ):  # fmt: skip
        error = pytest.raises(ValueError, match=rf"^window: {window} .*{why}")
        with error, intervene(model(variant), Intervention(window=window)):
            pass


@pytest.mark.parametrize("variant", ["mag", "mal"])
def test_without_positions_the_order_in_a_window_does_not_count(variant):
    x = tokens(1, 8)
    other = x[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    for positions in ("none", "rotary"):
        net = model(variant, attention={"conv": False, "positions": positions})
        net.blocks = net.blocks[:1]
        a, b = (logits(net, ids, OFF["memory"])[:, 2:] for ids in (x, other))
        assert torch.allclose(a, b, atol=1e-9) == (positions == "none")
