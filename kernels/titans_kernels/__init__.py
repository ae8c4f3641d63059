"""Operators of Titans: several implementations of the neural memory with one signature.

Depends only on torch and Triton.
"""

from typing import TYPE_CHECKING

from titans_kernels.registry import lazy_exports

if TYPE_CHECKING:
    from titans_kernels.exchange import accelerate
    from titans_kernels.memory.budget import write_budget
    from titans_kernels.memory.decode import extend_memory
    from titans_kernels.memory.forms.state import AnyState, DecodeState, OpenChunk, state_numel
    from titans_kernels.memory.op import BACKENDS, neural_memory, read_memory
    from titans_kernels.memory.options import Extension, MemoryState, state_dtype, without_autocast
    from titans_kernels.memory.parts.layout import document_borders, packed_layout
    from titans_kernels.memory.residual import Residual
    from titans_kernels.memory.rules import RULES, Rule, find_rule
    from titans_kernels.memory.support import Support, supports
    from titans_kernels.ran import forms_used
    from titans_kernels.recurrence import linear_attention, recurrent_linear_attention
    from titans_kernels.registry import Registry, near, source_file
    from titans_kernels.scans import recurrent_scan, scan, selective_scan

__all__ = [
    "BACKENDS",
    "RULES",
    "AnyState",
    "DecodeState",
    "Extension",
    "MemoryState",
    "OpenChunk",
    "Registry",
    "Residual",
    "Rule",
    "Support",
    "accelerate",
    "document_borders",
    "extend_memory",
    "find_rule",
    "forms_used",
    "linear_attention",
    "near",
    "neural_memory",
    "packed_layout",
    "read_memory",
    "recurrent_linear_attention",
    "recurrent_scan",
    "scan",
    "selective_scan",
    "source_file",
    "state_dtype",
    "state_numel",
    "supports",
    "without_autocast",
    "write_budget",
]

# lazy, since importing torch takes two seconds
__getattr__ = lazy_exports(
    __name__,
    __all__,
    "registry ran exchange recurrence scans memory.budget memory.decode "
    "memory.parts.layout memory.op memory.options memory.residual memory.rules memory.support "
    "memory.forms.state",
)
