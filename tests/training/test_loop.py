"""The training loop: loss, learning rate, batches, and non-finite losses."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.training.small import LENGTH, VOCAB, Rows, trainer
from titans_core import LanguageModel, ModelConfig
from titans_platform.config import OptimConfig
from titans_platform.data import Batch
from titans_platform.training.loop import Hooks, batches_ahead, deterministic
from titans_platform.training.optim import Diverged, adamw, learning_rate, save_batch


def test_loss_weighs_rows_not_positions():
    t = trainer()
    batch = t.stream.batch(0)
    with torch.no_grad():
        logits = t.model(batch.tokens[:, :-1]).logits
        each = -logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
    rows = [each[b][batch.loss[b]].mean() for b in range(6)]
    assert t.step()["loss"] == pytest.approx(torch.stack(rows).mean().item(), rel=1e-5)


def test_micro_batches_and_rows_without_targets_change_nothing():
    whole, parts = trainer(), trainer(micro_batch_size=4)
    for _ in range(3):
        assert whole.step()["loss"] == pytest.approx(parts.step()["loss"], rel=1e-5)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    t, full, half = trainer(), trainer(), Rows().batch(0)
    half.loss[3:] = False
    t.stream = SimpleNamespace(batch=lambda step: half)
    full.stream = SimpleNamespace(batch=lambda step: Batch(*(part[:3] for part in half)))
    assert t.step()["loss"] == pytest.approx(full.step()["loss"], rel=1e-6)


@pytest.mark.parametrize(("schedule", "halfway", "last"), [
    ("cosine", 0.6, 0.2), ("linear", 0.6, 0.2), ("constant", 1.0, 1.0), ("wsd", 1.0, 0.2),
])  # fmt: skip
def test_rate_warms_up_and_follows_its_schedule(schedule, halfway, last):
    cfg = OptimConfig(steps=101, lr=1.0, warmup_fraction=0.1, min_lr_ratio=0.2, schedule=schedule)
    rates = [learning_rate(step, cfg) for step in range(101)]
    assert [rates[0], rates[9], rates[10], rates[100]] == pytest.approx([0.1, 1.0, 1.0, last])
    assert rates[55] == pytest.approx(halfway, abs=0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    cfg = OptimConfig(steps=40, lr=1.0, warmup_steps=0, min_lr_ratio=0.0, schedule="halving")
    assert [learning_rate(step, cfg) for step in range(40)][2::4] == [0.5**epoch for epoch in range(10)]


def test_decay_pulls_on_linear_layers_alone():
    model = LanguageModel(ModelConfig(vocab_size=VOCAB, d_model=16, n_layers=1))
    optimizer = adamw(model, OptimConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: decay[id(p)] for name, p in model.named_parameters()}
    pulled = {name for name, value in named.items() if value == 0.3}
    assert set(named.values()) == {0.0, 0.3}
    assert "blocks.0.memory.w_k.weight" in pulled
    assert all(model.get_parameter(name).ndim == 2 for name in pulled)
    assert not [name for name in pulled if "persistent" in name or "embedding" in name]


def test_clip_bounds_the_first_moment_and_bf16_keeps_float32_weights():
    t = trainer(grad_clip=1e-3, beta1=0.5)
    metrics, moments = t.step(), [t.optimizer.state[p]["exp_avg"] for p in t.model.parameters()]
    assert metrics["grad_norm"] > 1e-2
    assert nn.utils.get_total_norm(moments).item() == pytest.approx(0.5e-3, rel=1e-3)
    t = trainer(precision="bf16")
    first = t.step()["loss"]
    t.stream = SimpleNamespace(batch=lambda step: Rows().batch(0))
    while t.progress.step < 12:
        last = t.step()["loss"]
    assert last < first
    assert {p.dtype for p in t.model.parameters()} == {torch.float32}


def test_hooks_see_every_step_and_the_last_checkpoint():
    t, seen, saved = trainer(steps=5), [], []
    assert t.tokens_per_step == 6 * LENGTH
    save = lambda: saved.append(t.progress.step)  # noqa: E731
    t.run(Hooks(lambda step, m: seen.append(step), save, checkpoint_every=2))
    assert (seen, saved) == ([1, 2, 3, 4, 5], [2, 4, 5])


def test_deterministic_restores_what_was_set():
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with deterministic(7, threads=1):
        first = torch.rand(3)
        assert torch.are_deterministic_algorithms_enabled()
    with deterministic(7, threads=1):
        assert torch.equal(first, torch.rand(3))
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def data_wait(step_seconds: float) -> float:
    """Seconds that six steps of at least ``step_seconds`` each wait for batches of 0.05 s."""
    t, waited, main_thread = trainer(), [], threading.get_ident()

    def slow(step: int) -> Batch:
        assert threading.get_ident() != main_thread
        time.sleep(0.05)
        return Rows().batch(step)

    t.stream = SimpleNamespace(batch=slow)

    def pause(step: int, metrics: dict[str, float]) -> None:
        time.sleep(step_seconds)
        waited.append(metrics["data_wait_seconds"])

    t.run(Hooks(pause), until=6)
    return sum(waited)


def test_wait_for_a_slow_stream_is_measured_and_hidden_behind_steps():
    waited = data_wait(0.0)
    # the steps are too short to overlap
    assert waited > 0.2
    # only the first is waited for; the others are prefetched during the steps
    assert data_wait(0.1) < 0.6 * waited


def test_batches_come_in_the_order_of_the_steps_and_draw_no_random_numbers():
    before = torch.get_rng_state()
    stream = SimpleNamespace(batch=lambda step: Batch(*(torch.full((1,), step) for _ in range(3))))
    for first, last in ((0, 7), (5, 7), (6, 7), (7, 7)):
        batches = batches_ahead(stream, range(first, last), torch.device("cpu"))
        assert [batch.tokens.item() for batch in batches] == list(range(first, last))
    assert torch.equal(torch.get_rng_state(), before)


def test_error_of_the_stream_reaches_its_step_and_ends_the_thread():
    def broken(step: int) -> Batch:
        if step == 3:
            raise OSError(5, "Input/output error", "shard-00001.arrow")
        return Rows().batch(step)

    t = trainer()
    t.stream = SimpleNamespace(batch=broken)
    before = threading.active_count()
    with pytest.raises(OSError, match=r"Input/output error: 'shard-00001\.arrow'"):
        t.run(Hooks())
    assert (t.progress.step, threading.active_count()) == (3, before)


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
        assert "loss nan" in kept.metadata()["error"]
        assert torch.equal(kept.get_tensor("tokens"), t.stream.batch(6).tokens)
