"""Forecasters: models of a window of a series. To add one, write a file and register it below."""

from titans_core.forecasting.base import Forecast, Forecaster, Window
from titans_core.forecasting.crossformer import Crossformer
from titans_core.forecasting.itransformer import ITransformer
from titans_core.forecasting.linear import DLinear, RLinear
from titans_core.forecasting.patchtst import PatchTST
from titans_core.forecasting.simba import Simba
from titans_core.forecasting.tide import TiDE
from titans_core.forecasting.timesnet import TimesNet

FORECASTERS: dict[str, type[Forecaster]] = {
    "dlinear": DLinear,
    "rlinear": RLinear,
    "crossformer": Crossformer,
    "itransformer": ITransformer,
    "patchtst": PatchTST,
    "tide": TiDE,
    "timesnet": TimesNet,
    "simba": Simba,
}
"""Forecasters with a short name."""

__all__ = ["FORECASTERS", "Forecast", "Forecaster", "Window"]
