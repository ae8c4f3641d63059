"""Titans: models whose long-term memory is a small network that keeps learning while it reads."""

from typing import TYPE_CHECKING

from titans_kernels.registry import lazy_exports

if TYPE_CHECKING:
    from titans_core import presets
    from titans_core.backbone import Backbone, Model
    from titans_core.blocks import BLOCKS, Block, count_parameters
    from titans_core.classifier import ClassOutput, ConvClassifier, Pooling, SequenceClassifier
    from titans_core.config import AttentionConfig, MemoryConfig, ModelConfig
    from titans_core.documents import Documents
    from titans_core.footprint import saved_bytes_per_token
    from titans_core.generation import Reading, Sampling, Writing
    from titans_core.inspection import MemoryTrace, Nearest, watch
    from titans_core.memory import MemoryCache, NeuralMemory
    from titans_core.model import LanguageModel, ModelOutput
    from titans_core.series import SeriesModel, SeriesOutput
    from titans_core.state import ModelState
    from titans_core.telemetry import record

__all__ = [
    "BLOCKS",
    "AttentionConfig",
    "Backbone",
    "Block",
    "ClassOutput",
    "ConvClassifier",
    "Documents",
    "LanguageModel",
    "MemoryCache",
    "MemoryConfig",
    "MemoryTrace",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "ModelState",
    "Nearest",
    "NeuralMemory",
    "Pooling",
    "Reading",
    "Sampling",
    "SequenceClassifier",
    "SeriesModel",
    "SeriesOutput",
    "Writing",
    "count_parameters",
    "presets",
    "record",
    "saved_bytes_per_token",
    "watch",
]

# lazy, since importing torch takes two seconds
__getattr__ = lazy_exports(
    __name__,
    __all__,
    "config documents presets state backbone blocks classifier footprint generation inspection memory model "
    "series telemetry",
)
