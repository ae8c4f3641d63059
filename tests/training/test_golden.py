"""Golden losses: twenty steps of every variant, to detect any change in the arithmetic."""

import pytest
import torch

from titans_core import AttentionConfig, LanguageModel, MemoryConfig, ModelConfig
from titans_platform.config import OptimConfig
from titans_platform.data import Batch
from titans_platform.training.loop import Trainer, deterministic

VOCAB, ROWS, LENGTH = 61, 4, 45
AT = (1, 5, 10, 20)
"""Steps whose loss (nats) is pinned. Rounding changes it by 2e-7, relative."""
LOSSES = {
    "lmm": [4.7466927, 4.7524271, 4.8255916, 4.800601], "mac": [4.9488773, 4.9564047, 4.811717, 4.7684045],
    "mag": [4.9651279, 4.9392643, 4.787077, 4.7717447], "mal": [4.9467525, 4.8348145, 4.6979718, 4.8083158],
    "mamba2": [4.799058, 4.9092407, 4.6730442, 4.719059],
    "transformer": [4.7028437, 4.7384624, 4.7608671, 4.7125931],
}  # fmt: skip


class Stream:
    """Rows whose tokens predict the second next one; every second batch packs two documents into its rows."""

    def batch(self, step: int) -> Batch:
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        tokens[:, 2::2] = (3 * tokens[:, :-2:2] + 1) % VOCAB
        starts = torch.zeros(ROWS, LENGTH + 1, dtype=torch.bool)
        starts[:, 0], starts[:, 19] = True, step % 2 == 1
        return Batch(tokens, starts, torch.ones(ROWS, LENGTH, dtype=torch.bool))


@pytest.mark.parametrize("variant", sorted(LOSSES))
def test_losses_of_twenty_steps_keep_their_values(variant):
    config = ModelConfig(
        variant=variant, vocab_size=VOCAB, d_model=16, n_layers=2, memory=MemoryConfig(heads=2, chunk_size=8),
        attention=AttentionConfig(heads=2, window=16, segment_size=16),
    )  # fmt: skip
    with deterministic(seed=0, threads=1):
        optim = OptimConfig(steps=20, lr=1e-3)
        trainer = Trainer(LanguageModel(config), optim, Stream(), sequence_length=LENGTH)
        trained = [trainer.step()["loss"] for _ in range(20)]
    assert [trained[step - 1] for step in AT] == pytest.approx(LOSSES[variant], rel=1e-5)
