"""Divergence (NaN or inf): the run stops, and keeps the batch."""

import math

import pytest
import torch
from safetensors import safe_open

from tests.training.small import trainer
from titans_platform.training.loop import Hooks
from titans_platform.training.optim import Diverged, save_batch


def test_batch_at_fault_is_kept_and_named(tmp_path):
    t = trainer(3, steps=20)

    def infinite(model, given, out) -> None:
        out.losses = out.losses * (torch.inf if t.progress.step == 6 else 1)

    t.model.register_forward_hook(infinite)
    keep = lambda batch, error: save_batch(tmp_path, batch, t.progress.step + 1, 0, error)  # noqa: E731
    with pytest.raises(Diverged, match=r"step 7: loss nan.*surprise_bound.*max_theta.*07-rank0") as raised:
        t.run(Hooks(on_divergence=keep))
    assert t.progress.step == 6
    path = tmp_path / "step-00000007-rank0.safetensors"
    assert str(path) in str(raised.value)
    with safe_open(path, "pt") as kept:
        assert kept.metadata()["step"] == "7"
        assert math.isnan(float(kept.metadata()["loss"]))
        assert torch.equal(kept.get_tensor("tokens"), t.stream.batch(6).tokens)
