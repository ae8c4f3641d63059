"""Empty inputs: a one-line error or an empty result, for every model."""

import pytest
import torch

from tests.core.small import VARIANTS, config, model, tokens
from titans_core import ConvClassifier, MemoryConfig, NeuralMemory, SequenceClassifier, SeriesModel
from titans_core.forecasting import FORECASTERS, Window

NOTHING = r"^tokens: {} rows of {} tokens; a call needs at least one of each$"
EMPTY = [(0, 5), (2, 0), (0, 0)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_call_without_rows_or_tokens_is_refused(variant):
    m = model(variant)
    for rows, length in EMPTY:
        x, says = tokens(rows, length), NOTHING.format(rows, length)
        state = m(tokens(2, 5)).state.take(list(range(rows)))
        starts = torch.ones_like(x).bool()
        for options in ({}, {"state": state}, {"targets_BT": x}, {"document_starts": starts}):
            with pytest.raises(ValueError, match=says):
                m(x, **options)


@pytest.mark.parametrize(("rows", "length"), EMPTY)
def test_other_models_refuse_it_too(rows, length):
    x = tokens(rows, length)
    for m in (SequenceClassifier(config(), 3), ConvClassifier(40, 3, 100, 0)):
        with pytest.raises(ValueError, match=NOTHING.format(rows, length)):
            m(x, lengths_B=torch.full((rows,), length))
    with pytest.raises(ValueError, match=r"^tokens_BT: 101 tokens, but the model takes at most 100$"):
        m(tokens(1, 101), lengths_B=torch.tensor([101]))
    series = torch.zeros(rows, length, 3)
    models = [SeriesModel(config(), channels=3, horizon=2), NeuralMemory(3, MemoryConfig(heads=1))]
    window = Window(length=24, horizon=4, channels=3)
    models += [kind(config(), window, kind.Options()) for kind in FORECASTERS.values()]
    for m in models:
        with pytest.raises(ValueError, match=f"^x_BTC?D?: {rows} rows of {length} tokens; a call needs"):
            m(series)


def test_writing_and_reading_nothing():
    m = model()
    start = m.read([1, 2, 3])
    assert m.generate([], 3) == m.generate([], 3, start=start) == []
    assert (m.read([], start), m.read([]).tokens) == (start, 0)
