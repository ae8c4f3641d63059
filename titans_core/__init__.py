"""Titans: models whose long-term memory is a small network that keeps learning while it reads."""

from titans_core import presets
from titans_core.backbone import Backbone, Model, ModelState
from titans_core.blocks import BLOCKS, Block, count_parameters
from titans_core.classifier import ClassOutput, ConvClassifier, Pooling, SequenceClassifier
from titans_core.config import AttentionConfig, MemoryConfig, ModelConfig
from titans_core.documents import Documents
from titans_core.generation import Reading, Sampling, Writing
from titans_core.inspection import MemoryTrace, Nearest, watch
from titans_core.memory import MemoryCache, NeuralMemory
from titans_core.model import LanguageModel, ModelOutput
from titans_core.series import SeriesModel, SeriesOutput
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
    "watch",
]
