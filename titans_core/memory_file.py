"""Memory files: save what a model has read and resume from it later.

A file holds one `Reading` as safetensors: the tensors of its state, and in the header the structure of the
state, the format's version, a hash of the model, the number of tokens read and a checksum of everything. Only
the model that wrote a state can load it. To fork a memory, copy its file; to reset it, start without one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_safetensors
from torch import Tensor

from titans_core.generation import Reading

KIND, VERSION = "titans-memory", "3"
NO_CHECKSUM = "2"
"""The format before, without a checksum; its files can still be read."""


def save_memory(path: Path, reading: Reading, model: Any) -> int:
    """Write what ``model`` has read to a file, atomically. Returns its size in bytes.

    Raises:
        OSError: the file cannot be written.
        ValueError: a block's state holds anything but tensors, numbers, strings, tuples and dicts.
    """
    structure, tensors = flatten_state(reading, "reading")
    metadata = {"kind": KIND, "version": VERSION, "model": model_hash(model), "tokens": str(reading.tokens)}
    metadata["reading"] = json.dumps(structure)
    content = as_safetensors(tensors, metadata | {"checksum": _checksum(metadata, tensors)})
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(content)


def load_memory(path: Path, model: Any) -> Reading:
    """Read a memory file that ``model`` wrote, onto the model's device.

    Raises:
        ValueError: it is not a memory file, or is damaged, or of another format or model; one line.
    """
    device = str(next(model.parameters()).device)
    try:
        with safe_open(path, "pt", device=device) as file:
            metadata = file.metadata() or {}
            _check(path, metadata, model)
            # copies: mapped tensors begin at any byte, and alignment may change the last bit of a product
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        expected = metadata.pop("checksum", None)
        if expected != _checksum(metadata, tensors) and not (
            expected is None and metadata["version"] == NO_CHECKSUM
        ):
            raise ValueError(
                f"{path}: damaged: its checksum does not match; use a copy, or read the text again"
            )
        return restore_state(json.loads(metadata["reading"]), tensors)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as a memory file: {reason}") from None
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: the state in the file cannot be restored: {error!r}") from None


def model_hash(model: Any) -> str:
    """Return a hash of the config and weights of a `Backbone` or an adapted model, 32 hex digits."""
    adapted = getattr(model.config, "titans", None)
    config = (
        json.dumps(adapted, sort_keys=True)
        if adapted
        else model.config.model_dump_json(exclude_defaults=True)
    )
    return hash_of(config, model.state_dict())


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """Return a hash of everything in a file but the checksum itself."""
    return hash_of(json.dumps(metadata, sort_keys=True), dict(sorted(tensors.items())))


def hash_of(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of a text and of named tensors, 32 hex digits."""
    digest = blake2b(text.encode(), digest_size=16)
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def flatten_state(state: Any, name: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Return the structure of a state as JSON, and copies of its tensors by name, shared tensors once.

    Raises:
        ValueError: it holds anything but tensors, numbers, strings, tuples and dicts.
    """
    tensors: dict[str, Tensor] = {}
    return _to_json(state, name, tensors, {}), tensors


def restore_state(structure: Any, tensors: dict[str, Tensor]) -> Any:
    """Rebuild a state from the structure and tensors of `flatten_state`."""
    if not isinstance(structure, dict):
        return structure
    if "tensor" in structure:
        return tensors[structure["tensor"]]
    if "tuple" in structure:
        return tuple(restore_state(part, tensors) for part in structure["tuple"])
    below = structure["fields"] if "class" in structure else structure["dict"]
    parts = {key: restore_state(part, tensors) for key, part in below.items()}
    return _state_class(structure["class"])(**parts) if "class" in structure else parts


def _check(path: Path, metadata: dict[str, str], model: Any) -> None:
    if metadata.get("kind") != KIND:
        raise ValueError(f"{path}: a safetensors file, but not a memory file")
    if metadata.get("version") not in (VERSION, NO_CHECKSUM):
        raise ValueError(
            f"{path}: written in format {metadata.get('version')}; this version reads format {VERSION}"
        )
    expected = model_hash(model)
    if metadata.get("model") != expected:
        raise ValueError(
            f"{path}: written by another model ({metadata.get('model', '')[:12]}; this one is "
            f"{expected[:12]}); read the text again with this one"
        )


def _to_json(value: Any, name: str, tensors: dict[str, Tensor], seen: dict[int, str]) -> Any:
    """``value`` as JSON; collects its tensors in ``tensors``."""
    below = lambda part, key: _to_json(part, f"{name}.{key}", tensors, seen)  # noqa: E731
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = name
            # a copy: safetensors refuses tensors that share storage
            tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
        return {"tensor": seen[id(value)]}
    if isinstance(value, dict):
        return {"dict": {key: below(part, key) for key, part in value.items()}}
    if hasattr(value, "_fields"):
        fields = {field: below(getattr(value, field), field) for field in value._fields}
        return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    if isinstance(value, tuple):
        return {"tuple": [below(part, i) for i, part in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name}: a {type(value).__name__} cannot be saved in a memory file")


def _state_class(path: str) -> Any:
    """Look up a NamedTuple of a state by its path, in imported modules: a file must not cause imports."""
    module, _, name = path.partition(":")
    kind = getattr(sys.modules[module], name)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise TypeError(f"{path} is not a NamedTuple")
    return kind
