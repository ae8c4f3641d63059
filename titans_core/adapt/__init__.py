"""A memory for a pretrained model (the extra `hf`): importing this registers its models with transformers.

    from titans_core.adapt import MemoryOptions, convert

Models of the Llama, Qwen2, Qwen3 and GPT-2 families keep their weights; attention sees a window, and what
leaves it is written to a memory. `titans adapt` trains the memories.
"""

from titans_core.adapt.chat import Chat
from titans_core.adapt.memory import MemoryOptions
from titans_core.adapt.model import MODELS, Adapted, change_kept, convert, options_of, replace_weights
from titans_core.adapt.sessions import Sessions
from titans_core.adapt.training import Memories

__all__ = [
    "MODELS", "Adapted", "Chat", "Memories", "MemoryOptions", "Sessions", "change_kept", "convert",
    "options_of", "replace_weights",
]  # fmt: skip
