"""Training the memories of an adapted model (`titans_core.adapt`): `transfer`, then `tune`.

`titans_core.adapt.training` has the losses. Checkpoints have the trained part alone.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from titans_core.config import Frozen
from titans_platform.config import RunConfig
from titans_platform.data import Batch, PreparedData
from titans_platform.errors import UsageError, one_line
from titans_platform.evals.perplexity import validation_batches
from titans_platform.evals.scoring import measure_distributed
from titans_platform.loading import load_config
from titans_platform.objectives.base import build_objective, build_small
from titans_platform.objectives.next_token import NextToken
from titans_platform.tasks import Context, Measurement, Task
from titans_platform.training.checkpoint import load_model


class AdaptOptions(Frozen):
    """The adapted model whose memories are trained."""

    model: str = Field(exclude=True)
    """Folder that `titans adapt` wrote, with config and weights."""
    weights: str
    """Hash of the frozen weights, in the place of the folder in the run's name."""
    lora: Annotated[int, Field(ge=0)] = 0
    """Rank of changes of the attention's projections (LoRA, by peft), which tune trains too; 0: none."""
    kept: Annotated[int, Field(ge=0)] = 0
    """Tokens that layers keep whole while the memories are trained."""
    only_gates: bool = False
    """Of the memories train the gates alone: keys, queries and values stay the attention's own."""


class Adapting(NextToken):
    """A stage of training the memories; a loss counts tokens beyond window and sinks alone."""

    Options = AdaptOptions
    stage: ClassVar[str]
    carries = equal_blocks = False
    validation_task = None

    def adapted_config(self) -> Any:
        """Read the config of the adapted model. Raises UsageError: there is none."""
        import transformers

        from titans_core.adapt import options_of

        try:
            config = transformers.AutoConfig.from_pretrained(self.options.model, local_files_only=True)
            options_of(config)
            config.titans["kept"] = self.options.kept
            options_of(config)
        except (OSError, ValueError) as error:
            raise UsageError(f"objective.options.model: {self.options.model}: {one_line(error)}") from None
        return config

    def build_model(self) -> Any:
        """Load the adapted model as `Memories`, with new ones; on the meta device without its weights."""
        from transformers import AutoModelForCausalLM

        from titans_core.adapt import Memories

        config, folder, layers = self.adapted_config(), self.options.model, self.cfg.model.n_layers
        changes = {"lora": self.options.lora, "only_gates": self.options.only_gates}
        trained = partial(Memories, recompute=bool(self.cfg.optim.recompute), **changes)
        if torch.get_default_device().type == "meta":
            config.num_hidden_layers = layers
            return trained(AutoModelForCausalLM.from_config(config))
        if layers != config.num_hidden_layers:
            raise UsageError(f"model.n_layers: {layers}, but {folder} has {config.num_hidden_layers}")
        adapted: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, local_files_only=True)
        if (actual := adapted.source_hash()) != (expected := self.options.weights):
            raise UsageError(f"objective.options.weights: {expected}, but the model in {folder} has {actual}")
        adapted.renew_memories()
        return trained(adapted)

    def sample_batch(self, rows: int) -> Batch:
        """Random tokens that the model has; its tokenizer may have special ones beside."""
        batch = super().sample_batch(rows)
        return batch._replace(tokens=batch.tokens % self.adapted_config().vocab_size)

    def least_activations(self, rows: int) -> int:
        """Count also the frozen weights, in values of four bytes."""
        model: Any = build_small(self, self.cfg.model.n_layers)
        return super().least_activations(rows) + sum(p.nbytes for p in model.adapted.parameters()) // 4

    def losses(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """[B] loss of each row."""
        return model(batch.tokens, self.stage)

    def check(self, data: PreparedData | None = None) -> None:
        """Check also that the model has the document's start, and that tokens leave the window."""
        from titans_core.adapt import options_of

        super().check(data)
        config, length = self.adapted_config(), self.cfg.data.sequence_length
        options = options_of(config)
        if length <= (near := options.window + options.sinks):
            cause = f"{length} tokens do not reach beyond window and sinks, {near}"
            raise UsageError(f"data.sequence_length: {cause}; raise it")
        if self.tokenizer().bos >= config.vocab_size:
            raise UsageError(f"data.tokenizer: its BOS id is not below vocab_size {config.vocab_size}")
        if self.cfg.data.packing != "plain":
            raise UsageError("data.packing: an adapted model reads rows without borders; set it to plain")


def load_adapted(folder: Path) -> tuple[Any, Any, RunConfig]:
    """Load a model that `titans adapt` wrote, its tokenizer, and the config of its last run."""
    from transformers import AutoModelForCausalLM

    objective: Any = build_objective(load_config(folder / "tune.yaml", ()))
    objective.adapted_config()
    return AutoModelForCausalLM.from_pretrained(folder).eval(), objective.tokenizer(), objective.cfg


def export(objective: Any, point: Path, folder: Path) -> None:
    """Write the weights of a checkpoint into the adapted model's folder; the frozen ones are not loaded."""
    from titans_core.adapt import replace_weights

    model: Any = build_small(objective, objective.cfg.model.n_layers)
    for part in model.children():
        part.to_empty(device="cpu")
    load_model(point, model)
    replace_weights(Path(objective.options.model), folder, *model.weights())


class Transfer(Adapting):
    """The part of the window's squared error to full attention that memories leave; mean of the layers."""

    stage = "transfer"
    loss_unit = "of the window's squared error"


class Tune(Adapting):
    """The Kullback-Leibler divergence from the full-attention teacher, nats a token."""

    stage = "tune"


class ContextShare(Task):
    """The part of the far context's worth that the memory brings back: (window - memory) / (window - full).

    Losses are means over the held-out tokens beyond window and sinks, and the buckets have them in nats.
    """

    name = "context_share"

    def check(self, objective: Any, length: int, data: Any) -> None:
        """Reject an objective whose model has no window."""
        if not isinstance(objective, Adapting):
            raise UsageError("task: context_share measures adapted models alone; leave it out")

    def measure(self, context: Context) -> Measurement:
        """Share on `config.perplexity_tokens` tokens; the standard error is over rows (ratio estimator)."""
        model, device = context.scorer.model, context.scorer.device

        def rows(batch: Any) -> list[list[float]]:
            tokens = batch.tokens[:, : context.length + 1].to(device)
            means = [model(tokens, far).double().mean(1) for far in ("full", "window", "memory")]
            return torch.stack(means, 1).tolist()

        losses = [row for part in measure_distributed(validation_batches(context), rows) for row in part]
        full, window, memory = (sum(column) / len(losses) for column in zip(*losses, strict=True))
        share = (window - memory) / (window - full)
        errors = [(w - m - share * (w - f)) ** 2 for f, w, m in losses]
        stderr = math.sqrt(sum(errors)) / len(losses) / abs(window - full)
        means = {"full": full, "window": window, "memory": memory}
        return Measurement(share, stderr, 0.0, len(losses), means)
