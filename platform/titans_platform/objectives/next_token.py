"""Next-token prediction on text and generated task items (`data`), evaluated by `evals`."""

from __future__ import annotations

from pathlib import Path

import torch

from titans_core import LanguageModel
from titans_core.interventions import Intervention, intervene
from titans_core.model import LOGITS_PER_BLOCK
from titans_platform.config import VOCABULARIES
from titans_platform.data import (
    Batch,
    NotPrepared,
    PreparedData,
    Tokenizer,
    load_tokenizer,
    open_prepared,
    prepare,
)
from titans_platform.data.sources import FilesSource
from titans_platform.data.stream import check_weights
from titans_platform.data.tokenizer import names_hub
from titans_platform.errors import UsageError, within
from titans_platform.evals.perplexity import Perplexity
from titans_platform.objectives.base import Objective, PrepareProgress, build_small, check_vocabulary
from titans_platform.tasks import build_generated, build_task
from titans_platform.training.loop import CrossEntropy


class NextToken(CrossEntropy, Objective[PreparedData]):
    """Cross-entropy of each row's next tokens, in nats."""

    validation_task = "loss"
    carries = True

    def prepare(self, root: Path, report: PrepareProgress | None = None) -> PreparedData:
        """Tokenise the sources of ``data`` that have not been tokenised."""
        check_vocabulary(self.cfg, self.tokenizer())
        return prepare(self.cfg.data, root, progress=report)

    def open(self, root: Path) -> PreparedData:
        """Open the tokenised sources."""
        return open_prepared(self.cfg.data, root)

    def reopen(self, root: Path, fingerprint: str) -> PreparedData:
        """Open the tokenised sources by their content, also if the text was prepared anew since."""
        try:
            return open_prepared(self.cfg.data, root, fingerprint=fingerprint)
        except NotPrepared:
            return super().reopen(root, fingerprint)

    def build_model(self) -> LanguageModel:
        """Build a language model."""
        with within("model", ValueError):
            return LanguageModel(self.cfg.model)

    def head_activations(self, rows: int) -> int:
        """Return the number of logits that are in memory at once."""
        return min(rows * self.cfg.row_tokens * self.cfg.model.vocab_size, LOGITS_PER_BLOCK)

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that ``data`` names."""
        return load_tokenizer(self.cfg.data.tokenizer)

    def sample_batch(self, rows: int) -> Batch:
        """Random tokens; each row is one document."""
        length = self.cfg.row_tokens
        starts = torch.zeros(rows, length + 1, dtype=torch.bool)
        starts[:, 0] = True
        tokens = torch.randint(self.cfg.model.vocab_size, (rows, length + 1))
        return Batch(tokens, starts, torch.ones(rows, length, dtype=torch.bool))

    def check_sources(self) -> None:
        """Check that files of tokenizer and text exist and that no source is shorter than one row."""
        if not names_hub(self.cfg.data.tokenizer):  # a plan needs no network
            self.tokenizer()
        length = self.cfg.data.sequence_length
        for i, source in enumerate(self.cfg.data.sources):
            most = source.max_tokens
            if source.kind == "files":
                size = FilesSource(source, f"data.sources.{i}", Path()).text_bytes()
                most = min((limit for limit in (most, size) if limit is not None), default=None)
            if most is not None and most <= length and source.weight:
                more = f"{length:,} is more than the at most {most:,} tokens of data.sources.{i}"
                raise UsageError(f"data.sequence_length: {more}; lower it or give the source more text")

    def check(self, data: PreparedData | None = None) -> None:
        """Check also that the vocabulary covers the data, and that task sources name existing tasks."""
        if data is not None:
            check_vocabulary(self.cfg, data.tokenizer)
        elif self.cfg.data.tokenizer in VOCABULARIES:
            # a built-in tokenizer is known without data
            check_vocabulary(self.cfg, self.tokenizer())
        super().check(data)
        if self.cfg.data.rows == "streams":
            self._check_carried()
        check_weights(self.cfg.data.sources)
        for i, source in enumerate(self.cfg.data.sources):
            for j, task in enumerate(source.tasks):
                with within(f"data.sources.{i}.tasks.{j}"):
                    build_generated(task)
        measured = [build_task(task) for tasks in self.cfg.eval.columns.values() for task in tasks]
        held_out = self.cfg.eval.every or any(isinstance(task, Perplexity) for task in measured)
        if data is not None and held_out:
            # raises UsageError if there are no validation rows; the iterator is unused
            data.validation(1)

    def _check_carried(self) -> None:
        """Reject a model whose state cannot be carried across rows. Raises UsageError."""
        model, length = build_small(self), self.cfg.row_tokens
        tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
        cause = f"data.sequence_length: streams are reset between rows of {length} tokens"
        for window in self.cfg.optim.windows or (None,):
            with within(cause, ValueError, ", and "), intervene(model, Intervention(window=window)):
                model(tokens, model(tokens).state, reset_B=torch.ones(1, dtype=torch.bool, device="meta"))
        if model.state_bytes(length << 20) != model.state_bytes(length << 21):
            raise UsageError(
                f"data.rows: the state of variant {self.cfg.model.variant} grows with every token of a "
                "stream, since its attention keeps all keys; set model.attention.window"
            )
