"""Models of real-valued series: the blocks of every variant on continuous inputs."""

import pytest
import torch

from tests.core.small import VARIANTS, config
from titans_core import SeriesModel

CHANNELS, HORIZON = 3, 5


def series_model(variant: str = "lmm", patch: int = 1, layers: int = 2) -> SeriesModel:
    torch.manual_seed(0)
    c = config(variant, persistent=2, window=16, segment=8, chunk_size=4)
    return SeriesModel(c.model_copy(update={"n_layers": layers}), CHANNELS, HORIZON, patch).double()


def values(steps: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, steps, CHANNELS, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("variant", VARIANTS)
def test_series_cut_between_calls_gives_the_same_prediction(variant):
    m, x = series_model(variant), values(22)
    whole = m(x)
    assert whole.prediction.shape == (2, HORIZON, CHANNELS)
    _, state = m(x[:, :9])
    cut = m(x[:, 9:], state)
    torch.testing.assert_close(cut.prediction, whole.prediction, rtol=1e-9, atol=1e-9)
    assert cut.state.position == whole.state.position == 22


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_of_the_window_reaches_the_prediction(variant):
    m, x = series_model(variant), values(12).requires_grad_()
    m(x).prediction.sum().backward()
    assert (x.grad.abs().sum((0, 2)) > 0).all()
    assert all(p.grad is not None for p in m.parameters())


def test_packed_series_patches_and_decay():
    m, x = series_model("mag"), values(20)
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[:, 7] = True
    packed = m(x, document_starts=starts)
    torch.testing.assert_close(packed.prediction, m(x[:, 7:]).prediction, rtol=1e-9, atol=1e-9)
    assert packed.state is None
    m, x = series_model(patch=4), values(24)
    assert (m(x).state.position, m.state_bytes(24)) == (6, series_model().state_bytes(6))
    with pytest.raises(ValueError, match="patch: 4 steps do not divide a window of 23"):
        m(x[:, :23])
    m = series_model(layers=1)
    decayed, kept = (group["params"] for group in m.parameter_groups(0.1))
    assert {id(m.embedding.weight), id(m.head.weight)} <= {id(p) for p in decayed}
    assert id(m.norm.weight) in {id(p) for p in kept}
    assert sum(p.numel() for p in decayed + kept) == m.num_parameters()
