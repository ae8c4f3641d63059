"""Small models shared by the tests in this folder, and the options they are parametrized over."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from titans_core import BLOCKS, AttentionConfig, LanguageModel, MemoryConfig, ModelConfig
from titans_core.layers import Gating

VARIANTS = sorted(BLOCKS)
MEMORY_VARIANTS = ["lmm", "mac", "mag", "mal"]
BASELINE_OPTIONS: dict[str, dict] = {
    "based": {"heads": 2, "feature": 4, "window": 12}, "gated_deltanet_h2": {"head_dim": 8, "state": 6},
    "gla": {"heads": 2}, "hgrn2": {"heads": 2}, "hyena": {"length": 50, "filter_width": 8},
    "mamba": {"state": 4}, "mamba2": {"head_dim": 8, "state": 6}, "retnet": {"heads": 2},
    "samba": {"state": 4},
}  # fmt: skip
RULES = "tests.kernels.test_rules"
SWITCHES: dict[str, dict] = {
    "default": {}, "linear": {"depth": 1}, "deep": {"depth": 4}, "online": {"chunk_size": 1},
    "no_conv": {"conv": False}, "no_momentum": {"momentum": False}, "no_decay": {"decay": False},
    "unbounded": {"surprise_bound": None, "max_theta": 0.05}, "gates_per_chunk": {"gates_per": "chunk"},
    "plain_output": {"output": ()}, "wide_gelu": {"expansion": 2, "activation": "gelu"},
    "gated_delta": {"rule": "gated_delta"}, "robust": {"rule": f"{RULES}:Robust(delta=0.3)"},
    "gated": {"rule": f"{RULES}:Normalised", "gates_per": "chunk"},
    "gated_per_channel": {"rule": f"{RULES}:Normalised", "channel_gates": "alpha", "write_budget": 1.0},
    "residual": {"residual": "input"}, "inner_norm": {"residual": "norm", "expansion": 2},
    "decay_per_channel": {"channel_gates": "alpha", "expansion": 2},
    "later_version": {"residual": "norm", "channel_gates": "alpha", "gates_per": "chunk"},
    "write_budget": {"write_budget": 1.0, "max_theta": 1.0},
    "budget_per_chunk": {"write_budget": 1.5, "gates_per": "chunk", "channel_gates": "all"},
    "forget_to_initial": {"forget_to": "initial"}, "linear_to_initial": {"forget_to": "initial", "depth": 1},
    "smallest": {"window": 1, "persistent": 0, "heads": 1, "conv": 1, "chunk_size": 16},
}  # fmt: skip


def config(
    variant: str = "lmm", persistent: int = 3, window: int | None = 12, options: dict | None = None,
    attention: dict | None = None, segment: int = 16, pointwise: bool = False, **memory,
) -> ModelConfig:  # fmt: skip
    # MAC attends within whole segments
    spans = {"window": None if variant == "mac" else window, "segment_size": segment}
    return ModelConfig(
        variant=variant, options=BASELINE_OPTIONS.get(variant, {}) if options is None else options,
        vocab_size=40, d_model=16, n_layers=2, persistent_tokens=persistent, mlp_expansion=1.0,
        pointwise_conv=pointwise,
        memory=MemoryConfig(**{"heads": 2, "chunk_size": 8, **memory, **BLOCKS[variant].preset_memory}),
        attention=AttentionConfig(heads=2, **spans, **(attention or {})),
    )  # fmt: skip


def model(*args, **kwargs) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(config(*args, **kwargs)).double()


def perturbed(*args, **kwargs) -> LanguageModel:
    """A model whose norms, biases and scales differ from their initial values."""
    m = model(*args, **kwargs)
    with torch.no_grad():
        for p in m.parameters():
            p += 0.1 * torch.randn_like(p)
    return m


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


CASES = [(v, "default") for v in VARIANTS]
CASES += [("lmm", s) for s in SWITCHES if s != "default"]
# what MAC's segments meet; the other switches are within the memory
BY_SEGMENT = "online no_conv gates_per_chunk gated later_version budget_per_chunk forget_to_initial smallest"
CASES += [
    pytest.param("mac", s, marks=() if s in BY_SEGMENT.split() else pytest.mark.nightly)
    for s in SWITCHES if s != "default"
]  # fmt: skip
SWITCHES["full_window"] = {"window": None}
CASES += [(v, s) for v in ("mag", "mal", "transformer") for s in ("smallest", "full_window")]
SWITCHES |= {gating: {"options": {"gating": gating}} for gating in get_args(Gating)}
SWITCHES["plain_attention"] = {"attention": {"silu": False, "conv": False, "qk_norm": False}}
SWITCHES["section_4_4"] = {"attention": {"output": ["norm", "gate"]}, "pointwise": True}
CASES += [(v, "section_4_4") for v in MEMORY_VARIANTS]
SWITCHES["titans_projections"] = {"options": {"projections": "titans"}}
CASES += [(v, s) for v in ("mac", "mag") for s in (*get_args(Gating), "plain_attention")]
SWITCHES["short_conv"] = {"options": {"heads": 2, "conv_kernel": 4}}
CASES += [(v, "short_conv") for v in ("gla", "hgrn2", "retnet")]
CASES += [("mal", "plain_attention"), ("transformer", "titans_projections")]


def storages(state) -> int:
    """Bytes that a state keeps alive: a view counts as the whole storage behind it."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(state) if isinstance(t, Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in [t.untyped_storage() for t in tensors]}.values())
