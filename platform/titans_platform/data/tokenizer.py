"""Tokenizers behind one interface: bytes, DNA letters, a SentencePiece model, a tokenizer.json."""

from __future__ import annotations

import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titans_platform.errors import UsageError, one_line
from titans_platform.files import hash_of

FORMS = "`byte`, `dna`, a SentencePiece .model, a tokenizer.json, or a Hub repository: openai-community/gpt2"
# the tokenizer that the paper scales name is not shipped
_HINT = (
    "; for Llama 2's (32,000 ids) give --set data.tokenizer=TinyLlama/TinyLlama-1.1B-Chat-v1.0, "
    "which downloads it"
)
# names in use for the two special tokens, most specific first; the end-of-text token of models
# that have no start token separates their documents
BOS_NAMES = (
    "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>", "[CLS]", "</s>", "<eos>",
)  # fmt: skip
PAD_NAMES = (
    "<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>", "</s>", "<eos>", "<unk>",
)  # fmt: skip


class Tokenizer(ABC):
    """Text to ids and back; ``bos`` starts every document, ``pad`` fills rows, both within vocab_size."""

    vocab_size: int
    """Rows of the embedding: number of ids, rounded up to a multiple of 4."""
    bos: int
    pad: int
    fingerprint: str
    """Hash of the tokenizer's content, independent of its path."""
    path: Path | None = None
    """The file it was read from."""

    # by content: what is computed for a tokenizer (floors, items) serves the next run's too
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special tokens."""

    def encode_within(self, text: str) -> list[int]:
        """Ids of a text after another one: without the space that some tokenizers put before a document."""
        if self.adds_space:
            before, ids = self.encode("\n"), self.encode(f"\n{text}")
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self.encode(text)

    @cached_property
    def adds_space(self) -> bool:
        """True if ``encode`` puts a space before a text."""
        return self.encode("\na") != [*self.encode("\n"), *self.encode("a")]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; special tokens are skipped."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Ids of each text, as arrays; used to tokenise a corpus."""
        return [np.asarray(self.encode(text), np.uint32) for text in texts]

    def _plain(self, ids: Iterable[int]) -> list[int]:
        return [i for i in map(int, ids) if i not in (self.bos, self.pad)]

    def _add_special(self, ids: int, bos: int | None, pad: int | None) -> None:
        """Set bos and pad; an id that the model lacks is added after its ``ids`` known ones."""
        self.bos = ids if bos is None else bos
        ids = max(ids, self.bos + 1)
        self.pad = ids if pad is None else pad
        self.vocab_size = -(-max(ids, self.pad + 1) // 4) * 4


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0-255, 256 starts a document, 257 pads."""

    fingerprint = "byte"

    def __init__(self):
        self._add_special(256, None, None)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        # without a Python object per byte
        raw = (np.frombuffer(text.encode("utf-8", "replace"), np.uint8) for text in texts)
        return [ids.astype(np.uint32) for ids in raw]

    def decode(self, ids: Iterable[int]) -> str:
        """Text; bytes that are not UTF-8 give U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class DNATokenizer(Tokenizer):
    """A, C, G, T and N as ids 0-4, in either case; any other letter is N. 5 starts a document, 6 pads."""

    fingerprint = "dna"
    LETTERS = "ACGTN"

    def __init__(self):
        self._add_special(len(self.LETTERS), None, None)
        self._ids = np.full(256, self.LETTERS.index("N"), np.uint32)
        for i, letter in enumerate(self.LETTERS):
            self._ids[[ord(letter), ord(letter.lower())]] = i

    def encode(self, text: str) -> list[int]:
        return self._ids[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.LETTERS[i] for i in ids if i < len(self.LETTERS))


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Without a start piece its end piece starts documents; without that, a new id."""

    def __init__(self, path: Path):
        import sentencepiece

        self.path, self.fingerprint = path, f"spm-{hash_of(path)[:12]}"
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        end = self._model.eos_id()
        bos = next((i for i in (self._model.bos_id(), end) if i >= 0), None)
        pads = self._model.pad_id(), end, self._model.unk_id()
        pad = next((i for i in pads if i >= 0 and i != bos), None)
        self._add_special(self._model.vocab_size(), bos, pad)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        # SentencePiece uses its own threads
        return [np.asarray(ids, np.uint32) for ids in self._model.encode(list(texts))]

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([i for i in self._plain(ids) if i < self._model.vocab_size()])


class JsonTokenizer(Tokenizer):
    """A Hugging Face tokenizer.json; its special tokens are found by the names in common use."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Model

        self.path, self.fingerprint = path, f"json-{hash_of(path)[:12]}"
        self._model = Model.from_file(str(path))
        # names of special tokens in a text are text
        self._model.encode_special_tokens = True
        self._model.no_truncation()
        self._model.no_padding()
        known = self._model.get_vocab(with_added_tokens=True)
        bos = next((known[name] for name in BOS_NAMES if name in known), None)
        pad = next((known[name] for name in PAD_NAMES if name in known and known[name] != bos), None)
        if None in (bos, pad) and max(known.values(), default=-1) >= self._model.get_vocab_size():
            raise ValueError("has gaps in its ids and no start or padding token; add them to the file")
        # added tokens may leave gaps in the count
        self._add_special(max(known.values(), default=-1) + 1, bos, pad)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        # the library uses its own threads
        encoded = self._model.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, np.uint32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode(self._plain(ids))


class TextStream:
    """Streaming decoder. ``before``: the tokens before the first one, which decide its leading space."""

    HELD = 8
    """Maximum tokens held back while a character is incomplete; after that they are shown as they are."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer, self._tokens = tokenizer, list(before[-self.HELD :])
        self._shown = len(self._tokens)

    def add(self, token: int) -> str:
        """Return the text that ``token`` adds; empty while a character is incomplete."""
        self._tokens.append(token)
        cut = self._tokenizer.decode(self._tokens).endswith("\ufffd")
        return "" if cut and len(self._tokens) - self._shown < self.HELD else self.end()

    def end(self) -> str:
        """Return the text that was held back."""
        before = self._tokenizer.decode(self._tokens[: self._shown])
        text = self._tokenizer.decode(self._tokens)[len(before) :]
        self._tokens = self._tokens[self._shown :] or self._tokens
        self._shown = len(self._tokens)
        return text


KINDS = {".model": SentencePieceTokenizer, ".json": JsonTokenizer}
"""Tokenizers by file suffix."""

BUILT_IN: dict[str, type[Tokenizer]] = {"byte": ByteTokenizer, "dna": DNATokenizer}
"""Built-in tokenizers by name; their sizes are in `config.VOCABULARIES`."""


def names_hub(spec: str) -> bool:
    """Return True if ``spec`` can only be a Hub repository: no local file, and no file suffix."""
    path = Path(spec).expanduser()
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", spec)) and path.suffix not in KINDS and not path.is_file()


def load_tokenizer(spec: str) -> Tokenizer:
    """Load the tokenizer that ``spec`` names. Raises UsageError.

    It is ``byte``, ``dna``, the path of a .model or .json file, or a Hub repository with a tokenizer.json.
    """
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    path = Path(spec).expanduser()
    if not path.is_file():
        if not names_hub(spec):
            raise UsageError(f"data.tokenizer: no file {spec}; give {FORMS}{_HINT}")
        path = _from_hub(spec)
    if path.suffix not in KINDS:
        raise UsageError(f"data.tokenizer: {spec} is not a tokenizer; give {FORMS}")
    try:
        return KINDS[path.suffix](path)
    except Exception as error:  # the libraries raise bare Exception, RuntimeError, TypeError, ValueError
        reason = f"{spec} cannot be read ({one_line(error, 120)})"
        raise UsageError(f"data.tokenizer: {reason}; give {FORMS}") from error


def train_tokenizer(texts: Iterable[str], size: int) -> str:
    """Train a byte-level BPE of ``size`` ids on ``texts``; return the text of its tokenizer.json.

    Raises UsageError if ``size`` is less than the bytes and the two special tokens need, or if the texts
    yield too few merges.
    """
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "<pad>"]
    if size < (least := len(alphabet) + len(special)):
        raise UsageError(f"--size: {size} ids are fewer than {least}, the bytes and two special tokens")
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"initial_alphabet": alphabet, "special_tokens": special}
    model.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False, **options))
    if (ids := model.get_vocab_size()) < size:
        raise UsageError(f"--size: the text gives {ids} ids, not {size}; name fewer or more text")
    return model.to_str()


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> Path:
    """Export a tokenizer. Returns the file that `load_tokenizer` takes.

    Bytes and a tokenizer.json are written for `transformers.AutoTokenizer`, with bos before each text, as in
    training. A SentencePiece model is copied unchanged. Raises UsageError for the DNA tokenizer.
    """
    if not isinstance(tokenizer, ByteTokenizer | JsonTokenizer):
        if tokenizer.path is None:
            raise UsageError(f"data.tokenizer: {tokenizer.fingerprint} cannot be exported")
        return Path(shutil.copy(tokenizer.path, folder / "tokenizer.model"))
    from tokenizers import Tokenizer as Model
    from tokenizers.processors import TemplateProcessing

    model = _byte_model() if isinstance(tokenizer, ByteTokenizer) else Model.from_file(str(tokenizer.path))
    for token, name in ((tokenizer.bos, "<s>"), (tokenizer.pad, "<pad>")):
        if model.id_to_token(token) is None:
            model.add_special_tokens([name])
            assert model.token_to_id(name) == token, "special tokens stand behind the known ones"
    start, pad = model.id_to_token(tokenizer.bos), model.id_to_token(tokenizer.pad)
    model.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, tokenizer.bos)])
    path = folder / "tokenizer.json"
    model.save(str(path))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {"bos_token": start, "eos_token": start, "pad_token": pad, "split_special_tokens": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return path


def _byte_model() -> Any:
    """Build the byte tokenizer as a byte-level BPE without merges, on GPT-2's byte alphabet."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers

    printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, count(256)
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    model = Model(models.BPE({letter: byte for byte, letter in enumerate(letters)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return model


def _from_hub(repository: str) -> Path:
    """Download the tokenizer.json of a Hub repository into the cache of huggingface_hub."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repository, "tokenizer.json"))
    except Exception as error:  # HTTP's and the library's own have no common base
        reason = f"is not a local file, and the Hub gave no tokenizer.json ({one_line(error, 120)})"
        raise UsageError(f"data.tokenizer: {repository} {reason}") from error
