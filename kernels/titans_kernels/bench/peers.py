"""Other libraries' implementations of the same layers, timed if they are installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import partial

import torch
from torch import Tensor

from titans_kernels import neural_memory
from titans_kernels.bench.check import Judge, Verdict, relative_error
from titans_kernels.bench.inputs import BenchInputs
from titans_kernels.bench.shapes import BenchShape
from titans_kernels.bench.subjects import TimedForm
from titans_kernels.bench.timing import Op


def versions() -> dict[str, str]:
    """Return the versions of the installed peers by distribution.

    `fla` comes with fla-core, or with flash-linear-attention, so distributions are found by module.
    """
    of_module = importlib.metadata.packages_distributions()
    names = [name for module in ("fla", "titans_pytorch") for name in of_module.get(module, ())]
    return {name: importlib.metadata.version(name) for name in sorted(set(names))}


def _missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else "not installed"


def _no_gated_delta(inputs: BenchInputs) -> str | None:
    q, shape = inputs.tokens[0], inputs.shape
    if shape.depth != 1:
        return "a linear memory only"
    if q.dtype == torch.float32 or q.device.type != "cuda":
        return "needs a GPU and 16-bit operands"
    return _missing("fla")


def _gated_delta(inputs: BenchInputs) -> Op:
    q, k, v, alpha, _, theta = (x.detach() for x in inputs.tokens)
    g, beta = (1 - alpha).log(), 2 * theta
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    return Op(lambda: _gated_delta_rule(q, k, v, g, beta), leaves)


def _gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    # a decorator of theirs hides what it takes
    return chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0)[0]  # pyright: ignore[reportCallIssue]


def _verify_gated_delta(judges: list[Judge]) -> list[Verdict]:
    """Check that without forgetting it equals our linear memory: no momentum, a step a token, from zero."""
    judge = judges[0]
    q, k, v, _, _, theta = (x.detach() for x in judge.inputs.tokens)
    dy, zero = torch.randn_like(v), torch.zeros_like(theta)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    W = (torch.zeros(q.shape[2], q.shape[3], v.shape[3], device=q.device),)
    still = zero.double()
    y, _ = neural_memory(
        exact[0], exact[1], exact[2], still, still, theta.double(), W, chunk_size=1, backend="reference"
    )
    expected = [y, *torch.autograd.grad(y, exact, dy.double())]
    y = _gated_delta_rule(q, k, v, zero, 2 * theta)
    computed = [y, *torch.autograd.grad(y, leaves, dy)]
    pairs = zip(("y", "dq", "dk", "dv"), zip(computed, expected, strict=True), strict=True)
    errors = {name: relative_error(a, b) for name, (a, b) in pairs}
    return [Verdict(errors, judge.tolerance, judge.inputs.shape)]


def _no_layer(inputs: BenchInputs) -> str | None:
    return "has no such bound" if inputs.shape.bound else _missing("titans_pytorch")


def _layer(renewed: bool, inputs: BenchInputs) -> Op:
    shape, q = inputs.shape, inputs.tokens[0]
    return titans_pytorch(shape, shape.chunk_size, renewed=renewed, device=q.device, dtype=q.dtype)


def titans_pytorch(
    shape: BenchShape,
    chunk_size: int,
    *,
    renewed: bool,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Op:
    """Build the layer of titans-pytorch from x to y: its own projections, norms and convolutions included.

    ``chunk_size`` is its own: the number of tokens that share one gradient step. Gradients are taken at the
    weights at the start of the call, or with ``renewed`` at the start of each of our chunks (its batch_size).
    """
    from titans_pytorch import NeuralMemory  # pyright: ignore[reportMissingImports]

    width = shape.heads * shape.head_dim
    layer = NeuralMemory(
        dim=width,
        heads=shape.heads,
        dim_head=shape.head_dim,
        chunk_size=chunk_size,
        batch_size=shape.chunk_size if renewed else None,
        # at its own default of 1 it is NaN from the start
        default_step_transform_max_lr=0.01,
        default_model_kwargs={
            "depth": shape.depth,
            "expansion_factor": shape.hidden / shape.head_dim if shape.depth > 1 else 1.0,
        },
    ).to(device)
    x = torch.randn(shape.batch, shape.length, width, device=device, requires_grad=True)
    autocast = partial(torch.autocast, x.device.type, dtype, dtype != x.dtype)
    return Op(lambda: layer(x)[0], [x, *layer.parameters()], autocast)


PEERS = (
    TimedForm("fla-gated-delta", "flash-linear-attention's chunk_gated_delta_rule: no momentum, scale 1",
            _gated_delta, _no_gated_delta, _verify_gated_delta),
    TimedForm("titans-pytorch", "its layer, projections included; gradients at the call's first weights",
            partial(_layer, False), _no_layer),
    TimedForm("titans-pytorch-b", "the same, the weights of gradients renewed a chunk (its batch_size)",
            partial(_layer, True), _no_layer),
)  # fmt: skip
