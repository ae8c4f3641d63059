"""Write the text of the study: source of the packages that constraints.txt pins, split by package.

    python experiments/far_text/text.py

writes train, validation and test .jsonl.gz and a BPE tokenizer of 4,096 into titans-runs/far_text. With the
pinned packages (`pip install -c constraints.txt '.[train]'`) everybody gets the same files.
"""

import gzip
import hashlib
import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPLITS = {
    "validation": ["matplotlib"],
    "test": ["networkx", "scikit-learn", "SQLAlchemy"],
    "train": [
        "torch", "sympy", "pandas", "scipy", "ray", "databricks-sdk", "mlflow", "mlflow-tracing", "numpy",
        "fonttools", "Pygments", "huggingface_hub", "pyarrow", "setuptools", "datasets", "mpmath", "pydantic",
        "protobuf", "wcwidth",
    ],
}  # fmt: skip
LEAST_BYTES = 40_000
"""Shorter files are left out: they have little text beyond a window."""
VOCABULARY = 4096
SAMPLED = 6
"""The tokenizer is trained on one file in so many."""


def files_of(package: str) -> Iterator[tuple[str, str]]:
    """Name and text of the long Python files of an installed package."""
    for file in metadata.distribution(package).files or ():
        path = Path(str(file.locate()))
        if path.suffix == ".py" and path.is_file() and path.stat().st_size > LEAST_BYTES:
            yield f"{package}/{file}", path.read_text("utf-8", errors="replace")


def main(folder: Path) -> None:
    """Write the three files and the tokenizer; print their sizes and hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[str]] = {}
    for split, packages in SPLITS.items():
        documents = {name: text for package in packages for name, text in files_of(package)}
        # an order of its own: a package's files do not follow one another
        names = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
        texts[split] = [documents[name] for name in names]
        lines = "".join(json.dumps({"id": name, "text": documents[name]}) + "\n" for name in names).encode()
        # no time of writing in the header, so that equal texts are equal files
        (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(lines, 6, mtime=0))
        size = sum(map(len, texts[split]))
        digest = hashlib.sha256(lines).hexdigest()[:12]
        print(f"{split}: {len(names)} files, {size:,} characters, sha256 {digest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts["train"][::SAMPLED], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = (folder / "tokenizer.json").read_bytes()
    print(f"tokenizer: {tokenizer.get_vocab_size()} ids, sha256 {hashlib.sha256(content).hexdigest()[:12]}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or ["titans-runs/far_text"]))
