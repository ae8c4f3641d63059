"""Training the memories of an adapted model (`titans_core.adapt`): `transfer`, then `tune`.

transfer: each layer's memory learns the teacher's attention output from the teacher's own hidden states, in
one forward pass. tune: the memories learn, through the whole model, to give the teacher's distribution of the
next token. The teacher is the same model with full attention. Checkpoints have the memories alone.

Shapes: B rows, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from titans_core import Model
from titans_core.config import Frozen
from titans_platform.data import Batch, PreparedData
from titans_platform.errors import UsageError, one_line
from titans_platform.evals.perplexity import validation_batches
from titans_platform.evals.scoring import measure_distributed
from titans_platform.objectives.base import build_small
from titans_platform.objectives.next_token import NextToken
from titans_platform.tasks import Context, Measurement, Task
from titans_platform.training.checkpoint import load_model

HEAD_TOKENS = 256
"""Tokens whose logits are in memory at once."""


class AdaptOptions(Frozen):
    """The adapted model whose memories are trained."""

    model: str = Field(exclude=True)
    """Folder that `titans adapt` wrote, with config and weights."""
    weights: str
    """Hash of the frozen weights, in the place of the folder in the run's name."""


class Memories(Model):
    """The trained part of an adapted model; ``adapted`` is the whole, which is no part of the state dict."""

    adapted: Any

    def __init__(self, adapted: Any, recompute: bool = False):
        super().__init__()
        self.memories = nn.ModuleDict(adapted.requires_grad_(False).memories()).requires_grad_(True)
        self.__dict__["adapted"] = adapted
        for module in adapted.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if recompute:
            older = adapted.gradient_checkpointing_enable  # its name before transformers 5.20
            getattr(adapted, "activation_checkpointing_enable", older)({"use_reentrant": False})

    def _apply(self, fn: Any, recurse: bool = True) -> Memories:
        """Move or convert the whole model."""
        self.adapted._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Memories:
        """Set the mode of the whole model."""
        self.adapted.train(mode)
        return super().train(mode)

    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` tokens, on a border of chunks."""
        return self.adapted.state_bytes(length)

    def forward(self, tokens_BT: Tensor, stage: str) -> Tensor:
        """Return [B] losses of transfer or tune; [B, T'] losses beyond the window of full, window and memory.

        Args:
            tokens_BT: [B, T + 1], inputs and targets.
            stage: transfer, tune, or what stands for the far tokens (`titans_core.adapt.attention.Far`).
        """
        from titans_core.adapt.attention import Pass

        own, options = self.adapted, self.adapted.options
        x_BTD, beyond = own.get_input_embeddings()(tokens_BT[:, :-1]), options.window + options.sinks
        if stage == "transfer":
            with torch.no_grad():
                own.encode(x_BTD, call := Pass(far="transfer"))
            return torch.stack(call.errors).mean(0)
        features = lambda far: own.encode(x_BTD, Pass(far=far))[:, beyond:].split(HEAD_TOKENS, 1)  # noqa: E731
        if stage == "tune":
            with torch.no_grad():
                taught = features("full")
            # logits again in the backward pass: all of them would be the largest tensor
            parts = zip(features("memory"), taught, strict=True)
            return torch.cat(
                [cast(Tensor, checkpoint(self._divergence, *part, use_reentrant=False)) for part in parts], 1
            ).mean(1)
        targets = tokens_BT[:, 1 + beyond :].split(HEAD_TOKENS, 1)
        logits = (own.lm_head(part).mT.float() for part in features(stage))
        return torch.cat(
            [F.cross_entropy(*pair, reduction="none") for pair in zip(logits, targets, strict=True)], 1
        )

    def _divergence(self, student_BTD: Tensor, teacher_BTD: Tensor) -> Tensor:
        """[B, T] nats from the teacher's distribution to the student's."""
        student, teacher = (
            self.adapted.lm_head(x).float().log_softmax(-1) for x in (student_BTD, teacher_BTD)
        )
        return F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)


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

        folder = self.options.model
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            options_of(config)
        except (OSError, ValueError) as error:
            raise UsageError(f"objective.options.model: {folder}: {one_line(error)}") from None
        return config

    def build_model(self) -> Any:
        """Load the adapted model as `Memories`, with new ones; on the meta device without its weights."""
        from transformers import AutoModelForCausalLM

        config, folder, layers = self.adapted_config(), self.options.model, self.cfg.model.n_layers
        if torch.get_default_device().type == "meta":
            config.num_hidden_layers = layers
            return Memories(AutoModelForCausalLM.from_config(config))
        if layers != config.num_hidden_layers:
            raise UsageError(f"model.n_layers: {layers}, but {folder} has {config.num_hidden_layers}")
        adapted: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        if (own := adapted.source_hash()) != (given := self.options.weights):
            raise UsageError(f"objective.options.weights: {given}, but the model in {folder} has {own}")
        adapted.renew_memories()
        return Memories(adapted, bool(self.cfg.optim.recompute))

    def sample_batch(self, rows: int) -> Batch:
        """Random tokens that the model has; its tokenizer may have special ones beside."""
        batch = super().sample_batch(rows)
        return batch._replace(tokens=batch.tokens % self.adapted_config().vocab_size)

    def least_activations(self, rows: int) -> int:
        """Count also the frozen weights, in values of four bytes."""
        frozen = cast(Memories, build_small(self, self.cfg.model.n_layers)).adapted.parameters()
        return super().least_activations(rows) + sum(p.nbytes for p in frozen) // 4

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
            cause = f"{length} tokens do not leave window and sinks, {near}"
            raise UsageError(f"data.sequence_length: {cause}; raise it")
        if self.tokenizer().bos >= config.vocab_size:
            raise UsageError(f"data.tokenizer: no start of a document among {config.vocab_size} tokens")
        if self.cfg.data.packing != "plain":
            raise UsageError("data.packing: an adapted model reads rows without borders; set it to plain")


def trained_weights(objective: Any, point: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint under their names in the adapted model, which is not loaded."""
    model: Any = build_small(objective, objective.cfg.model.n_layers)
    model.memories.to_empty(device="cpu")
    load_model(point, model)
    return {name: x for name, x in model.adapted.state_dict().items() if x.device.type == "cpu"}


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

    @property
    def chance(self) -> float:
        """Zero: the window alone."""
        return 0.0

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
