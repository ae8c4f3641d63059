"""Differentiable gradients inside the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Pullback = Callable[[Tensor], Sequence[Tensor]]


def vjp(
    function: Callable[..., Tensor], *inputs: Tensor, create_graph: bool, fixed: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Pullback]:
    """``function(*inputs, *fixed)`` and its pullback to the gradients of the inputs.

    `torch.func.vjp` with plain autograd: the first call of `torch.func` imports the compiler, which takes
    seconds. Also works under no_grad and in inference mode.

    Args:
        function: must depend on tensors only through its arguments.
        inputs: arguments to differentiate; the gradient of an unused one is zero. Autograd traverses the
            outer graph down to the earliest of them: in a token-by-token loop, asking for the gradient of a
            token's own inputs, such as its key, costs T^2.
        create_graph: whether the result and the gradients are differentiable by an outer gradient.
        fixed: the last arguments, not differentiated here; an outer gradient flows through them too.
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
    """Return True if any of the tensors needs an outer gradient."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _differentiable(x: Tensor, connected: bool) -> Tensor:
    """x as a graph input: of the outer graph if it is connected, else of a new one."""
    if connected and x.requires_grad:
        return x
    # autograd cannot save inference tensors
    return (x.clone() if x.is_inference() else x.detach()).requires_grad_()
