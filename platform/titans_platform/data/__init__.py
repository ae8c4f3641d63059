"""Sources to tokens to Arrow shards to batches, in an order that one counter resumes exactly."""

from titans_platform.data.parts import by_processes
from titans_platform.data.prepare import NotPrepared, PreparedData, open_prepared, prepare
from titans_platform.data.stream import Batch, RowStream
from titans_platform.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch", "NotPrepared", "PreparedData", "RowStream", "Tokenizer", "by_processes", "load_tokenizer",
    "open_prepared", "prepare",
]  # fmt: skip
