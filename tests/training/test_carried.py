"""State carried across steps (truncated BPTT): values, gradients, restore; and windows drawn by the step."""

import random
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.core.small import VARIANTS, config
from titans_core import LanguageModel
from titans_core.interventions import Intervention, intervene
from titans_platform.config import OptimConfig
from titans_platform.data.stream import StreamBatch
from titans_platform.errors import UsageError
from titans_platform.training import checkpoint
from titans_platform.training.checkpoint import Saver
from titans_platform.training.loop import CrossEntropy, Trainer
from titans_platform.training.optim import check_windows, drawn_window

ROWS, LENGTH = 3, 32
# attention without a window keeps all keys, and cannot be carried
CARRIED = [v for v in VARIANTS if v not in ("transformer", "based")] + ["transformer"]


class Streams:
    """Random text of three streams; the second is reset at every fourth step."""

    def batch(self, step: int) -> StreamBatch:
        text = torch.randint(40, (ROWS, 40 * LENGTH + 1), generator=torch.Generator().manual_seed(1))
        reset = torch.tensor([step == 0, step % 4 == 0, step == 0])
        tokens = text[:, step * LENGTH : (step + 1) * LENGTH + 1]
        return StreamBatch(tokens, torch.ones(ROWS, LENGTH, dtype=torch.bool), reset)


def trainer(variant: str = "lmm", seed: int = 0, *, draws: int = 3, window: int = 12, **optim) -> Trainer:
    """A trainer with initial weights of one seed and draws of another."""
    torch.manual_seed(seed)
    cfg = OptimConfig(**({"steps": 12, "global_batch_size": ROWS, "lr": 1e-2} | optim))
    model = LanguageModel(config(variant, window=window))
    return Trainer(model, cfg, Streams(), sequence_length=LENGTH, seed=draws)


@pytest.mark.parametrize("variant", CARRIED)
def test_streams_are_read_as_one_sequence_each(variant):
    """With frozen weights the losses equal the losses of whole sequences."""
    t = trainer(variant, lr=1e-30, weight_decay=0.0, warmup_fraction=0.0)
    t.model.double()
    collected = [t.step()["loss"] for _ in range(6)]
    text = torch.cat([Streams().batch(step).tokens[:, :-1] for step in range(7)], 1)[:, : 6 * LENGTH + 1]
    with torch.no_grad():

        def losses(row: int, start: int, end: int) -> Tensor:
            part = text[row : row + 1, start * LENGTH : end * LENGTH + 1]
            return t.model(part[:, :-1], targets_BT=part[:, 1:]).losses[0]

        rows = [losses(0, 0, 6), torch.cat([losses(1, 0, 4), losses(1, 4, 6)]), losses(2, 0, 6)]
    expected = torch.stack(rows).unflatten(1, (6, LENGTH)).mean((0, 2))
    assert collected == pytest.approx(expected.tolist(), rel=1e-9)


def test_groups_of_streams_take_turns():
    class Turns(Streams):
        def batch(self, step: int) -> StreamBatch:
            return super().batch(step // 2) if step % 2 == 0 else super().batch(10 + step // 2)

    frozen = {"lr": 1e-30, "weight_decay": 0.0, "warmup_fraction": 0.0}
    both, alone = trainer(stream_groups=2, **frozen), trainer(**frozen)
    both.stream = Turns()
    actual = [both.step()["loss"] for _ in range(8)]
    assert (actual[::2], len(set(actual))) == ([alone.step()["loss"] for _ in range(4)], 8)


def test_row_that_is_reset_trains_the_initial_memory():
    t = trainer()
    t.step()
    grads = []
    for reset in (False, True):
        batch = Streams().batch(1)._replace(reset=torch.full((ROWS,), reset))
        t.optimizer.zero_grad()
        t._backward(batch, False)
        grads.append(sum(W.grad.norm().item() for W in t.model.blocks[0].memory.initial_weights))
    assert grads[0] == 0
    assert grads[1] > 1e-4


@pytest.mark.parametrize(("variant", "recipe"), [
    ("lmm", {}), ("mac", {"stream_groups": 3}), ("mag", {"windows": (8, 16), "window": 16}),
    ("samba", {"stream_groups": 2}),
])  # fmt: skip
def test_restart_anywhere_ends_in_the_same_weights(variant, recipe, tmp_path):
    """Bitwise equal after restarts at random steps; a lost or swapped state would be detected."""
    new = partial(trainer, variant, **recipe)
    straight, draw = new(), random.Random(variant)
    while straight.progress.step < 12:
        straight.step()
    first, at = new(), 1
    first.step()
    with Saver(tmp_path, first) as saver:
        saver.save()
    while at < 12:
        t = new(seed=at + 2)
        checkpoint.restore(tmp_path, t)
        assert t.progress.step == at
        at = min(12, at + draw.randint(1, 4))
        while t.progress.step < at:
            t.step()
        with Saver(tmp_path, t) as saver:
            saver.save()
        t.step()  # steps after the checkpoint are lost
    restored = new(seed=99)
    checkpoint.restore(tmp_path, restored)
    for a, b in zip(straight.model.parameters(), restored.model.parameters(), strict=True):
        assert torch.equal(a, b)
    leaves = [torch.utils._pytree.tree_leaves(t.states) for t in (straight, restored)]
    assert len(straight.states) == recipe.get("stream_groups", 1)
    assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True) if isinstance(a, Tensor))


