"""Activations that a block saves for its backward pass, measured on fake tensors: no GPU, no data.

torch.compile traces one block as a GPU would train it: float32 parameters, autocast, the kernels of the
memory as operators. Inductor's partitioner (min-cut) divides forward and backward; what the backward takes
from the forward, parameters aside, is saved.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from titans_core.blocks import Positions, resolve
from titans_core.blocks.base import Recompute
from titans_core.config import ModelConfig
from titans_core.documents import Documents
from titans_kernels.memory.options import as_on_gpu

Precision = Literal["fp32", "bf16"]


H100 = 80 * 2**30
"""Bytes of an H100's memory."""


class Graphs(NamedTuple):
    """The forward and backward pass of a block as graphs of ATen operators, and what passes between them."""

    forward: GraphModule
    backward: GraphModule
    saved: list[Node]
    """Nodes of the forward whose values are saved, parameters aside."""

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for the backward pass, each storage counted once."""
        return sum(size_of(node.meta.get("val")) for node in self.saved)


def saved_bytes_per_token(
    config: ModelConfig,
    rows: int = 16,
    length: int = 4096,
    recompute: Recompute = False,
    precision: Precision = "bf16",
    gpu_bytes: int = H100,
) -> float:
    """Return the bytes of activations that one block saves for each token of a micro-batch.

    A model saves ``config.n_layers`` times as much for its blocks. Kernels keep more of small calls, so the
    number depends on the micro-batch. Takes seconds; the result is cached.

    Args:
        config: of the model.
        rows: rows of the micro-batch.
        length: tokens of a row.
        recompute: as `Block.recompute`.
        precision: of autocast, as in training.
        gpu_bytes: memory of the GPU, which decides what kernels keep.

    Raises:
        ValueError: the config's variant is unknown, or refuses the config.
    """
    options = rows, length, recompute, precision, gpu_bytes
    return _saved_bytes(config.model_dump_json(), *options) / (rows * length)


@cache
def _saved_bytes(config: str, *options: Any) -> int:
    return int(trace(ModelConfig.model_validate_json(config), *options).saved_bytes)  # a size may be symbolic


def trace(
    config: ModelConfig,
    rows: int,
    length: int,
    recompute: Recompute = False,
    precision: Precision = "bf16",
    gpu_bytes: int = H100,
    documents: int = 0,
) -> Graphs:
    """Trace one block on ``rows`` rows of ``length`` tokens, with as many packed documents if any.

    Raises:
        RuntimeError: the block's graph is broken.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    from titans_kernels.memory.forms.triton import op

    traced: list[Graphs] = []

    def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        parts = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, compiler="inductor", **options
        )
        (end,) = (node for node in parts[0].graph.nodes if node.op == "output")
        inputs_saved = [node for node in end.args[0][num_fwd_outputs:] if isinstance(node, Node)]
        traced.append(Graphs(*parts, [n for n in inputs_saved if n.op != "placeholder" or _is_input(n)]))
        return parts

    def _is_input(node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.shape[:2] == (rows, length)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=lambda graph, inputs: graph.forward,
        partition_fn=partition, decompositions=select_decomp_table,
    )  # fmt: skip
    torch._dynamo.reset()
    with torch.device("meta"):
        block = resolve(config)(config)
    block.recompute = recompute
    # static shapes: a second size would be traced with symbols, and its bytes be one
    block.compile(backend=backend, fullgraph=True, dynamic=False)
    packed = block.layout(_documents(rows, length, documents)) if documents else None
    kept = mock.patch.object(op, "KEEP_BYTES", gpu_bytes // op.KEPT_OF)
    with as_on_gpu(), kept, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        block.to_empty(device="cpu")
        x = torch.empty(rows, length, config.d_model, requires_grad=True)
        packed = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, packed)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            block(x, None, Positions(torch.arange(length)[None], packed))
    return traced[0]


def size_of(value: Any) -> int:
    """Return the bytes of a value in a graph, 0 if it is no tensor."""
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _documents(rows: int, length: int, count: int) -> Documents:
    """Documents of about equal lengths, at least one in each row."""
    starts = torch.zeros(rows * length, dtype=torch.bool)
    starts[torch.linspace(0, rows * length - 1, count).long()] = True
    return Documents.from_starts(starts.view(rows, length))
