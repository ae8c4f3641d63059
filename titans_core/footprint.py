"""Activations that a block saves for its backward pass, and FLOPs: without a GPU, without data.

torch.compile traces one block as a GPU would train it: float32 parameters, autocast, the kernels of the
memory as operators. Inductor's partitioner (min-cut) divides forward and backward; what autograd saves from
one for the other, parameters aside, is counted. Tensors have sizes, but no values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from titans_core.blocks import Positions, resolve
from titans_core.blocks.base import Recompute
from titans_core.config import ModelConfig
from titans_core.documents import Documents
from titans_kernels.bench.shapes import flops
from titans_kernels.memory.options import as_on_gpu

Precision = Literal["fp32", "bf16"]


H100 = 80 * 2**30
"""Bytes of an H100's memory."""


class Graphs(NamedTuple):
    """The forward and backward pass of a block as graphs of ATen operators; MAC has some, called in turn."""

    forward: list[GraphModule]
    backward: list[GraphModule]
    saved_bytes: int
    """Bytes saved for the backward pass, parameters and documents aside, each storage counted once."""

    @property
    def nodes(self) -> list[Node]:
        """Operators of both passes."""
        return [node for graph in self.forward + self.backward for node in graph.graph.nodes]


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
    return trace(ModelConfig.model_validate_json(config), *options).saved_bytes


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
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    from titans_kernels.memory.forms.triton import op

    traced: list[tuple[GraphModule, GraphModule]] = []

    def partition(*inputs: Any, **options: Any) -> Any:
        traced.append(min_cut_rematerialization_partition(*inputs, compiler="inductor", **options))
        return traced[-1]

    saved: dict[int, Tensor] = {}
    storage = lambda x: x.untyped_storage()  # noqa: E731

    def pack(x: Tensor) -> Tensor:
        return saved.setdefault(storage(x)._cdata, x)

    call = lambda graph, inputs: make_boxed_func(graph.forward)  # noqa: E731
    backend = aot_autograd(
        fw_compiler=call, bw_compiler=call, partition_fn=partition, decompositions=select_decomp_table
    )
    torch._dynamo.reset()
    with torch.device("meta"):
        block = resolve(config)(config)
    block.recompute = recompute
    block.compile(backend=backend, fullgraph=True)
    packed = block.layout(_documents(rows, length, documents)) if documents else None
    kept = mock.patch.object(op, "KEEP_BYTES", gpu_bytes // op.KEPT_OF)
    with as_on_gpu(), kept, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        block.to_empty(device="cpu")
        x = torch.empty(rows, length, config.d_model, requires_grad=True)
        packed = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, packed)
        positions = Positions(torch.arange(length)[None], packed)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            outputs = block(x, None, positions)  # kept, and with it what is saved
        given = [y for y in tree_leaves([*block.parameters(), positions]) if isinstance(y, Tensor)]
        aside = {storage(y)._cdata for y in given}
        total = sum(storage(y).nbytes() for key, y in saved.items() if key not in aside)
    del outputs
    forward, backward = zip(*traced, strict=True)
    return Graphs(list(forward), list(backward), total)


def recalled_bytes(config: ModelConfig, tokens: int, gpu_bytes: int = H100) -> int:
    """Return the bytes that the kernels of a block's memory hold only during a backward pass of ``tokens``.

    The states at the starts of all chunks, which they compute again if they are too large to be saved, and
    the gradients of these states; operands have two bytes.
    """
    from titans_kernels.memory.forms.triton.op import KEPT_OF

    c, width = config.memory, config.d_model // config.memory.heads
    if c.chunk_size == 1:  # other kernels, of a block of tokens
        return 0
    layers = pairwise([width, *[c.expansion * width] * (c.depth - 1), width])
    states = -(-tokens // c.chunk_size) * c.heads * sum(2 * D * F for D, F in layers) * 2
    return 2 * states if states > gpu_bytes // KEPT_OF else 0


def forward_flops(call: Callable[[], Any]) -> int:
    """Return the floating-point operations of a forward pass on the meta device, as on a GPU.

    Counts matrix products, the memory's too, and attention to the keys within its window; causal attention in
    full, as is usual. Weights in bfloat16 take flash attention.
    """
    # imports the compiler, which takes seconds
    import torch.nn.attention.varlen
    from torch.utils.flop_counter import FlopCounterMode

    import titans_kernels.memory.forms.triton.op  # noqa: F401

    ours, formulas = torch.ops.titans, {torch.ops.torch_attn._varlen_attn: _attention_flops}
    formulas |= {ours.memory_triton: _memory_flops, ours.memory_chunked: _memory_flops}
    with as_on_gpu(), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        call()
    return counter.get_total_flops()


def _memory_flops(q: Any, k: Any, v: Any, alpha: Any, eta: Any, theta: Any, *args: Any, **_: Any) -> int:
    """Operations of a call of the memory, from the shapes of its arguments."""
    if isinstance(args[0], list):  # weights of `memory_chunked`
        pairs, chunk_size = [W[-2:] for W in args[0]], args[4]
    else:  # of `memory_triton`
        pairs, chunk_size = list(pairwise(args[3])), args[4]
    return prod(q[:3]) * flops(pairs, chunk_size)["forward"]


def _attention_flops(q: Any, k: Any, v: Any, *args: Any, **_: Any) -> int:
    """Operations of a call of varlen attention [tokens, H, E], from its shapes and its window."""
    left = args[6][0]
    return 4 * prod(q) * (args[3] if left < 0 else min(args[3], left + 1))


def size_of(value: Any) -> int:
    """Return the bytes of a value in a graph, 0 if it is no tensor; symbolic sizes are those of the trace."""
    if not isinstance(value, Tensor):
        return 0
    count = value.numel()
    return (count.node.hint if isinstance(count, torch.SymInt) else count) * value.itemsize


def _documents(rows: int, length: int, count: int) -> Documents:
    """Documents of about equal lengths, at least one in each row."""
    starts = torch.zeros(rows * length, dtype=torch.bool)
    starts[torch.linspace(0, rows * length - 1, count).long()] = True
    return Documents.from_starts(starts.view(rows, length))
