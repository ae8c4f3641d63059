"""The neural long-term memory: gradient descent with momentum and forgetting, as an operator.

`reference` is the paper's recurrence token by token, `chunked` its parallel form in PyTorch matmuls.
"""

from titans_kernels.memory.op import BACKENDS, MemoryState, neural_memory, read_memory

__all__ = ["BACKENDS", "MemoryState", "neural_memory", "read_memory"]
