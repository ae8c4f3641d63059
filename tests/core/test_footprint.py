"""Graphs of a block as a GPU would train it, on fake tensors: activations, masks, gradients of packing."""

from collections.abc import Iterable
from math import prod

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from titans_core import Documents, footprint, presets
from titans_core.blocks import Positions, resolve
from titans_kernels.memory.options import as_on_gpu

ROWS, LENGTH, DOCUMENTS, WIDTH = 16, 4096, 100, 1024
# bytes that a block of 340M saves for each token with selective recomputation
BUDGETS = {"lmm": 30_000, "mac": 50_000, "mag": 38_000, "mal": 38_000, "transformer": 27_000}
# operators of its two passes, and bytes that they write for each token, before Inductor fuses them
OPERATORS = {"lmm": 1950, "mac": 7700, "mag": 3350, "mal": 2800, "transformer": 1000}
WRITTEN = {"lmm": 2.15e6, "mac": 5.3e6, "mag": 3.7e6, "mal": 3.4e6, "transformer": 1.9e6}

QUIET = "ignore:(The .grad attribute of a Tensor|.*Function'> should not be)"  # Dynamo does so itself
pytestmark = pytest.mark.filterwarnings(QUIET)

# MAL has the parts of MAG; a trace of MAC's graphs takes a minute
OTHERS = "gla hgrn2 mamba2 deltanet gated_deltanet gated_deltanet_h2 based hyena samba ttt_linear ttt_mlp"
MAL, MAC, *NIGHTLY = (
    pytest.param(name, marks=pytest.mark.nightly) for name in ("mal", "mac", *OTHERS.split())
)


def by_token(added: Iterable[torch.Size]) -> list[torch.Size]:
    """Values that a pass adds by index, if they are more than a few of each document."""
    large = [x for x in added if prod(x) >= ROWS * LENGTH]
    return [x for x in large if prod(x[:-1]) > 5 * DOCUMENTS or x[-1] != WIDTH]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lmm", "mag", MAL, MAC, "transformer"])
def test_a_packed_block_keeps_its_budget_accumulates_no_tokens_and_needs_no_mask(variant):
    options = {"projections": "titans"} if variant == "transformer" else {}
    config = presets.preset("340M", variant=variant, options=options)
    graphs = footprint.trace(config, ROWS, LENGTH, "selective", documents=DOCUMENTS)
    calls = [node for node in graphs.nodes if node.op == "call_function"]
    results = [x for node in calls if isinstance(x := node.meta.get("val"), Tensor)]
    written = sum(footprint.size_of(x) for x in results)
    assert graphs.saved_bytes / (ROWS * LENGTH) <= BUDGETS[variant]
    assert len(calls) <= OPERATORS[variant]
    assert written / (ROWS * LENGTH) <= WRITTEN[variant]
    named = lambda name: [node for node in calls if name in str(node.target)]  # noqa: E731
    puts = named("index_put") + named("scatter_add")
    assert by_token(node.args[2].meta["val"].shape for node in puts) == []
    masks = [x.shape for x in results if x.dtype == torch.bool and x.ndim > 1]
    assert [shape for shape in masks if min(shape[-2:]) >= 1024] == []
    attends = named("varlen_attn.")
    assert bool(attends) == (variant != "lmm")
    assert {x.meta["val"].dtype for node in attends for x in node.args[:3]} <= {torch.bfloat16}


def test_backward_of_packed_mac_accumulates_no_tokens(monkeypatch):
    """Operator by operator, without values."""
    added = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, call, types, args=(), kwargs=None):
            if any(name in str(call) for name in ("index_add", "index_put", "scatter_add")):
                added.append([x.shape for x in args if isinstance(x, Tensor)][-1])
            return call(*args, **(kwargs or {}))

    monkeypatch.setattr(torch, "compile", lambda call: call)
    config, tokens = presets.preset("340M", variant="mac"), ROWS * LENGTH
    starts = torch.arange(tokens) % (tokens // DOCUMENTS) == 0
    with torch.device("meta"):
        block = resolve(config)(config)
    block.compile()
    documents = block.layout(Documents.from_starts(starts.view(ROWS, LENGTH)))
    documents = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, documents)
    with as_on_gpu(), Recorded(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        x = torch.empty(ROWS, LENGTH, WIDTH, requires_grad=True)
        block(x, None, Positions(torch.arange(LENGTH)[None], documents))[0].sum().backward()
    assert len(added) > 10
    assert by_token(added) == []


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mamba", "retnet", *NIGHTLY])
def test_a_layer_of_a_baseline_has_no_tensor_above_a_gibibyte(variant):
    graphs = footprint.trace(presets.preset("340M", variant=variant), ROWS, LENGTH)
    tensors = [x for node in graphs.nodes if isinstance(x := node.meta.get("val"), Tensor)]
    assert max(map(footprint.size_of, tensors)) <= 2**30
