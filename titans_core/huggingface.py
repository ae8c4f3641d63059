"""Titans for Hugging Face's transformers (the extra `hf`): importing this registers the Auto classes.

    import titans_core.huggingface
    model = AutoModelForCausalLM.from_pretrained(folder)  # what `titans export` wrote

``past_key_values`` is the model's state, for every variant. All rows of a batch are at the same position, so
padding is not supported; `LanguageModel.generate`, as ``model.model.generate``, takes prompts of any lengths.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast  # pyright: ignore[reportMissingImports]

from titans_core.model import LanguageModel
from titans_core.pretrained import MODEL_TYPE, model_config
from titans_core.state import ModelState

ALIGNMENT = 64
"""Bytes: torch's CPU allocator aligns to these."""


class TitansConfig(PreTrainedConfig):
    """``titans`` holds the fields of `ModelConfig` that are not its defaults."""

    model_type = MODEL_TYPE
    titans: dict[str, Any] | None = None


class State:
    """A model's state in the place of transformers' KV cache."""

    is_compileable = False

    def __init__(self, state: ModelState):
        self.state = state

    def get_seq_length(self, *_: Any) -> int:
        """Tokens read."""
        return self.state.position

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows that a beam search continues."""
        self.state = self.state.take(beam_idx.tolist())


class TitansForCausalLM(PreTrainedModel, GenerationMixin):
    """A `LanguageModel`, as ``.model``, with the interface of transformers."""

    config_class = TitansConfig
    base_model_prefix = "model"
    _is_stateful = True  # a state cannot be rolled back by a few tokens
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: TitansConfig):
        super().__init__(config)
        self.model = LanguageModel(model_config({"model_type": MODEL_TYPE, "titans": config.titans or {}}))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it, with every weight copied to an address that torch would allocate.

        Weights mapped from safetensors begin at any byte, and alignment may change a product's last bit.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        for p in (loaded[0] if isinstance(loaded, tuple) else loaded).parameters():
            if p.device.type == "cpu" and p.data_ptr() % ALIGNMENT:
                p.data = p.data.clone()
        return loaded

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: State | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V], or of the last token alone, and the state after them.

        Raises:
            ValueError: the attention mask masks tokens.
        """
        if attention_mask is not None and not attention_mask.all():
            raise ValueError(
                "attention_mask: padding is not supported; model.model.generate takes prompts of any lengths"
            )
        before = past_key_values and past_key_values.state
        logits, state, _ = self.model(input_ids, before, last=logits_to_keep == 1)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.model.config.vocab_size)
        # not a transformers Cache: generation only uses what State defines
        after = cast("Any", State(state) if use_cache is not False else None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=after)

    def get_input_embeddings(self) -> torch.nn.Module:
        """The embedding of tokens."""
        return self.model.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        """The output head, which may be tied to the embedding."""
        return self.model.head

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Does nothing: `LanguageModel` initialises its parameters."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


AutoConfig.register(MODEL_TYPE, TitansConfig)
AutoModelForCausalLM.register(TitansConfig, TitansForCausalLM)
