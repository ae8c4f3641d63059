"""Graphs of a block as a GPU would train it, on fake tensors: activations, masks, gradients of packing."""

from functools import cache
from math import prod

import pytest
import torch
from torch import Tensor

from titans_core import footprint, presets

ROWS, LENGTH = 16, 4096
# bytes that a block of 340M saves for each token with selective recomputation
BUDGETS = {"lmm": 28_000, "mac": 60_000, "mag": 36_000, "mal": 36_000, "transformer": 30_000}
PACKED = sorted(BUDGETS)

pytestmark = pytest.mark.slow


@cache
def packed(variant: str, **options: str) -> footprint.Graphs:
    config = presets.preset("340M", variant=variant, options=options)
    return footprint.trace(config, ROWS, LENGTH, "selective", documents=100)


def tensors(graphs: footprint.Graphs) -> list[Tensor]:
    nodes = [*graphs.forward.graph.nodes, *graphs.backward.graph.nodes]
    return [x for node in nodes if isinstance(x := node.meta.get("val"), Tensor)]


@pytest.mark.parametrize("variant", sorted(BUDGETS))
def test_a_block_saves_no_more_than_its_budget(variant):
    config = presets.preset("340M", variant=variant)
    each = footprint.saved_bytes_per_token(config, ROWS, LENGTH, "selective")
    assert each <= BUDGETS[variant], f"{variant}: {each:,.0f} bytes a token and block"
    assert each >= 0.9 * BUDGETS[variant], "lower the budget"


@pytest.mark.parametrize("variant", PACKED)
def test_packed_documents_accumulate_no_gradients_of_tokens_by_index(variant):
    values = [node.args[2].meta["val"] for node in packed(variant).backward.graph.nodes
              if "index_put" in str(node.target)]  # fmt: skip
    assert [x.shape for x in values if prod(x.shape) >= ROWS * LENGTH] == []


@pytest.mark.parametrize("variant", PACKED)
def test_attention_takes_half_precision_and_no_mask(variant):
    graphs = packed(variant, **({"projections": "titans"} if variant == "transformer" else {}))
    assert [x.shape for x in tensors(graphs) if x.dtype == torch.bool and min(x.shape[-2:]) >= 1024] == []
    calls = [node for node in graphs.forward.graph.nodes if "varlen_attn" in str(node.target)]
    assert bool(calls) == (variant != "lmm")
    assert {x.meta["val"].dtype for node in calls for x in node.args[:3]} <= {torch.bfloat16}
