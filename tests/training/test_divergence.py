"""Divergence (NaN or inf): the run stops, and keeps the batch."""

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.training.small import Batch, Rows, Tied, trainer
from titans_platform.training.checkpoint import Saver
from titans_platform.training.loop import Hooks, Trainer
from titans_platform.training.optim import Diverged, save_batch

EVERY = 4


class Poisoned(Rows):
    """A stream in which some batches make the loss non-finite; records which batches are read."""

    def __init__(self, *places: int):
        super().__init__()
        self.places, self.read = places, []

    def batch(self, step: int) -> Batch:
        batch = super().batch(step)
        if step in self.places:
            # `Sick` returns an infinite loss for this batch
            batch.tokens[0, 0] = 0
            batch.starts[0, 0] = True
        return batch


class Sick(Tied):
    """A model whose loss is infinite on batches with document starts."""

    def forward(self, tokens_BT, document_starts=None, targets_BT=None):
        out = super().forward(tokens_BT, targets_BT=targets_BT)
        if document_starts is not None and document_starts.any():
            out.losses = out.losses * torch.inf
        return out


def sick(*places: int, **optim) -> Trainer:
    torch.manual_seed(3)
    t = trainer(3, Sick(), **({"steps": 20} | optim))
    t.stream = Poisoned(*places)
    return t


def hooks(saver: Saver, folder: Path, **more) -> Hooks:
    """The hooks that a run passes to its loop."""
    t = saver.trainer
    keep = lambda batch, error: save_batch(folder, batch, t.progress.step + 1, 0, error)  # noqa: E731
    options = {"on_checkpoint": saver.save, "checkpoint_every": EVERY, "on_divergence": keep}
    return Hooks(**options, **more)


def train(t: Trainer, folder: Path, until: int | None = None, **more) -> Trainer:
    with Saver(folder / "checkpoints", t) as saver:
        t.run(hooks(saver, folder / "diverged", **more), until)
    return t


def test_batch_at_fault_is_kept_and_named(tmp_path):
    t = sick(6)
    with pytest.raises(Diverged, match=r"step 7: loss nan.*surprise_bound.*max_theta.*07-rank0") as raised:
        train(t, tmp_path)
    assert t.progress.step == 6
    path = tmp_path / "diverged" / "step-00000007-rank0.safetensors"
    assert str(path) in str(raised.value)
    with safe_open(path, "pt") as kept:
        assert kept.metadata()["step"] == "7"
        assert math.isnan(float(kept.metadata()["loss"]))
        assert torch.equal(kept.get_tensor("tokens"), t.stream.batch(6).tokens)
