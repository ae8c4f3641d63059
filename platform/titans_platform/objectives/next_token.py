"""Next-token prediction: text and generated items as rows of tokens (`data`), measured by `evals`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from titans_core import LanguageModel
from titans_core.model import LOGITS_AT_ONCE
from titans_platform.data import Batch, PreparedData, Tokenizer, load_tokenizer, open_prepared, prepare
from titans_platform.data.sources import FilesSource
from titans_platform.errors import UsageError, within
from titans_platform.evals import GeneratedTask, Task, build_generated, build_task, row_length
from titans_platform.evals.perplexity import Perplexity
from titans_platform.objectives.base import Input, Objective, Report, register
from titans_platform.training.loop import CrossEntropy


@register("next_token")
class NextToken(CrossEntropy, Objective[PreparedData]):
    """Cross-entropy of each row's next tokens, in nats."""

    validation_task = "loss"

    def prepare(self, root: Path, report: Report | None = None) -> PreparedData:
        """Tokenise the sources of ``data`` that are not tokenised yet."""
        return prepare(self.cfg.data, root, progress=report)

    def open(self, root: Path) -> PreparedData:
        """The tokenised sources."""
        return open_prepared(self.cfg.data, root)

    def build_model(self) -> LanguageModel:
        """A language model."""
        try:
            return LanguageModel(self.cfg.model)
        except ValueError as error:
            raise UsageError(f"model.{error}") from None

    def least_activations(self, rows: int) -> int:
        """Also the logits that are held at once."""
        logits = rows * self.cfg.data.sequence_length * self.cfg.model.vocab_size
        return super().least_activations(rows) + min(logits, LOGITS_AT_ONCE)

    def tokenizer(self) -> Tokenizer:
        """The one of ``data``."""
        return load_tokenizer(self.cfg.data.tokenizer)

    def inputs(self, data: PreparedData) -> list[Input]:
        """Its sources, each by the hash of its tokens."""
        listed = zip(data.labels, data.sources, self.cfg.data.sources, strict=True)
        return [
            Input(
                label,
                rows.manifest.content,
                source.path or source.dataset or label,
                {"train tokens": rows.train.info.tokens, "validation tokens": rows.validation.info.tokens},
                rows.weight > 0,
            )
            for label, rows, source in listed
        ]

    def sample_batch(self, rows: int) -> Batch:
        """Random tokens, each row one document."""
        length = self.cfg.data.sequence_length
        starts = torch.zeros(rows, length + 1, dtype=torch.bool)
        starts[:, 0] = True
        tokens = torch.randint(self.cfg.model.vocab_size, (rows, length + 1))
        return Batch(tokens, starts, torch.ones(rows, length, dtype=torch.bool))

    def check_sources(self) -> None:
        """The tokenizer's file, and files of text."""
        self.tokenizer()
        for i, source in enumerate(self.cfg.data.sources):
            if source.kind == "files":
                FilesSource(source, f"data.sources.{i}", Path()).files()

    def check(self, data: PreparedData | None = None) -> None:
        """Also that the vocabulary holds the data's tokens, and that the tasks which make rows exist."""
        size = self.cfg.model.vocab_size
        if data is not None and size < (needed := data.tokenizer.vocab_size):
            raise UsageError(
                f"model.vocab_size: {size} is less than the {needed} of tokenizer "
                f"{self.cfg.data.tokenizer}; set it to {needed}"
            )
        super().check(data)
        for i, source in enumerate(self.cfg.data.sources):
            for j, task in enumerate(source.tasks):
                with within(f"data.sources.{i}.tasks.{j}"):
                    build_generated(task)
        measured = [build_task(task) for tasks in self.cfg.eval.columns.values() for task in tasks]
        held_out = self.cfg.eval.every or any(isinstance(task, Perplexity) for task in measured)
        if data is not None and held_out:
            # an iterator nobody reads, or a UsageError where there are no validation rows
            data.validation(1)

    def check_task(self, task: Task, lengths: Sequence[float], data: PreparedData | None) -> None:
        """Also, with data, that an item of each length fits in it."""
        super().check_task(task, lengths, data)
        if data is not None and isinstance(task, GeneratedTask):
            for multiple in lengths:
                length = row_length(multiple, self.cfg.data.sequence_length)
                task.item(random.Random(0), length, data.tokenizer)
