"""Operators of Titans: the neural memory in several forms with one signature. Needs torch and Triton."""

from titans_kernels.memory import (
    DecodeState,
    MemoryState,
    decode_step,
    extend_memory,
    neural_memory,
    read_memory,
)

__all__ = ["DecodeState", "MemoryState", "decode_step", "extend_memory", "neural_memory", "read_memory"]
