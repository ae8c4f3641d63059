"""A tokenizer as files that other programs read: tokenizer.json, and what Hugging Face wants beside it."""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

from titans_platform.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from titans_platform.errors import UsageError

START, PAD = "<s>", "<pad>"


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> Path:
    """Write the files of a tokenizer; the one that `load_tokenizer` takes.

    Bytes and a tokenizer.json are written for `transformers.AutoTokenizer`, with the document's start before
    each text, as in training. A SentencePiece model is copied as it is. Raises UsageError for letters of DNA.
    """
    if not isinstance(tokenizer, ByteTokenizer | JsonTokenizer):
        if tokenizer.path is None:
            raise UsageError(f"data.tokenizer: {tokenizer.fingerprint} has no form that other programs read")
        return Path(shutil.copy(tokenizer.path, folder / "tokenizer.model"))
    from tokenizers.processors import TemplateProcessing

    model = _byte_model() if isinstance(tokenizer, ByteTokenizer) else _json_model(tokenizer)
    start, pad = (_special(model, i, name) for i, name in ((tokenizer.bos, START), (tokenizer.pad, PAD)))
    model.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, tokenizer.bos)])
    path = folder / "tokenizer.json"
    model.save(str(path))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    about |= {"bos_token": start, "eos_token": start, "pad_token": pad}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return path


def _json_model(tokenizer: JsonTokenizer) -> Any:
    from tokenizers import Tokenizer as Model

    return Model.from_file(str(tokenizer.path))


def _byte_model() -> Any:
    """The bytes as a byte-level BPE without merges, whose letters are those of GPT-2."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers

    printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, count(256)
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    model = Model(models.BPE({letter: byte for byte, letter in enumerate(letters)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return model


def _special(model: Any, token: int, name: str) -> str:
    """The name of a special token, which gets one where the model has none."""
    if (known := model.id_to_token(token)) is not None:
        return known
    model.add_special_tokens([name])
    assert model.token_to_id(name) == token, "special tokens stand behind the known ones"
    return name
