"""A language model as a folder in Hugging Face's layout, config.json and model.safetensors, and back.

`titans_core.huggingface` makes such a folder one that `AutoModelForCausalLM` loads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from titans_core.config import ModelConfig
from titans_core.model import LanguageModel

CONFIG, WEIGHTS, GENERATION = "config.json", "model.safetensors", "generation_config.json"
MODEL_TYPE, CLASS, PREFIX = "titans", "TitansForCausalLM", "model."
"""Of a folder: its ``model_type``, its class, the prefix of the weights' names."""
HEAD = "head.weight"


def save_folder(folder: Path, model: LanguageModel, special: Mapping[str, int] | None = None) -> None:
    """Write a model's config, weights and generation config.

    Args:
        folder: created if missing.
        model: a head tied to the embedding is saved once.
        special: additional entries of config.json and generation_config.json, such as ``bos_token_id``.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, dtype = model.config, str(model.head.weight.dtype).removeprefix("torch.")
    tied = config.tie_embeddings
    weights = {PREFIX + name: x.contiguous() for name, x in model.state_dict().items()}
    if tied:
        del weights[PREFIX + HEAD]
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    fields = {"model_type": MODEL_TYPE, "architectures": [CLASS], "dtype": dtype}
    fields |= summary(config)
    fields |= {"titans": config.model_dump(mode="json", exclude_defaults=True), **(special or {})}
    for name, entries in ((CONFIG, fields), (GENERATION, {"do_sample": False, **(special or {})})):
        (folder / name).write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # safetensors writes a file that only its owner may read
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)


def load_folder(folder: Path) -> LanguageModel:
    """Load a folder written by `save_folder`, in the dtype it was saved in.

    Raises:
        ValueError: it is not such a folder; one line.
    """
    try:
        entries = json.loads((folder / CONFIG).read_text("utf-8"))
        model = LanguageModel(model_config(entries))
        # transformers saves a large model in several files, or under the name of a variant
        whole = folder / WEIGHTS
        files = [whole] if whole.exists() else sorted(folder.glob("model*.safetensors")) or [whole]
        weights = {k.removeprefix(PREFIX): x for file in files for k, x in load_file(file).items()}
        if model.config.tie_embeddings:
            weights[HEAD] = weights["embedding.weight"]
        model.to(weights[HEAD].dtype).load_state_dict(weights)
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{folder}: not a saved Titans model: {' '.join(str(error).split())}") from None
    return model


def summary(config: ModelConfig) -> dict[str, int]:
    """Fields of a model's config under the names by which transformers and its users know them."""
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.d_model, "num_hidden_layers": config.n_layers,
        "tie_word_embeddings": config.tie_embeddings,
    }  # fmt: skip


def model_config(entries: Mapping[str, object]) -> ModelConfig:
    """Read the model's config from the entries of a config.json. Raises ValueError, KeyError."""
    if entries["model_type"] != MODEL_TYPE:
        raise ValueError(f"model_type is {entries['model_type']}, not {MODEL_TYPE}")
    try:
        return ModelConfig.model_validate_json(json.dumps(entries["titans"]))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"titans.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
