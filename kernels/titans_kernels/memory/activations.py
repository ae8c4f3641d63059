"""Activations between the layers of the memory, with the two derivatives that the inner loop needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten


class Activation(NamedTuple):
    """A function f and its derivatives; the first two write to ``out`` if it is given."""

    value: Callable[..., Tensor]
    """(z, out=None): f(z)"""
    through: Callable[..., Tensor]
    """(g, z, out=None): g f'(z)"""
    slopes: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """(z, f(z)): f'(z) and f''(z)"""


def _silu(z: Tensor, out: Tensor | None = None) -> Tensor:
    return F.silu(z) if out is None else aten.silu.out(z, out=out)


def _through_silu(g: Tensor, z: Tensor, out: Tensor | None = None) -> Tensor:
    if out is not None:
        return aten.silu_backward.grad_input(g, z, grad_input=out)
    if torch.is_grad_enabled() and (g.requires_grad or z.requires_grad):  # aten's op is not differentiable
        # not `_silu_slopes`: its in-place operations create a reference cycle in autograd that is never freed
        s, value = torch.sigmoid(z), F.silu(z)
        return g * (torch.addcmul(s, s, value, value=-1) + value)
    return aten.silu_backward(g, z)


def _silu_slopes(z: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(z)
    w = torch.addcmul(s, s, value, value=-1)  # s - s f
    slope = w + value
    second = w.add_(slope)
    return slope, second.addcmul_(second, s, value=-1)  # (s - s f + f') (1 - s)


def _gelu(z: Tensor, out: Tensor | None = None) -> Tensor:
    return F.gelu(z) if out is None else aten.gelu.out(z, out=out)


def _through_gelu(g: Tensor, z: Tensor, out: Tensor | None = None) -> Tensor:
    return aten.gelu_backward(g, z) if out is None else aten.gelu_backward.grad_input(g, z, grad_input=out)


def _gelu_slopes(z: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    cdf = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    return cdf + z * density, density * (2 - z * z)


def _identity(z: Tensor, out: Tensor | None = None) -> Tensor:
    return z if out is None else out.copy_(z)


def _through_identity(g: Tensor, z: Tensor, out: Tensor | None = None) -> Tensor:
    return g if out is None else out.copy_(g)


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(_silu, _through_silu, _silu_slopes),
    "gelu": Activation(_gelu, _through_gelu, _gelu_slopes),
    "identity": Activation(
        _identity, _through_identity, lambda z, value: (torch.ones_like(z), torch.zeros_like(z))
    ),
}
