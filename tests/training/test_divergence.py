"""Divergence (NaN, inf or a loss spike): the run stops, or skips the batch."""

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.training.small import Batch, Rows, Tied, trainer
from tests.training.test_checkpoint import same, weights
from titans_platform.training import checkpoint
from titans_platform.training.checkpoint import Saver
from titans_platform.training.loop import Hooks, Trainer
from titans_platform.training.optim import SKIPS, Diverged, judge, save_batch

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


def test_spike_is_measured_by_the_median_of_what_was():
    usual = [2.0] * 20
    assert judge(5.9, 1.0, usual, 3.0) is None
    assert "loss 6.1 after a median of 2" in (judge(6.1, 1.0, usual, 3.0) or "")
    assert judge(6.1, 1.0, usual, None) is None
    assert judge(6.1, 1.0, usual[:10], 3.0) is None
    assert "loss nan, gradient norm 1" in (judge(math.nan, 1.0, [], None) or "")
    assert judge(2.0, math.inf, [], None)


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


def test_skip_gives_the_place_of_a_bad_batch_to_the_next(tmp_path):
    t = train(sick(6, 11, on_divergence="skip"), tmp_path)
    assert (t.progress.step, t.progress.offset) == (20, 2)
    healthy = [place for place in range(23) if place not in (6, 11)]

    class Healthy(Rows):
        def batch(self, step: int) -> Batch:
            return super().batch(healthy[step])

    straight = sick()
    straight.stream = Healthy()
    straight.run(Hooks())
    assert same(weights(t), weights(straight))


def test_when_every_batch_is_at_fault_the_run_stops(tmp_path):
    t = sick(*range(5, 100), on_divergence="skip")
    with pytest.raises(Diverged, match=f"{SKIPS} batches in a row were left out; step 6: loss nan"):
        train(t, tmp_path)
    assert t.progress.step == 5


@pytest.mark.parametrize("killed", [6, 10, 11, 18])
def test_killed_and_resumed_it_skips_the_same(tmp_path, killed):
    def new():
        return sick(10, 17, on_divergence="skip", spike=1.5)

    def kill(step: int, metrics: dict[str, float]) -> None:
        if step == killed:
            raise InterruptedError

    straight, folder = train(new(), tmp_path / "straight"), tmp_path / "killed"
    assert straight.progress.offset
    with pytest.raises(InterruptedError):
        train(new(), folder, on_step=kill)
    # stopped at a step where no checkpoint was due
    resumed, again = new(), new()
    checkpoint.restore(folder / "checkpoints", resumed)
    train(resumed, folder, until=min(20, resumed.progress.step + 3))
    checkpoint.restore(folder / "checkpoints", again)
    train(again, folder)
    assert same(weights(straight), weights(again))
    assert again.progress.offset == straight.progress.offset
    assert again.progress.recent == straight.progress.recent
