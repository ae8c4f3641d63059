"""Titans for Hugging Face's transformers (the extra `hf`): importing this registers the Auto classes.

    import titans_core.huggingface
    model = AutoModelForCausalLM.from_pretrained(folder)  # what `titans export` wrote

``past_key_values`` is the model's state, for every variant. A masked token is not read: the sequence of a row
is its unmasked tokens, wherever padding stands. Rows that have read equally many tokens share one state, so
that decoding costs a call for each distinct length of the prompts; `LanguageModel.generate`, as
``model.model.generate``, needs a single one. Arguments that are not in the signature are refused.

Shapes: B rows, T tokens of this call, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast  # pyright: ignore[reportMissingImports]
from transformers.models.auto.modeling_auto import (  # pyright: ignore[reportMissingImports]
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils.generic import can_return_tuple  # pyright: ignore[reportMissingImports]

from titans_core.config import ModelConfig
from titans_core.model import LanguageModel
from titans_core.pretrained import MODEL_TYPE, model_config, summary
from titans_core.ragged import (
    PretrainedMixin,
    RaggedState,
    check_call,
    documents,
    embedded,
    keep,
    read_ragged,
    targets,
)
from titans_core.state import ModelState

ALIGNMENT = 64
"""Bytes: torch's CPU allocator aligns to these."""


