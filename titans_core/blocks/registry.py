"""From the name of a variant to its block class: the package's own, or any class by its import path."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from titans_core.blocks.base import Block
from titans_core.blocks.lmm import LMM
from titans_core.blocks.mac import MAC
from titans_core.blocks.mag import MAG
from titans_core.blocks.mal import MAL
from titans_core.blocks.transformer import Transformer
from titans_core.config import ModelConfig

BLOCKS: dict[str, type[Block]] = {
    "lmm": LMM,
    "mac": MAC,
    "mag": MAG,
    "mal": MAL,
    "transformer": Transformer,
}
"""Variants with a short name. ``BLOCKS["mine"] = MyBlock`` adds one to this process."""


def find(variant: str) -> type[Block]:
    """The block class of a variant: a name in `BLOCKS`, or an import path ``package.module:Class``.

    Modules of the current directory are found too: the ``titans`` command does not put it on the path.

    Raises:
        ValueError: there is no such class, or it is no complete block; one line that begins with `variant`.
    """
    block = _imported(variant) if ":" in str(variant) else BLOCKS.get(variant)
    if block is None:
        hint = (
            _near(str(variant), BLOCKS)
            or "name a class of your own by its import path, my_lab.blocks:MyBlock"
        )
        raise ValueError(f"variant: {variant!r} is not one of {', '.join(BLOCKS)}; {hint}")
    if not (isinstance(block, type) and issubclass(block, Block)):
        raise ValueError(f"variant: {variant} is not a subclass of titans_core.blocks.Block")
    if missing := sorted(block.__abstractmethods__):
        raise ValueError(f"variant: {variant} does not define {' and '.join(missing)}, which a block must")
    return block


def resolve(config: ModelConfig) -> type[Block]:
    """The block class of a config that fits it.

    Raises:
        ValueError: for an unknown variant, its options, or what its `Block.check` refuses; one line that
            begins with the field of `ModelConfig` that is wrong.
    """
    block = find(config.variant)
    try:
        block.read_options(config)
    except ValidationError as error:
        raise ValueError(_explain(error.errors(include_url=False)[0], block)) from None
    block.check(config)
    return block


def block_parameters(config: ModelConfig) -> int:
    """Trained numbers of one block, counted on the meta device. Raises ValueError as `resolve` does."""
    block = resolve(config)
    with torch.device("meta"):
        return sum(p.numel() for p in block(config).parameters())


def count_parameters(config: ModelConfig) -> int:
    """Trained numbers of the whole model, a tied embedding counted once; quick however large it is.

    Raises:
        ValueError: for what the model's constructor would refuse.
    """
    embeddings = 1 if config.tie_embeddings else 2
    outside = embeddings * config.vocab_size * config.d_model + config.d_model  # and the last norm
    return config.n_layers * block_parameters(config) + outside


def source_digest(variant: str) -> str | None:
    """Hash of the file that defines a variant named by import path; None for those of `BLOCKS`.

    The package's own blocks are known by the commit; a file of one's own may change between two runs.
    Raises ValueError as `find`.
    """
    file = sys.modules[find(variant).__module__].__file__ if ":" in variant else None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else None


def _imported(path: str) -> Any:
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        # last, so that nothing installed is hidden by a file that happens to lie here
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"variant: {path}: {module_name!r} cannot be imported: {reason}") from error
    if not hasattr(module, name):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ValueError(
            f"variant: {path}: {module_name} has no {name!r}; {_near(name, classes)}".rstrip("; ")
        )
    return getattr(module, name)


def _explain(error: Any, block: type[Block]) -> str:
    field = ".".join(["options", *(str(part) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        known = list(block.Options.model_fields)
        hint = _near(str(error["loc"][-1]), known) or f"{block.__name__} takes {', '.join(known) or 'none'}"
        return f"{field}: unknown option; {hint}"
    return f"{field}: {error['msg'].replace('Input should be', 'should be')}"


def _near(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else ""
