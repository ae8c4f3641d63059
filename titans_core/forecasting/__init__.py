"""Forecasters: models of a window of a series. To add one, write a file and its line below."""

from titans_core.forecasting.base import Forecast, Forecaster, Window
from titans_kernels import Registry

__all__ = ["FORECASTERS", "Forecast", "Forecaster", "Window"]

FORECASTERS = Registry(
    "forecaster",
    Forecaster,
    {
        "dlinear": "titans_core.forecasting.linear:DLinear",
        "rlinear": "titans_core.forecasting.linear:RLinear",
        "crossformer": "titans_core.forecasting.crossformer:Crossformer",
        "itransformer": "titans_core.forecasting.itransformer:ITransformer",
        "patchtst": "titans_core.forecasting.patchtst:PatchTST",
        "tide": "titans_core.forecasting.tide:TiDE",
        "timesnet": "titans_core.forecasting.timesnet:TimesNet",
        "simba": "titans_core.forecasting.simba:Simba",
    },
)
"""Forecasters by name."""
