"""Pretrained transformers models whose attention sees a window and a memory of constant size.

    model = convert(AutoModelForCausalLM.from_pretrained(name), MemoryOptions(window=256))
    model.save_pretrained(folder)  # then AutoModelForCausalLM.from_pretrained(folder), after importing this

``past_key_values`` is the state after the last token, whose size does not grow; batches and padding are read
as in `titans_core.huggingface`.

Shapes: B rows, T tokens of a call, D model width, V vocabulary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers  # pyright: ignore[reportMissingImports]
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import CausalLMOutputWithPast  # pyright: ignore[reportMissingImports]
from transformers.models.auto.modeling_auto import (  # pyright: ignore[reportMissingImports]
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils.generic import can_return_tuple  # pyright: ignore[reportMissingImports]

from titans_core.adapt.attention import Far, Pass, WindowAttention
from titans_core.adapt.families import FAMILIES, Family, find_family
from titans_core.adapt.memory import AttentionMemory, MemoryOptions
from titans_core.adapt.sessions import Sessions
from titans_core.generation import EMPTY_READING, Reading, Writing, read
from titans_core.memory_file import hash_of
from titans_core.ragged import (
    PretrainedMixin,
    RaggedState,
    check_call,
    embedded,
    keep,
    read_ragged,
    targets,
)
from titans_core.state import ModelState

HEAD_TOKENS = 256
"""Tokens whose logits are in memory at once."""
PIECE = 2048
"""Tokens of a call while a text is read."""


class Adapted(PretrainedMixin):
    """Mixed into a family's class for causal language models: the window, the memories and their state."""

    family: Family
    config: Any
    _keep_in_fp32_modules_strict = frozenset({"memory"})
    _is_stateful = True  # a state cannot be rolled back by a few tokens

    def __init__(self, config: Any):
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        self.options = MemoryOptions.model_validate(config.titans or {}, strict=False)
        for layer in self.layers():
            source = getattr(layer, self.family.attention)
            attention = _mixed(WindowAttention, type(source), self.family)(config, layer_idx=source.layer_idx)
            attention.add_memory(config, self.options)
            setattr(layer, self.family.attention, attention)

    def layers(self) -> nn.ModuleList:
        """Return the layers of the base model."""
        return getattr(getattr(self, cast(Any, self).base_model_prefix), self.family.layers)

    def memories(self) -> dict[str, AttentionMemory]:
        """Return the memories by the number of their layer."""
        attentions = {str(i): getattr(layer, self.family.attention) for i, layer in enumerate(self.layers())}
        return {i: attention.memory for i, attention in attentions.items() if attention.memory is not None}

    def renew_memories(self) -> None:
        """Put untrained memories in the place of the memories, from the global RNG."""
        for layer in self.layers():
            getattr(layer, self.family.attention).add_memory(self.config, self.options)
        nn.ModuleDict(self.memories()).to(cast(Any, self).device)

    def source_hash(self) -> str:
        """Return a hash of the source's weights and of the options that weights depend on, 16 hex digits."""
        source = {name: x for name, x in cast(Any, self).state_dict().items() if ".memory." not in name}
        options = {name: x for name, x in self.config.titans.items() if name != "kept"}
        return hash_of(json.dumps(options, sort_keys=True), source)[:16]

    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` tokens, on a border of chunks."""
        attentions = (getattr(layer, self.family.attention) for layer in self.layers())
        return sum(attention.state_bytes(length) for attention in attentions)

    def encode(self, x_BTD: Tensor, call: Pass) -> Tensor:
        """[B, T, D] embedded tokens to [B, T, D] inputs of the head, all tokens unmasked.

        Raises:
            ValueError: positions are a learned table, and the text is longer.
        """
        model, start, device = cast(Any, self), call.position, x_BTD.device
        end = start + x_BTD.shape[1]
        if self.family.rotary:  # the tables of `attention.rotate`
            start, end = 0, min(start, self.options.window + self.options.sinks) + x_BTD.shape[1]
        elif end > self.config.max_position_embeddings:
            most = self.config.max_position_embeddings
            raise ValueError(f"input_ids: {end} tokens; a {self.config.model_type} has positions for {most}")
        return model.base_model(
            inputs_embeds=x_BTD, position_ids=torch.arange(start, end, device=device)[None], call=call,
            attention_mask=x_BTD.new_zeros(1, 1, 1, 1),  # four axes: transformers makes no mask of its own
            use_cache=False,
        ).last_hidden_state  # fmt: skip

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: RaggedState | None = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0, *, num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None, output_hidden_states: bool | None = None,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Logits, the loss of ``labels``, and the state after the last token.

        Args as in `titans_core.huggingface.TitansForCausalLM.forward`; documents cannot be packed.

        Raises:
            ValueError: an argument has a wrong shape or cannot be honoured; one line.
        """
        if output_attentions or output_hidden_states:
            raise ValueError("output_attentions, output_hidden_states: an adapted model has neither")
        model, past = cast(Any, self), past_key_values
        x_BTD = embedded(model.get_input_embeddings(), input_ids, inputs_embeds)
        x_BTD, read_BT, starts_BT = check_call(x_BTD, attention_mask, position_ids, None, past, labels)
        if starts_BT is not None:
            raise ValueError("position_ids: packed documents; an adapted model reads one text a row")
        if use_cache is None:
            use_cache = labels is None and not model.training
        (features,), state = read_ragged(self._step, 1, x_BTD, read_BT, past, use_cache)
        if labels is None:
            logits, loss = model.lm_head(keep(features, logits_to_keep)), None
        else:
            logits, size = model.lm_head(features), self.config.vocab_size
            labels, count = targets(labels, read_BT, num_items_in_batch)
            loss = model.loss_function(logits, labels, size, num_items_in_batch=count)
            logits = keep(logits, logits_to_keep)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cast(Any, state))

    def _step(self, x_BTD: Tensor, state: ModelState | None) -> tuple[list[Tensor], ModelState]:
        call = Pass(state.position, state.blocks) if state else Pass()
        features = self.encode(x_BTD, call)
        blocks = tuple(call.after[i] for i in sorted(call.after))
        return [features], ModelState(call.position + x_BTD.shape[1], blocks)

    @torch.no_grad()
    def nats(self, tokens_BT: Tensor, far: Far = "memory") -> Tensor:
        """[B, T - 1] nats of each token but the first; ``far`` stands for what has left the window."""
        model = cast(Any, self)
        features = self.encode(model.get_input_embeddings()(tokens_BT[:, :-1]), Pass(far=far))
        pairs = zip(*(x.split(HEAD_TOKENS, 1) for x in (features, tokens_BT[:, 1:])), strict=True)
        logits = ((model.lm_head(part).mT.float(), target) for part, target in pairs)
        return torch.cat([F.cross_entropy(*pair, reduction="none") for pair in logits], 1)

    def read(self, tokens: Sequence[int], start: Reading = EMPTY_READING) -> Reading:
        """Read a sequence, or more of one, to generate from it any number of times."""
        return read(self._next, tokens, start, cast(Any, self).device)

    def stream(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> Writing:
        """Stream tokens as they are generated, as `LanguageModel.stream`; prompts may differ in length."""
        return Writing(self._next, prompts, max_new_tokens, device=cast(Any, self).device, **options)

    def sessions(self, folder: str | Path) -> Sessions:
        """Return the sessions in a folder."""
        return Sessions(self, Path(folder))

    def batch_key(self, state: ModelState) -> Any:
        """Return a key that is equal for states which one batch can continue, of texts of any lengths.

        Beyond window and sinks no position grows with the text, except in a table of positions.
        """
        near = self.options.window + self.options.sinks
        position = min(state.position, near) if self.family.rotary else state.position
        return position, [x.shape[1:] if isinstance(x, Tensor) else x for x in tree_leaves(state.blocks)]

    def _next(self, tokens_BT: Tensor, state: ModelState | None, last: bool = True) -> SimpleNamespace:
        """Logits after the last token, and the state."""
        model, features = cast(Any, self), tokens_BT
        for piece in tokens_BT.split(PIECE, 1):
            (features,), state = self._step(model.get_input_embeddings()(piece), state)
        return SimpleNamespace(logits=model.lm_head(features[:, -1:]), state=state)

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Count the tokens that are not padding."""
        if (mask := model_kwargs.get("attention_mask")) is not None:
            return (mask.long().cumsum(-1) - 1).clamp(min=0)
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


def convert(source: Any, options: MemoryOptions = MemoryOptions()) -> Any:  # noqa: B008
    """Return a copy of a transformers model with a window and untrained memories.

    Raises:
        ValueError: its family is unknown, its weights are quantised, its attention is not full, or the window
            does not fit into its context; one line.
    """
    config = source.config
    find_family(config.model_type)
    quantised = getattr(config, "quantization_config", None)
    # transformers gives the weights of a GGUF file in full
    if quantised is not None and (method := dict(quantised)["quant_method"]) != "gguf":
        method = getattr(method, "value", method)
        raise ValueError(f"the source is quantised ({method}), so that nothing can be trained through it")
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise ValueError("the source has layers without full attention, which a memory could not learn from")
    rope = getattr(config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
        raise ValueError(f"the source's rotary positions ({kind}) change with the length of a call")
    context, seen = config.max_position_embeddings, options.window + options.sinks
    if seen > context:
        raise ValueError(f"window: {seen} tokens with the sinks, but the source's context has {context}")
    if wrong := [i for i in options.layers or () if i >= config.num_hidden_layers]:
        raise ValueError(f"layers: {wrong[0]} does not exist; the source has {config.num_hidden_layers}")
    entries = config.to_dict() | {"titans": options.model_dump(mode="json")}
    model_class = MODELS[config.model_type]
    for key in ("model_type", "architectures", "quantization_config"):
        entries.pop(key, None)
    model = model_class(model_class.config_class(**entries)).to(source.dtype)
    nn.ModuleDict(model.memories()).float()
    missing = model.load_state_dict(source.state_dict(), strict=False).missing_keys
    if absent := [name for name in missing if ".memory." not in name]:
        remedy = "give the plain model: merge_and_unload() of peft's, _orig_mod of a compiled one"
        raise ValueError(f"the source lacks {len(absent)} weights, the first is {absent[0]}; {remedy}")
    model.generation_config = source.generation_config
    return model.eval()


def replace_weights(
    source: Path, folder: Path, weights: Mapping[str, Tensor], deltas: Mapping[str, Tensor]
) -> None:
    """Write the weights saved in ``source`` to ``folder``, file by file: some replaced, some changed."""
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tensors |= {name: weights[name].to(x.dtype) for name, x in tensors.items() if name in weights}
        tensors |= {name: (x + deltas[name]).to(x.dtype) for name, x in tensors.items() if name in deltas}
        save_file(tensors, temporary := folder / f"{path.name}.partial", metadata)
        os.replace(temporary, folder / path.name)


def change_kept(folder: Path, kept: int) -> None:
    """Change the number of kept tokens of a folder's model, and of its ``base``; no weight depends on it."""
    for path in (folder / "config.json", folder / "base" / "config.json"):
        if not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["titans"].get("kept") == kept:
            continue
        config["titans"]["kept"] = kept
        temporary = path.with_name("config.json.partial")
        temporary.write_text(json.dumps(config, indent=2), encoding="utf-8")
        os.replace(temporary, path)


def options_of(config: Any) -> MemoryOptions:
    """Return the memory's options of an adapted model's config.

    Raises:
        ValueError: it is of another model, or an option cannot be; one line.
    """
    if not getattr(config, "titans", None):
        raise ValueError(f"a {config.model_type} model without a memory")
    try:
        return MemoryOptions.model_validate(config.titans, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{first['loc'][0]}: {first['msg'].removeprefix('Value error, ')}") from None


def _mixed(part: type, base: type, family: Family) -> Any:
    return type(f"{part.__name__}{base.__name__}", (part, base), {"family": family})


def _classes(name: str, family: Family) -> Any:
    """Build and register config and model class of a family."""
    config: Any = transformers.CONFIG_MAPPING[name]
    model: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config]
    title = config.__name__.removesuffix("Config")
    fields: dict[str, Any] = {
        "__annotations__": {"titans": dict | None},
        "titans": None,
        "__module__": __name__,
    }
    config = type(f"Titans{title}Config", (config,), fields | {"model_type": f"titans_{name}"})
    attributes = {"config_class": config, "family": family, "__module__": __name__}
    model = type(f"Titans{title}ForCausalLM", (Adapted, model), attributes)
    globals().update({config.__name__: config, model.__name__: model})  # pickle finds them by these names
    transformers.AutoConfig.register(f"titans_{name}", config)
    transformers.AutoModelForCausalLM.register(config, model)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[f"titans_{name}"] = model.__name__
    return model


MODELS = {name: _classes(name, family) for name, family in FAMILIES.items()}
"""Adapted models by the ``model_type`` of their source."""
