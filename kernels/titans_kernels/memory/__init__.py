"""The neural long-term memory: gradient descent with momentum and forgetting, as an operator.

`reference` is the recurrence token by token, for any rule of `rules`; `autograd` its chunked form for any
rule; `chunked` and `triton` the fast forms of the paper's rule; `decode` continues a sequence from anywhere.
"""

from titans_kernels.memory.autograd import OpenChunk
from titans_kernels.memory.decode import DecodeState, decode_step, extend_memory, state_numel
from titans_kernels.memory.layout import document_borders, packed_layout
from titans_kernels.memory.op import BACKENDS, neural_memory, read_memory
from titans_kernels.memory.options import MemoryState, state_dtype, without_autocast
from titans_kernels.memory.rules import RULES, Rule, find_rule

__all__ = [
    "BACKENDS",
    "RULES",
    "DecodeState",
    "MemoryState",
    "OpenChunk",
    "Rule",
    "decode_step",
    "document_borders",
    "extend_memory",
    "find_rule",
    "neural_memory",
    "packed_layout",
    "read_memory",
    "state_dtype",
    "state_numel",
    "without_autocast",
]
