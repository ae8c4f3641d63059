"""Operators of Titans: the neural memory in several forms with one signature. Needs torch and Triton."""

from titans_kernels.memory import MemoryState, neural_memory, read_memory

__all__ = ["MemoryState", "neural_memory", "read_memory"]
