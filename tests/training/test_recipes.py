"""Recipes for hybrids: the window of each step, and resuming in the middle."""

from collections import Counter

import pytest
import torch

from tests.core.small import config
from tests.training.test_carried import ROWS, Streams
from titans_core import LanguageModel
from titans_core.interventions import Intervention, intervene
from titans_platform.config import OptimConfig
from titans_platform.errors import UsageError
from titans_platform.training import checkpoint
from titans_platform.training.checkpoint import Saver
from titans_platform.training.loop import CrossEntropy, Trainer
from titans_platform.training.optim import check_windows, drawn_window

LENGTH = 32


def trainer(variant: str = "mag", seed: int = 3, **optim) -> Trainer:
    torch.manual_seed(0)
    cfg = OptimConfig(**({"steps": 10, "global_batch_size": ROWS, "lr": 1e-2} | optim))
    model = LanguageModel(config(variant, window=16))
    return Trainer(model, cfg, Streams(), sequence_length=LENGTH, seed=seed)


def test_windows_are_drawn_from_seed_and_step():
    cfg = OptimConfig(steps=1000, windows=(4, 8, 16))
    drawn = [drawn_window(cfg, 0, step) for step in range(1000)]
    assert drawn == [drawn_window(cfg, 0, step) for step in range(1000)]
    assert drawn != [drawn_window(cfg, 1, step) for step in range(1000)]
    assert set(drawn[900:]) == {16}
    assert all(abs(count - 300) < 50 for count in Counter(drawn[:900]).values())
    assert drawn_window(OptimConfig(), 0, 5) is None


def test_step_is_trained_with_its_window():
    cfg = OptimConfig(windows=(8, 16))
    seed, window = next(s for s in range(20) if drawn_window(cfg, s, 0) == 8), 8
    t = trainer(seed=seed, windows=(8, 16))
    batch = t.stream.batch(0)
    with torch.no_grad(), intervene(t.model, Intervention(window=window)):
        expected = CrossEntropy().carried_losses(t.model, batch, None)[0].mean().item()
    assert t.step()["loss"] == pytest.approx(expected, rel=1e-6)
    assert t.model.blocks[0].attention.window == 16, "outside of a step the model has its own window"


@pytest.mark.parametrize("variant", ["mac", "mag", "mal"])
def test_micro_batches_and_a_restart_change_nothing(variant, tmp_path):
    recipe = {"windows": (8, 16), "lr": 1e-3}
    whole, parts = trainer(variant, **recipe), trainer(variant, micro_batch_size=2, **recipe)
    for _ in range(6):
        a, b = whole.step(), parts.step()
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    with Saver(tmp_path, whole, keep=1) as saver:
        saver.save()
    resumed = trainer(variant, **recipe)
    checkpoint.restore(tmp_path, resumed)
    assert resumed.progress.step == 6
    for _ in range(4):
        assert whole.step()["loss"] == resumed.step()["loss"]


@pytest.mark.parametrize(("variant", "windows", "why"), [
    ("mag", (8, 12), r"optim\.windows: the longest is 12, but the model is evaluated with"),
    ("mag", (8, 32), r"optim\.windows: window: 32 is longer than the model's own, 16"),
    ("mac", (12, 16), r"optim\.windows: window: 12 is not a multiple of memory"),
    ("lmm", (8,), r"optim\.windows: the model has no attention window"),
])  # fmt: skip
def test_windows_that_do_not_fit_the_model_are_refused(variant, windows, why):
    with pytest.raises(UsageError, match=why):
        check_windows(LanguageModel(config(variant, window=16)), OptimConfig(windows=windows))
