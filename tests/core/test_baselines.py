"""Language baselines: step-by-step decoding, agreement with other implementations, parameter counts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.core import small
from tests.core.small import BASELINE_OPTIONS, MEMORY_VARIANTS, config, model, tokens
from titans_core import Block, LanguageModel, ModelConfig, count_parameters, presets
from titans_core.attention import AttentionState
from titans_core.blocks import Positions
from titans_core.blocks.baselines import hyena
from titans_core.blocks.baselines.based import ConvInputs
from titans_core.blocks.baselines.hyena import HyenaState
from titans_core.blocks.baselines.mamba2 import SSMState
from titans_kernels import DecodeState, linear_attention

SETTINGS = ["deltanet", "gated_deltanet", "ttt_linear", "ttt_mlp"]
BASELINES = [*BASELINE_OPTIONS, *SETTINGS]
CONVOLVED = ["gla", "hgrn2", "retnet"]
"""Baselines with an optional short convolution."""


def perturbed(variant: str, options: dict | None = None) -> Block:
    return small.perturbed(variant, options=options).blocks[0]


@pytest.mark.parametrize(("variant", "options"), [
    *((v, None) for v in BASELINES), *((v, {"heads": 2, "conv_kernel": 4}) for v in CONVOLVED),
])  # fmt: skip
def test_parallel_form_is_the_recurrence_token_by_token(variant, options):
    block = perturbed(variant, options)
    for T in (1, 17, 67):  # 67 and 17 end inside a chunk
        x = torch.randn(2, T, 16, generator=torch.Generator().manual_seed(T), dtype=torch.float64)
        x.requires_grad_()
        whole, end = block(x, None, Positions(torch.arange(T)[None]))
        outputs, state = [], None
        for t in range(T):
            y, state = block(x[:, t : t + 1], state, Positions(torch.tensor([[t]])))
            outputs.append(y)
        results = []
        for y, last in ((whole, end), (torch.cat(outputs, 1), state)):
            leaves = [s for s in tree_leaves(last) if isinstance(s, Tensor)]
            weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
            grads = torch.autograd.grad((y * weights).sum(), [x, *block.parameters()], materialize_grads=True)
            # the open chunk of a neural memory may be stored in a different form
            results.append([y, *grads, *(leaves if "delta" not in variant and "ttt" not in variant else [])])
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    assert all(g.norm() > 1e-8 for g in grads), "something is not trained"


@pytest.mark.parametrize("variant", CONVOLVED)
def test_short_convolution_is_that_of_torch_after_the_projections(variant):
    block = perturbed(variant, {"heads": 2, "conv_kernel": 4})
    x = torch.randn(2, 19, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z, positions = block.norm(x), Positions(torch.arange(19)[None])
    channels, projected = 0, []
    for name in ("w_q", "w_f" if variant == "hgrn2" else "w_k", "w_v"):
        y = getattr(block, name)(z).mT
        # torch's kernel is a correlation: its last weight is for the current token
        weight = block.conv.weight_KC[:, channels : (channels := channels + y.shape[1])].flip(0).T[:, None]
        y = F.conv1d(F.pad(y, (3, 0)), weight, groups=y.shape[1]).mT
        projected.append(y if variant == "hgrn2" else F.silu(y))
    q, k, v, log_decay = block.tokens(projected, z, positions)
    expected = block.output(linear_attention(q, k, v, log_decay, block.start(2))[0], z)
    torch.testing.assert_close(block.mix(x, None, positions)[0] - x, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", ["mamba2", "gated_deltanet_h2"])
def test_mamba2_starts_from_steps_and_decays_drawn_independently(variant):
    torch.manual_seed(0)
    options = {"head_dim": 1, "state": 2}
    c = config(variant, options=options).model_copy(update={"d_model": 512, "n_layers": 1})
    block: Any = LanguageModel(c)
    mixer = block.blocks[0].stack[0] if variant == "gated_deltanet_h2" else block.blocks[0]
    dt, a = F.softplus(mixer.dt_bias_H.detach()), mixer.log_a_H.detach().exp()
    assert len(a) == 1024
    assert 1e-3 * (1 - 1e-4) <= dt.min() < 2e-3
    assert 0.05 < dt.max() <= 0.1 * (1 + 1e-4)
    assert dt.log().mean() == pytest.approx(math.log(1e-2), abs=0.2)
    assert 1 <= a.min() < 1.5
    assert 15.5 < a.max() <= 16
    assert a.mean() == pytest.approx(8.5, abs=0.5)
    assert abs(torch.corrcoef(torch.stack([dt.log(), a]))[0, 1]) < 0.1


@pytest.mark.parametrize(("variant", "decays"), [("deltanet", False), ("gated_deltanet", True)])
def test_delta_rules_are_the_published_recurrences(variant, decays):
    memory = perturbed(variant).memory
    x = torch.randn(1, 23, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, writes, _ = memory._project_tokens(x, memory.start(1).conv_state)
    S, eye, outputs = memory.initial_weights[0].mT, torch.eye(q.shape[-1], dtype=torch.float64), []
    for t in range(x.shape[1]):
        k, v, beta = writes.k[0, t], writes.v[0, t], 2 * writes.theta[0, t, :, None, None]
        a = 1 - writes.alpha[0, t, :, None, None]
        assert (beta <= 1).all()
        assert bool((a < 1).all()) == decays
        S = S @ (a * (eye - beta * k[:, :, None] * k[:, None])) + beta * v[:, :, None] * k[:, None]
        outputs.append((S @ q[0, t, :, :, None]).squeeze(-1))
    expected = memory.output(torch.stack(outputs)[None], x)
    torch.testing.assert_close(memory(x)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", BASELINES)
def test_laptop_preset_has_as_many_parameters_as_the_transformer(variant):
    baseline = count_parameters(presets.preset("laptop", "transformer"))
    # the three feed-forward layers of a hybrid are each as wide as a multiple of 16
    share = 0.04 if variant in ("based", "gated_deltanet_h2") else 0.03
    assert count_parameters(presets.preset("laptop", variant)) == pytest.approx(baseline, rel=share)


@pytest.mark.parametrize(("variant", "layers"), [("samba", 2), ("gated_deltanet_h2", 3)])
def test_hybrid_has_the_depth_of_its_size_in_layers(variant, layers):
    for size in ("400M", "760M"):
        c, depth = presets.preset(size, variant), presets.preset(size, "transformer").n_layers
        assert abs(c.n_layers * layers - depth) <= 1
    with torch.device("meta"):
        (block,) = LanguageModel(c.model_copy(update={"n_layers": 1})).blocks
    assert [type(layer).__name__ for layer in block.stack][-1] == "Transformer"
    assert len(block.stack) == layers
    assert all(layer.mlp is not None for layer in block.stack)
    assert {layer.attention.config.window for layer in block.stack if hasattr(layer, "attention")} == {1024}


@pytest.mark.parametrize("variant", [*MEMORY_VARIANTS, *BASELINE_OPTIONS])
def test_bf16_autocast_keeps_the_state_in_float32(variant):
    torch.manual_seed(0)
    m, x = LanguageModel(config(variant)), tokens(2, 40)
    exact = m(x).logits
    with torch.autocast("cpu", torch.bfloat16):
        out = m(x)
        m(x[:, :1], out.state)
    assert (out.logits.float() - exact).norm() < 0.04 * exact.norm()
    kept = (AttentionState, ConvInputs, DecodeState, HyenaState, SSMState)
    layers = [s for block in out.state.blocks for s in (block if type(block) is tuple else [block])]
    parts = [s for layer in layers for s in tree_leaves(layer, is_leaf=lambda s: isinstance(s, kept))]
    ssm = [s.ssm for s in parts if isinstance(s, SSMState)] + [s for s in layers if isinstance(s, Tensor)]
    ssm += [s.inputs_BSD for s in parts if isinstance(s, HyenaState)]
    ssm += tree_leaves([s.memory() for s in parts if isinstance(s, DecodeState)])
    assert {s.dtype for s in ssm} == {torch.float32}
    out.logits.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in m.parameters())
    assert torch.isfinite(m.bfloat16()(x).logits).all()


@pytest.mark.parametrize("variant", SETTINGS)
def test_config_with_another_memory_or_heads_is_refused(variant):
    set_of = config(variant)
    for field, value in {"depth": 3, "momentum": True, "max_theta": 0.25}.items():
        other = set_of.model_copy(update={"memory": set_of.memory.model_copy(update={field: value})})
        with pytest.raises(ValueError, match=rf"^memory\.{field}: {value}, but variant {variant} requires"):
            LanguageModel(other)
    for baseline, heads in (("gla", 3), ("retnet", 16), ("hgrn2", 5), ("retnet", 3)):
        with pytest.raises(ValueError, match=rf"options\.heads: {heads} does not divide"):
            LanguageModel(ModelConfig(variant=baseline, d_model=16, n_layers=1, options={"heads": heads}))


SSM_NAMES = {  # by our names
    "mamba": {
        # theirs has one projection with a bias where ours has a weight and a parameter
        "log_a_CN": "A_log", "skip_C": "D", "conv.weight_KC": "conv1d.weight", "conv_bias": "conv1d.bias",
        "w_in.weight": "in_proj.weight", "w_x.weight": "x_proj.weight", "w_dt.weight": "dt_proj.weight",
        "dt_bias_C": "dt_proj.bias", "w_o.weight": "out_proj.weight",
    },
    "mamba2": {
        "log_a_H": "A_log", "skip_H": "D", "dt_bias_H": "dt_bias", "conv.weight_KC": "conv1d.weight",
        "conv_bias": "conv1d.bias", "w_in.weight": "in_proj.weight", "output_norm.weight": "norm.weight",
        "w_o.weight": "out_proj.weight",
    },
}  # fmt: skip


@pytest.mark.parametrize(("variant", "options"), [
    ("mamba", {"state": 6}), ("mamba2", {"head_dim": 16, "state": 6}),
])  # fmt: skip
def test_mamba_and_mamba2_equal_transformers(variant, options):
    transformers = pytest.importorskip("transformers")
    if variant == "mamba":
        c = transformers.MambaConfig(hidden_size=32, state_size=6, num_hidden_layers=1)
        layer = transformers.models.mamba.modeling_mamba.MambaMixer(c, layer_idx=0)
    else:
        sizes = {"num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 1, "chunk_size": 8, "expand": 2}
        c = transformers.Mamba2Config(hidden_size=32, num_hidden_layers=1, layer_norm_epsilon=1e-6, **sizes)
        layer = transformers.models.mamba2.modeling_mamba2.Mamba2Mixer(c, layer_idx=0)
    torch.manual_seed(0)
    c = ModelConfig(variant=variant, vocab_size=40, d_model=32, n_layers=1, mlp_expansion=0, options=options)
    block, names = LanguageModel(c).blocks[0], SSM_NAMES[variant]
    peer, parameters = dict(layer.named_parameters()), dict(block.named_parameters())
    assert set(peer) == set(names.values())
    with torch.no_grad():
        for ours, name in names.items():
            # theirs is [C, 1, K]; the last weight is for the current token
            weight = peer[name].squeeze(1).flip(-1).T if ours == "conv.weight_KC" else peer[name]
            parameters[ours].copy_(weight)
    x = torch.randn(2, 37, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = torch.randn(2, 37, 32, generator=torch.Generator().manual_seed(1)) / 37
    actual = block.mix(x, None, Positions(torch.arange(37)[None]))[0] - x
    expected = layer.eval()(block.norm(x))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad((actual * weights).sum(), [x, *(parameters[n] for n in names)])
    other = list(torch.autograd.grad((expected * weights).sum(), [x, *(peer[n] for n in names.values())]))
    at = 1 + list(names).index("conv.weight_KC")
    other[at] = other[at].squeeze(1).flip(-1).T
    torch.testing.assert_close(list(ours), other, rtol=1e-5, atol=1e-5)


def test_long_convolution_in_halves_is_the_sum_and_rounds_nothing_into_the_past(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    u, past = (torch.randn(2, T, 3, generator=generator, dtype=torch.float64) for T in (75, 40))
    h = torch.randn(115, 3, generator=generator, dtype=torch.float64)
    whole = torch.cat([past, u], 1)
    expected = [sum(h[t - s] * whole[:, s] for s in range(t + 1)) for t in range(40, 115)]
    monkeypatch.setattr(hyena, "DIRECT", 8)  # so that every part is computed by FFT
    u.requires_grad_()
    actual = hyena.causal_convolution(u, h, past)
    torch.testing.assert_close(actual, torch.stack(expected, 1), rtol=1e-10, atol=1e-10)
    for t in (0, 20, 36, 37, 60):
        (grad,) = torch.autograd.grad(actual[0, t].sum(), u, retain_graph=True)
        assert torch.count_nonzero(grad[0, t + 1 :]) == 0
        torch.testing.assert_close(grad[0, : t + 1], h[: t + 1].flip(0), rtol=1e-10, atol=1e-10)


def test_filters_of_hyena_and_attention_of_based_are_their_definitions():
    block, t = model("hyena").blocks[0].double(), torch.arange(50, dtype=torch.float64)[:, None]
    layer, length, bands = block.filter, block.options.length, block.options.bands
    frequencies = 1e-4 + (bands - 1 - 1e-4) * torch.arange(bands).double() / (bands - 1)
    angle = 2 * math.pi / length * t * frequencies
    h = torch.cat([t / (length - 1), angle.cos(), -angle.sin()], -1)
    for weight, bias in zip(layer.weights, layer.biases, strict=True):
        h = torch.sin(layer.frequency * (h @ weight + bias))
    slow, fast = 1 / layer.SLOW, 1 / layer.FAST
    rate = slow + (fast - slow) * torch.arange(16).double() / 15
    expected = h @ layer.last * torch.exp(math.log(layer.LEFT) * rate * t / (length - 1))
    torch.testing.assert_close(layer(50), expected, rtol=1e-13, atol=1e-13)
    layer = perturbed("based").stack[1]
    z = torch.randn(2, 19, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    projected = [w(z) for w in (layer.w_q, layer.w_k, layer.w_v)]
    q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in projected)
    s = q @ k.mT / q.shape[-1] ** 0.5
    p = (1 + s + s.square() / 2).tril()
    expected = layer.w_o(((p / p.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2))
    actual = layer.output(linear_attention(*layer.tokens(projected, z, None), layer.start(2))[0], z)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
