"""This library's own variants and memory rules, with state, documents and a reference form."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from titans_core.audit.adapter import WIDTHS, Adapter
from titans_core.audit.report import AuditError
from titans_core.blocks import BLOCKS, find
from titans_core.config import AttentionConfig, MemoryConfig, ModelConfig
from titans_core.model import LanguageModel

VOCAB = 32
MEMORIES = ("lmm", "mac", "mag", "mal")
SMALL: dict[str, dict[str, Any]] = {
    "based": {"heads": 2, "feature": 4, "window": 24},
    "gated_deltanet_h2": {"head_dim": 8, "state": 8},
    "gla": {"heads": 2},
    "hgrn2": {"heads": 2},
    "hyena": {"length": 4096, "filter_width": 8},
    "mamba2": {"head_dim": 8, "state": 8},
    "retnet": {"heads": 2},
}
"""Options of variants whose defaults are too large for the audit's width."""
QUADRATIC = ("transformer", "hyena")
"""Variants that attend to the whole past, whose state grows with it."""


def variant_factory(name: str, width: int = 32, **fields: Any) -> Callable[[], Adapter]:
    """Return a factory of one block of a variant in a language model, for `audit`.

    Args:
        name: a variant, or the import path of a block class.
        width: d_model.
        fields: of `ModelConfig`, such as ``memory={"rule": "gated_delta"}``.

    Raises:
        AuditError: there is no such variant, or it refuses the fields; one line.
    """
    try:
        config = _config(name, width, fields)
        LanguageModel(config)
    except ValidationError as error:
        first = error.errors()[0]
        # an error of our own names its field
        message = str(first.get("ctx", {}).get("error", first["msg"]))
        raise AuditError(": ".join(filter(None, (".".join(map(str, first["loc"])), message)))) from None
    except ValueError as error:
        raise AuditError(" ".join(str(error).split())) from None
    return lambda: adapt(LanguageModel(config))


def layer_factory(
    target: str, width: int, arguments: Mapping[str, Any], adapter: str | None = None
) -> Callable[[], Any]:
    """Return a factory of a layer by the import path of its class or function, for `audit`; tried once.

    Args:
        target: ``package.module:Class``.
        width: passed under each usual name that is required, else the first optional one, else by position.
        arguments: further arguments.
        adapter: import path of a function that wraps the layer in an `Adapter`.

    Raises:
        AuditError: it cannot be imported or built; one line.
    """
    kind, wrap = _imported(target), _imported(adapter) if adapter else lambda layer: layer
    if not callable(kind) or not callable(wrap):
        raise AuditError(f"{target if callable(wrap) else adapter} is not a class or a function")
    positional, named = _sized(kind, width, arguments)

    def factory() -> Any:
        return wrap(kind(*positional, **named))

    try:
        factory()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise AuditError(f"cannot be built: {reason}; --kwargs gives more arguments") from None
    return factory


def _imported(path: str) -> Any:
    if ":" not in path:
        raise AuditError(f"{path} is not an import path; write package.module:name")
    try:
        return pkgutil.resolve_name(path)
    except Exception as error:
        raise AuditError(" ".join(f"{type(error).__name__}: {error}".split())[:300]) from None


def _sized(
    kind: Callable[..., Any], width: int, arguments: Mapping[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    """Return positional and named arguments, the width among them."""
    try:
        parameters = list(inspect.signature(kind).parameters.values())
    except (TypeError, ValueError):
        return [width], dict(arguments)
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    open_ones = [p for p in parameters if p.name not in arguments and p.kind in by_name]
    required = [p.name for p in open_ones if p.default is p.empty]
    widths = [name for name in required if name in WIDTHS]
    widths = widths or [p.name for p in open_ones if p.name in WIDTHS and not required][:1]
    if widths or not required:
        return [], {**dict.fromkeys(widths, width), **arguments}
    return [width], dict(arguments)


def _config(name: str, width: int, fields: Mapping[str, Any]) -> ModelConfig:
    block = find(name)
    window = None if name in ("mac", *QUADRATIC) else 32
    base = {
        "variant": name,
        "options": SMALL.get(name, {}),
        "vocab_size": VOCAB,
        "d_model": width,
        "n_layers": 1,
        "mlp_expansion": 1.0,
        "memory": {
            "heads": 2,
            "chunk_size": 16,
            "max_theta": 0.5,
            "write_budget": 2.0,
            **block.preset_memory,
        },
        "attention": {"heads": 2, "window": window, "segment_size": 32},
    }
    parts = {"memory": MemoryConfig, "attention": AttentionConfig}
    merged = {**base, **fields}
    for part, schema in parts.items():
        merged[part] = schema.model_validate({**base[part], **dict(fields.get(part, {}))})
    return ModelConfig.model_validate(merged)


def adapt(model: LanguageModel) -> Adapter:
    """Return an adapter of a language model of this library, with every form that the model has."""
    name, slow = model.config.variant, None
    rule = model.config.memory.rule
    if name in MEMORIES:
        memory = model.config.memory.model_copy(update={"backend": "reference"})
        slow = LanguageModel(model.config.model_copy(update={"memory": memory}))

    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        out = model(x, state)
        assert out.logits is not None
        return out.logits, out.state

    def packed(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        starts = torch.zeros_like(x, dtype=torch.bool)
        starts[0, cu_seqlens[:-1].long()] = True
        return model(x, document_starts=starts).logits

    def reference(x: Tensor) -> Tensor:
        assert slow is not None
        # the same parameter objects, so that gradients reach them
        return torch.func.functional_call(slow, dict(model.named_parameters()), (x,)).logits

    whole = name in QUADRATIC
    return Adapter(
        model,
        forward=lambda x: model(x).logits,
        vocab=VOCAB,
        embedding=model.embedding,
        step=step,
        packed=packed,
        reference=reference if slow is not None else None,
        state_grows="linear" if whole else "constant",
        time_grows="quadratic" if whole else "linear",
        notes=f"one block, chunk_size {model.config.memory.chunk_size}"
        + (f", rule {rule}" if name in MEMORIES else ""),
    )


def variant_names() -> list[str]:
    """Return the variants of this library."""
    return sorted(BLOCKS)
