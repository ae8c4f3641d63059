"""Graphs of a block as a GPU would train it, on fake tensors: activations, masks, gradients of packing."""

from math import prod

import pytest
import torch
from torch import Tensor

from titans_core import footprint, presets

ROWS, LENGTH, DOCUMENTS, WIDTH = 16, 4096, 100, 1024
# bytes that a block of 340M saves for each token with selective recomputation
BUDGETS = {"lmm": 30_000, "mac": 50_000, "mag": 38_000, "mal": 38_000, "transformer": 27_000}

QUIET = "ignore:(The .grad attribute of a Tensor|.*Function'> should not be)"  # Dynamo does so itself
pytestmark = pytest.mark.filterwarnings(QUIET)

# MAL has the parts of MAG
MAL, *NIGHTLY = (
    pytest.param(name, marks=pytest.mark.nightly)
    for name in ("mal", "gla", "hgrn2", "mamba2", "deltanet", "gated_deltanet", "based", "hyena")
)


def tensors(graphs: footprint.Graphs) -> list[Tensor]:
    return [x for node in graphs.nodes if isinstance(x := node.meta.get("val"), Tensor)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lmm", "mag", MAL, "transformer"])
def test_a_packed_block_keeps_its_budget_accumulates_no_tokens_and_needs_no_mask(variant):
    options = {"projections": "titans"} if variant == "transformer" else {}
    config = presets.preset("340M", variant=variant, options=options)
    graphs = footprint.trace(config, ROWS, LENGTH, "selective", documents=DOCUMENTS)
    each = graphs.saved_bytes / (ROWS * LENGTH)
    assert each <= BUDGETS[variant], f"{each:,.0f} bytes a token and block"
    named = lambda name: [node for node in graphs.nodes if name in str(node.target)]  # noqa: E731
    puts = named("index_put") + named("scatter_add")
    large = [x for node in puts if prod(x := node.args[2].meta["val"].shape) >= ROWS * LENGTH]
    # but for a few values of each document
    assert [x for x in large if prod(x[:-1]) > 5 * DOCUMENTS or x[-1] != WIDTH] == []
    masks = [x.shape for x in tensors(graphs) if x.dtype == torch.bool and x.ndim > 1]
    assert [shape for shape in masks if min(shape[-2:]) >= 1024] == []
    calls = named("varlen_attn.")
    assert bool(calls) == (variant != "lmm")
    assert {x.meta["val"].dtype for node in calls for x in node.args[:3]} <= {torch.bfloat16}


@pytest.mark.slow
def test_graphs_of_mac_do_not_grow_with_the_number_of_segments():
    few, many = (footprint.trace(presets.preset("340M", variant="mac"), 1, 1024 * n) for n in (2, 4))
    assert len(many.nodes) == pytest.approx(len(few.nodes), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mamba", "retnet", *NIGHTLY])
def test_a_layer_of_a_baseline_has_no_tensor_above_a_gibibyte(variant):
    graphs = footprint.trace(presets.preset("340M", variant=variant), ROWS, LENGTH)
    assert max(footprint.size_of(x) for x in tensors(graphs)) <= 2**30