class TitansConfig(PreTrainedConfig):
    """``titans`` holds the fields of `ModelConfig` that are not its defaults; others repeat some of them."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    titans: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name, value in summary(self.model_config()).items():
            setattr(self, name, kwargs.get(name, value))

    def model_config(self) -> ModelConfig:
        """Return the config of the `LanguageModel`. Raises ValueError if ``titans`` is not one."""
        return model_config({"model_type": MODEL_TYPE, "titans": self.titans or {}})


class TitansForCausalLM(PretrainedMixin, PreTrainedModel, GenerationMixin):
    """A `LanguageModel`, as ``.model``, with the interface of transformers.

    Raises:
        ValueError: an entry of the config, such as ``vocab_size``, contradicts its ``titans``.
    """

    config_class = TitansConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # for Trainer: the loss is divided by `num_items_in_batch`
    _is_stateful = True  # a state cannot be rolled back by a few tokens
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: TitansConfig):
        super().__init__(config)
        self.gradient_checkpointing = False
        model_config = config.model_config()
        for name, value in summary(model_config).items():
            if getattr(config, name) != value:
                raise ValueError(f"{name}: {getattr(config, name)} contradicts the config's titans: {value}")
        self.model = LanguageModel(model_config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, with every weight copied to an address that torch would allocate.

        Weights mapped from safetensors begin at any byte, and alignment may change a product's last bit.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        for p in (loaded[0] if isinstance(loaded, tuple) else loaded).parameters():
            if p.device.type == "cpu" and p.data_ptr() % ALIGNMENT:
                p.data = p.data.clone()
        return loaded

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RaggedState | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        num_items_in_batch: Tensor | int | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits, the loss of ``labels``, and the state after the last token.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T] or [B, earlier columns + T]; 0 for tokens that are not read. Their logits
                repeat those before them in the row.
            position_ids: [1, T] or [B, T], rising by one; a packed document begins where they restart.
            past_key_values: of an earlier call, whose sequences are continued.
            inputs_embeds: [B, T, D], outputs of the embedding, in place of ``input_ids``.
            labels: [B, T], the tokens themselves (they are shifted here), -100 for no loss.
            use_cache: return the state; by default in inference without labels.
            logits_to_keep: number of last tokens to return logits for, 0 for all, or positions [N].
            num_items_in_batch: divides the sum of the losses, in place of the number of labels, less the
                share of labels behind padding, which it counts and which have no loss.
            cu_seq_lens_q, cu_seq_lens_k: [N + 1] borders of packed documents in the flattened batch.
            max_length_q, max_length_k: of the longest document; implied by the borders.
            seq_idx: [B, T], the document of each token.
            output_hidden_states: return the embedded tokens and the blocks' outputs, the last one normalised.
            output_attentions: refused.

        Raises:
            ValueError: an argument has a wrong shape or cannot be honoured; one line.
        """
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions: a Titans model returns no attention weights; leave it out")
        x_BTD = self.model.scaled(embedded(self.model.embedding, input_ids, inputs_embeds))
        B, T = x_BTD.shape[:2]
        document_BT = documents(cu_seq_lens_q, cu_seq_lens_k, seq_idx, B, T, x_BTD.device)
        x_BTD, read_BT, starts_BT = check_call(
            x_BTD, attention_mask, position_ids, document_BT, past_key_values, labels
        )
        if starts_BT is not None and (past_key_values is not None or use_cache):
            raise ValueError("use_cache, past_key_values: packed documents leave no state and continue none")
        if use_cache is None:
            use_cache = starts_BT is None and labels is None and not self.training
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        encode = lambda x, state: self._encode(x, state, starts_BT, bool(hidden))  # noqa: E731
        count = 1 + bool(hidden) * len(self.model.blocks)
        streams, state = read_ragged(encode, count, x_BTD, read_BT, past_key_values, use_cache)
        loss = None
        if labels is None:
            logits = self.model.head(keep(streams[-1], logits_to_keep))
        else:
            logits, vocab_size = self.model.head(streams[-1]), self.model.config.vocab_size
            labels, count = targets(labels, read_BT, num_items_in_batch)
            loss = self.loss_function(logits, labels, vocab_size, num_items_in_batch=count)
            logits = keep(logits, logits_to_keep)
        # not a transformers Cache: generation only uses what State defines
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cast("Any", state),
            hidden_states=tuple(streams) if hidden else None,
        )  # fmt: skip

    def _encode(
        self, x_BTD: Tensor, state: ModelState | None, starts_BT: Tensor | None, hidden: bool
    ) -> tuple[list[Tensor], ModelState | None]:
        streams = [x_BTD] if hidden else []
        note: Callable[..., None] = lambda block, given, output: streams.append(output[0])  # noqa: E731
        hooks = [block.register_forward_hook(note) for block in self.model.blocks] if hidden else []
        try:
            features_BTD, state = self.model.encode(x_BTD, state, starts_BT)
        finally:
            for hook in hooks:
                hook.remove()
        return [*streams[:-1], features_BTD], state

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head, which may be tied to the embedding."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output head."""
        self.model.head = new_embeddings

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize as transformers does; the model's own config follows."""
        before = self.model.config.vocab_size
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if not mean_resizing:  # as `titans_core.init` does; transformers leaves it to `_init_weights`
            for weight in {embedding.weight, self.model.head.weight}:
                nn.init.normal_(weight.data[before:], std=weight.shape[1] ** -0.5)
        size = embedding.num_embeddings
        self.model.config = self.model.config.model_copy(update={"vocab_size": size})
        self.config.titans = {**(self.config.titans or {}), "vocab_size": size}
        return embedding

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:  # fmt: skip
        self.gradient_checkpointing = enable
        for i, block in enumerate(cast("list[Any]", list(self.model.blocks))):
            block.recompute = enable and i % every_n_layers == 0
            if gradient_checkpointing_func is not None:
                block.checkpoint = gradient_checkpointing_func

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Count positions as transformers does, but go on from the last token also behind padding."""
        if (mask := model_kwargs.get("attention_mask")) is not None:
            return (mask.long().cumsum(-1) - 1).clamp(min=0)
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: `LanguageModel` initialises its parameters, and loading refuses missing ones."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


AutoConfig.register(MODEL_TYPE, TitansConfig)
AutoModelForCausalLM.register(TitansConfig, TitansForCausalLM)
# by which Trainer's label smoothing shifts the labels
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = TitansForCausalLM.__name__
