"""The plain loop: its loss, its rate, its determinism, and what it does when the loss is no number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from titans_core import LanguageModel, ModelConfig
from titans_platform.config import OptimConfig
from titans_platform.errors import TitansError, UsageError
from titans_platform.training import checkpoint
from titans_platform.training.loop import Diverged, Hooks, Trainer, deterministic
from titans_platform.training.optim import adamw, learning_rate

VOCAB, LENGTH = 11, 8


class Batch(NamedTuple):
    tokens: Tensor
    starts: Tensor
    loss: Tensor


class Rows:
    """Rows drawn from the step; every third row has nothing to predict but its last token."""

    def __init__(self, rows: int = 6):
        self.rows = rows

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(VOCAB, (self.rows, LENGTH + 1), generator=generator)
        starts = torch.zeros(self.rows, LENGTH + 1, dtype=torch.bool)
        loss = torch.ones(self.rows, LENGTH, dtype=torch.bool)
        loss[::3, :-1] = False
        return Batch(tokens, starts, loss)


class Tied(nn.Module):
    """A language model of two matrices, one of them used twice, with a vector and a bias beside them."""

    def __init__(self, width: int = 12):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        return [{"params": list(self.parameters()), "weight_decay": weight_decay}]

    def forward(self, tokens_BT: Tensor, document_starts: Tensor | None = None) -> SimpleNamespace:
        x = self.norm(self.embedding(tokens_BT))
        return SimpleNamespace(logits=self.head(x + torch.tanh(self.mix(x).cumsum(1))))


def trainer(seed: int = 0, model: nn.Module | None = None, rows: int = 6, **optim) -> Trainer:
    torch.manual_seed(seed)
    cfg = OptimConfig(**({"steps": 12, "global_batch_size": rows, "lr": 1e-2} | optim))
    return Trainer(model or Tied(), cfg, Rows(rows))


def weights(of: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in of.model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_loss_weighs_rows_not_positions():
    t = trainer()
    batch = t.stream.batch(0)
    with torch.no_grad():
        logits = t.model(batch.tokens[:, :-1]).logits
        each = -logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
    rows = [each[b][batch.loss[b]].mean() for b in range(6)]
    assert t.step()["loss"] == pytest.approx(torch.stack(rows).mean().item(), rel=1e-5)


def test_rows_without_loss_positions_count_for_nothing():
    class Half(Rows):
        def batch(self, step: int) -> Batch:
            batch = super().batch(step)
            batch.loss[3:] = False
            return batch

    t, full = trainer(), trainer()
    t.stream = Half()
    head = Rows().batch(0)
    full.stream = SimpleNamespace(batch=lambda step: Batch(*(part[:3] for part in head)))
    assert t.step()["loss"] == pytest.approx(full.step()["loss"], rel=1e-6)


def test_micro_batches_change_nothing():
    whole, parts = trainer(), trainer(micro_batch_size=4)
    for _ in range(3):
        assert whole.step()["loss"] == pytest.approx(parts.step()["loss"], rel=1e-5)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_rate_warms_up_and_ends_at_its_floor():
    cfg = OptimConfig(steps=100, lr=1.0, warmup_fraction=0.1, min_lr_ratio=0.2)
    rates = [learning_rate(step, cfg) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_decay_pulls_on_linear_layers_alone():
    model = LanguageModel(ModelConfig(vocab_size=VOCAB, d_model=16, n_layers=1))
    optimizer = adamw(model, OptimConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: decay[id(p)] for name, p in model.named_parameters()}
    pulled = {name for name, value in named.items() if value == 0.3}
    assert set(named.values()) == {0.0, 0.3}
    assert "blocks.0.memory.w_k.weight" in pulled
    assert not [
        n for n in pulled if model.get_parameter(n).ndim != 2 or "persistent" in n or "embedding" in n
    ]


def test_clip_bounds_the_first_moment():
    t = trainer(grad_clip=1e-3, beta1=0.5)
    metrics = t.step()
    moments = [t.optimizer.state[p]["exp_avg"] for p in t.model.parameters()]
    assert metrics["grad_norm"] > 1e-2
    assert nn.utils.get_total_norm(moments).item() == pytest.approx(0.5e-3, rel=1e-3)


def test_divergence_names_step_loss_and_remedy():
    class Blown(Tied):
        def forward(self, tokens_BT, document_starts=None):
            out = super().forward(tokens_BT)
            out.logits = out.logits * (torch.inf if self.calls == 2 else 1.0)
            self.calls += 1
            return out

    model = Blown()
    model.calls = 0
    t = trainer(model=model)
    with pytest.raises(Diverged, match=r"step 3: loss nan.*surprise_bound.*max_theta"):
        t.run(Hooks())
    assert t.progress.step == 2
    assert all(p.isfinite().all() for p in model.parameters())


def test_bf16_learns_with_weights_in_float32():
    t = trainer(precision="bf16")
    first = t.step()["loss"]
    t.stream = SimpleNamespace(batch=lambda step: Rows().batch(0))
    while t.progress.step < 12:
        last = t.step()["loss"]
    assert last < first
    assert {p.dtype for p in t.model.parameters()} == {torch.float32}


def test_hooks_see_every_step_and_the_last_checkpoint():
    t = trainer(steps=5)
    seen: list[int] = []
    saved: list[int] = []
    hooks = Hooks(
        lambda step, m: seen.append(step), lambda: saved.append(t.progress.step), checkpoint_every=2
    )
    t.run(hooks)
    assert seen == [1, 2, 3, 4, 5]
    assert saved == [2, 4, 5]


def test_deterministic_restores_what_was_set():
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with deterministic(7, threads=1):
        first = torch.rand(3)
        assert torch.are_deterministic_algorithms_enabled()
    with deterministic(7, threads=1):
        assert torch.equal(first, torch.rand(3))
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def interrupted(folder, upto: int, seed: int = 5) -> Trainer:
    t = trainer(seed)
    while t.progress.step < upto:
        t.step()
        if t.progress.step % 3 == 0:
            checkpoint.save(folder, t)
    return t


def test_a_restored_run_goes_on_to_the_same_weights(tmp_path):
    straight = trainer(5)
    straight.run(Hooks())
    interrupted(tmp_path, 7)
    resumed = trainer(6)
    path = checkpoint.restore(tmp_path, resumed)
    assert path is not None
    assert path.name == "step-00000006"
    resumed.run(Hooks())
    assert same(weights(straight), weights(resumed))
    assert resumed.progress.final_loss == straight.progress.final_loss


def test_restore_brings_every_rng_back(tmp_path):
    import random

    import numpy as np

    t = interrupted(tmp_path, 3)
    drawn = torch.rand(2).tolist(), random.random(), np.random.rand()
    checkpoint.restore(tmp_path, t)
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == drawn


def test_only_the_last_two_are_kept(tmp_path):
    interrupted(tmp_path, 9)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000006", "step-00000009"]


def test_nothing_to_restore(tmp_path):
    assert checkpoint.restore(tmp_path / "none", trainer()) is None


@pytest.mark.parametrize("fault", ["truncate", "delete", "manifest", "no manifest"])
def test_a_broken_checkpoint_is_passed_over_with_one_line(tmp_path, caplog, fault):
    interrupted(tmp_path, 6)
    latest = tmp_path / "step-00000006"
    shard = max(latest.glob("*.distcp"), key=lambda p: p.stat().st_size)
    if fault == "truncate":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif fault == "delete":
        shard.unlink()
    elif fault == "manifest":
        (latest / "manifest.json").write_text('{"schema": 1, "fi')
    else:
        (latest / "manifest.json").unlink()
    t = trainer(5)
    assert checkpoint.restore(tmp_path, t) == tmp_path / "step-00000003"
    assert t.progress.step == 3
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "step-00000006 is not whole" in line


def damage(point) -> None:
    """Change bytes all over the shard, its length kept."""
    shard = next(point.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[::64] = bytes(255 - value for value in content[::64])
    shard.write_bytes(content)


def test_damage_that_keeps_the_length_is_passed_over_too(tmp_path, caplog):
    interrupted(tmp_path, 6)
    damage(tmp_path / "step-00000006")
    straight, resumed = trainer(5), trainer(6)
    assert checkpoint.restore(tmp_path, resumed) == tmp_path / "step-00000003"
    assert "step-00000006 is not whole (damaged)" in caplog.text
    straight.run(Hooks())
    resumed.run(Hooks())
    assert same(weights(straight), weights(resumed))


def test_with_every_checkpoint_damaged_the_run_is_refused(tmp_path):
    interrupted(tmp_path, 3)
    damage(tmp_path / "step-00000003")
    with pytest.raises(UsageError, match=r"step-00000003: damaged: .*delete this folder"):
        checkpoint.restore(tmp_path, trainer(5))


def test_a_disk_that_is_full_is_one_line(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
    with pytest.raises(TitansError, match=r"step-00000003: cannot be written: .*No space left"):
        interrupted(tmp_path, 3)
    assert checkpoint.newest(tmp_path) is None


def test_a_save_cut_short_leaves_the_one_before(tmp_path, monkeypatch):
    t = interrupted(tmp_path, 3)
    t.step()
    monkeypatch.setattr(checkpoint, "_commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, t)
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000003"


def test_another_shape_is_refused_by_name(tmp_path):
    interrupted(tmp_path, 3)
    wider = trainer(model=Tied(width=16))
    before = weights(wider)
    with pytest.raises(UsageError, match=r"embedding\.weight is \(11, 12\) in the checkpoint and \(11, 16\)"):
        checkpoint.restore(tmp_path, wider)
    assert same(before, weights(wider))


def test_another_architecture_is_refused_by_name(tmp_path):
    interrupted(tmp_path, 3)
    model = Tied()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"extra\.weight is missing in the checkpoint and \(2, 2\)"):
        checkpoint.load_model(tmp_path / "step-00000003", model)


def test_load_model_takes_the_weights_alone(tmp_path):
    t = interrupted(tmp_path, 3)
    fresh = Tied()
    assert checkpoint.load_model(tmp_path / "step-00000003", fresh) == 3
    assert same(weights(t), fresh.state_dict())