def test_step_that_diverged_leaves_the_state_as_it_was():
    t = trainer()
    t.step()
    before, bad = t.states[0], Streams().batch(1)
    with torch.no_grad():
        t.model.embedding.weight[int(bad.tokens[0, 3])] = torch.nan
    with pytest.raises(Exception, match="step 2"):
        t.step(bad)
    assert t.states[0] is before


# recipes for hybrids: the window of each step


def test_windows_are_drawn_from_seed_and_step():
    cfg = OptimConfig(steps=1000, windows=(4, 8, 16))
    drawn = [drawn_window(cfg, 0, step) for step in range(1000)]
    assert drawn == [drawn_window(cfg, 0, step) for step in range(1000)]
    assert drawn != [drawn_window(cfg, 1, step) for step in range(1000)]
    assert set(drawn[900:]) == {16}
    assert all(abs(count - 300) < 50 for count in Counter(drawn[:900]).values())
    assert drawn_window(OptimConfig(), 0, 5) is None


def test_step_is_trained_with_its_window():
    seed, window = next(s for s in range(20) if drawn_window(OptimConfig(windows=(8, 16)), s, 0) == 8), 8
    t = trainer("mag", draws=seed, window=16, windows=(8, 16))
    batch = t.stream.batch(0)
    with torch.no_grad(), intervene(t.model, Intervention(window=window)):
        expected = CrossEntropy().carried_losses(t.model, batch, None)[0].mean().item()
    assert t.step()["loss"] == pytest.approx(expected, rel=1e-6)
    assert t.model.blocks[0].attention.window == 16, "outside of a step the model has its own window"


@pytest.mark.parametrize(("variant", "recipe", "near"), [
    *((variant, {}, 1e-4) for variant in ("lmm", "mac", "mag", "mal", "mamba2")),
    *((variant, {"windows": (8, 16), "window": 16, "lr": 1e-3}, 1e-3) for variant in ("mac", "mag", "mal")),
])  # fmt: skip
def test_micro_batches_change_nothing(variant, recipe, near):
    whole, parts = trainer(variant, **recipe), trainer(variant, micro_batch_size=2, **recipe)
    for _ in range(6):
        a, b = whole.step(), parts.step()
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=near)


@pytest.mark.parametrize(("variant", "windows", "why"), [
    ("mag", (8, 12), r"optim\.windows: the longest is 12, but the model is evaluated with"),
    ("mag", (8, 32), r"optim\.windows: window: 32 is longer than the model's own, 16"),
    ("mac", (12, 16), r"optim\.windows: window: 12 is not a multiple of memory"),
    ("lmm", (8,), r"optim\.windows: the model has no attention window"),
])  # fmt: skip
def test_windows_that_do_not_fit_the_model_are_refused(variant, windows, why):
    with pytest.raises(UsageError, match=why):
        check_windows(LanguageModel(config(variant, window=16)), OptimConfig(windows=windows))
