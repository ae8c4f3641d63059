"""The neural long-term memory: gradient descent with momentum and forgetting, as an operator.

`reference` is the paper's recurrence token by token, `chunked` its parallel form in PyTorch matmuls,
`decode` its next token from wherever a sequence was left.
"""

from titans_kernels.memory.decode import DecodeState, decode_step, extend_memory
from titans_kernels.memory.op import BACKENDS, MemoryState, neural_memory, read_memory

__all__ = [
    "BACKENDS",
    "DecodeState",
    "MemoryState",
    "decode_step",
    "extend_memory",
    "neural_memory",
    "read_memory",
]
