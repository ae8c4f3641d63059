"""Forecasters: shapes, gradients, determinism, and agreement with their equations."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from titans_core import AttentionConfig, MemoryConfig, ModelConfig
from titans_core.forecasting import FORECASTERS, Forecaster, Window
from titans_core.forecasting.normalize import RevIN
from titans_core.forecasting.simba import EinFFT, SimbaOptions
from titans_core.forecasting.timesnet import TimesBlock, TimesNetOptions

WINDOW = Window(length=24, horizon=5, channels=3)
SMALL = {"d_model": 8, "n_layers": 2, "attention": AttentionConfig(heads=2)}
MEMORY = MemoryConfig(heads=2, chunk_size=2)
CASES = [*((name, "lmm") for name in FORECASTERS), ("simba", "mamba")]


def forecaster(name: str, variant: str = "lmm", seed: int = 0, **options: Any) -> Forecaster:
    torch.manual_seed(seed)
    collected, config = FORECASTERS[name], ModelConfig(**SMALL, variant=variant, memory=MEMORY)
    patches = {"patch": 8, "stride": 4} if "patch" in collected.Options.model_fields else {}
    return collected(config, WINDOW, collected.Options(**patches, **options)).double()


def values(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, *WINDOW[::2], generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_every_parameter_is_trained_by_a_forecast_of_the_right_shape(name, variant):
    model, x = forecaster(name, variant), values().requires_grad_()
    forecast = model(x).prediction
    assert forecast.shape == (4, WINDOW.horizon, WINDOW.channels)
    forecast.square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert (x.grad.abs().sum((0, 2)) > 0).all()


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_forecast_sees_its_own_window_and_channel_or_all_channels_that_it_mixes(name, variant):
    model, x = forecaster(name, variant).eval(), values().requires_grad_()
    model(x).prediction[1, :, 2].sum().backward()
    expected = [True] * 3 if name in ("crossformer", "itransformer", "timesnet") else [False, False, True]
    assert (x.grad.abs().sum(1) > 0).tolist() == [[False] * 3, expected, [False] * 3, [False] * 3]


def test_crossformer_halves_its_segments_and_timesnet_finds_periods():
    model = forecaster("crossformer", segment=5)  # five segments of 24 steps, the first one padded
    shapes = []
    for encoder in model.encoders:
        encoder.register_forward_hook(lambda _, given, out: shapes.append((given[0].shape[2], out.shape[2])))
    model(values())
    assert shapes == [(5, 5), (3, 3)]
    assert [decoder.own.routers_SRD.shape[0] for decoder in model.decoders] == [1, 1, 1]
    block, t = TimesBlock(2, 4, TimesNetOptions(periods=2, kernels=1)), torch.arange(48) / 48
    x_L = 3 * torch.sin(2 * torch.pi * 4 * t) + torch.sin(2 * torch.pi * 12 * t) + 5
    amplitude = torch.fft.rfft(x_L[None, :, None].expand(3, -1, 2), dim=1).abs().mean(-1)
    assert block._strongest(amplitude) == [4, 12]
    # a convolution of 1 x 1 sees each step alone, however the steps are folded
    x_BLD = torch.randn(3, 50, 2)
    torch.testing.assert_close(block._folded(x_BLD, 7), block._folded(x_BLD, 13))


@pytest.mark.parametrize("name", sorted(FORECASTERS.keys() - {"dlinear", "crossformer"}))
def test_window_in_other_units_has_its_forecast_in_these_units(name):
    model, x = forecaster(name).eval(), values()
    torch.testing.assert_close(model(7 * x - 2).prediction, 7 * model(x).prediction - 2, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("affine", [True, False])
def test_revin_is_undone(affine):
    revin, x = RevIN(3, affine).double(), 5 * values() + 3
    if affine:
        torch.nn.init.uniform_(revin.weight_C, 0.5, 2)
        torch.nn.init.uniform_(revin.bias_C, -1, 1)
    inside, units = revin(x)
    torch.testing.assert_close(revin.undo(inside, units), x, rtol=1e-8, atol=1e-8)
    if not affine:
        torch.testing.assert_close(inside.mean(1), torch.zeros(4, 3).double(), atol=1e-9, rtol=0)
        torch.testing.assert_close(inside.std(1, correction=0), torch.ones(4, 3).double(), atol=1e-4, rtol=0)


def test_dlinear_and_einfft_are_their_equations():
    model, x = forecaster("dlinear", kernel=5), values()
    # at initialisation all steps have equal weight
    weights = model.trend.weight * WINDOW.length
    torch.testing.assert_close(weights, torch.ones(5, 24).double(), rtol=1e-6, atol=0)
    ends = torch.cat([x[:, :1].expand(-1, 2, -1), x, x[:, -1:].expand(-1, 2, -1)], 1)
    trend = torch.stack([ends[:, t : t + 5].mean(1) for t in range(WINDOW.length)], 1)
    torch.nn.init.normal_(model.trend.weight)
    torch.nn.init.normal_(model.rest.weight)
    by_hand = torch.einsum("ht,btc->bhc", model.trend.weight, trend)
    by_hand = by_hand + torch.einsum("ht,btc->bhc", model.rest.weight, x - trend)
    by_hand = by_hand + (model.trend.bias + model.rest.bias)[:, None]
    torch.testing.assert_close(model(x).prediction, by_hand)
    torch.manual_seed(0)
    tokens, groups, size = 6, 2, 4
    mixer = EinFFT(groups * size, SimbaOptions(groups=groups, shrink=0.1)).double()
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(3, tokens, groups * size).double()

    def dft(n: int) -> torch.Tensor:
        k = torch.arange(n).double()
        return torch.polar(torch.ones(n, n).double(), -2 * torch.pi * k[:, None] * k / n) / n**0.5

    def on_parts(f, z: torch.Tensor) -> torch.Tensor:
        return torch.complex(f(z.real), f(z.imag))

    def both(z: torch.Tensor, conjugate: bool) -> torch.Tensor:
        a, b = (m.conj() if conjugate else m for m in (dft(tokens), dft(groups)))
        return torch.einsum("nm,gh,bmhd->bngd", a, b, z)

    z = both(x.view(3, tokens, groups, size).to(torch.complex128), False)
    for index, act in enumerate((F.relu, lambda v: F.softshrink(v, 0.1))):
        weight = torch.complex(*mixer.weights[index])
        z = on_parts(act, torch.einsum("bngd,gde->bnge", z, weight) + torch.complex(*mixer.biases[index]))
    torch.testing.assert_close(mixer(x), both(z, True).real.reshape(3, tokens, -1))


def test_fourier_transforms_of_bfloat16_are_computed_in_float32():
    x = torch.randn(2, 48, 8, dtype=torch.bfloat16)
    for layer in (EinFFT(8, SimbaOptions()), TimesBlock(8, 4, TimesNetOptions(periods=2, kernels=1))):
        exact, y = layer(x.float()), layer.bfloat16()(x)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.1)
