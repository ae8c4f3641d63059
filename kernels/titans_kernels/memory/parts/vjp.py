"""Gradients inside the forward pass, through which the gradient of the outer loss flows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Pullback = Callable[[Tensor], Sequence[Tensor]]


def vjp(
    function: Callable[..., Tensor], *inputs: Tensor, create_graph: bool, fixed: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Pullback]:
    """``function(*inputs, *fixed)``, and what takes the gradient of that to the gradients of the inputs.

    `torch.func.vjp` by plain autograd: the first call of `torch.func` imports the compiler, which takes
    seconds. Works without gradients and in inference mode too.

    Args:
        function: depends on tensors through its arguments alone.
        inputs: where nothing flows to one of them, its gradient is zero. Autograd walks the outer graph
            down to the shallowest of them: token by token it costs T^2 to ask for the gradient of a token's
            own inputs, such as its key.
        create_graph: whether an outer gradient is to flow through the result and the gradients.
        fixed: the last arguments, whose gradient is not asked for. An outer one flows through them too.
    """
    if torch.compiler.is_compiling():
        output, pullback, *_ = torch.func.vjp(lambda *leaves: function(*leaves, *fixed), *inputs)
        return output, pullback
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [_differentiable(x, create_graph) for x in inputs]
        output = function(*leaves, *(_differentiable(x, create_graph) for x in fixed))

    def pullback(gradient: Tensor) -> Sequence[Tensor]:
        with torch.inference_mode(False):
            return torch.autograd.grad(
                output, leaves, gradient, create_graph=create_graph, materialize_grads=True
            )

    return (output if create_graph else output.detach()), pullback


def flows(*tensors: Tensor) -> bool:
    """Whether an outer gradient is to reach one of the tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _differentiable(x: Tensor, connected: bool) -> Tensor:
    """x as an input of a graph: the outer one where it is part of it, else one of its own."""
    if connected and x.requires_grad:
        return x
    # autograd cannot save what was made in inference mode
    return (x.clone() if x.is_inference() else x.detach()).requires_grad_()
