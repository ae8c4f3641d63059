"""Graphs of a block as a GPU would train it, on fake tensors: saved activations, gradients of packing."""

from math import prod

import pytest
import torch
from torch import Tensor

from titans_core import footprint, presets

ROWS, LENGTH, GIB = 16, 4096, 2**30
# bytes a token and block of 340M, with selective recomputation; GiB of the whole model beside
BUDGETS = {"lmm": 30_000, "mac": 60_000, "mag": 45_000, "mal": 45_000, "transformer": 30_000}


@pytest.mark.slow
@pytest.mark.parametrize("variant", sorted(BUDGETS))
def test_a_block_saves_no_more_than_its_budget(variant):
    config = presets.preset("340M", variant=variant)
    each = footprint.saved_bytes_per_token(config, ROWS, LENGTH, "selective")
    assert each <= BUDGETS[variant], f"{variant}: {each:,.0f} bytes a token and block"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lmm", "mag"])
def test_gradients_of_packed_documents_accumulate_no_tokens_by_index(variant):
    config = presets.preset("340M", variant=variant)
    graphs = footprint.trace(config, ROWS, LENGTH, documents=100)
    tokens = [node for node in graphs.backward.graph.nodes if "index_put" in str(node.target)
              for value in node.args[2:3] if prod(value.meta["val"].shape) >= ROWS * LENGTH]  # fmt: skip
    assert tokens == []


def shapes(graphs: footprint.Graphs) -> set[tuple[int, ...]]:
    """Shapes of all tensors of the graphs."""
    nodes = [*graphs.forward.graph.nodes, *graphs.backward.graph.nodes]
    values = (node.meta.get("val") for node in nodes)
    return {tuple(x.shape) for x in values if isinstance(x, Tensor) and x.dtype != torch.int64}
