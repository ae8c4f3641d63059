"""Operators of Titans: the neural memory in several forms with one signature. Needs torch and Triton."""

from titans_kernels.memory import (
    BACKENDS,
    RULES,
    DecodeState,
    MemoryState,
    OpenChunk,
    Rule,
    decode_step,
    document_borders,
    extend_memory,
    find_rule,
    neural_memory,
    packed_layout,
    read_memory,
    state_dtype,
    state_numel,
    without_autocast,
)

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
