"""Non-linearities between the layers of the memory, with the two derivatives the inner loop needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Activation(NamedTuple):
    """``value(z)`` is f(z); ``slopes(z)`` is (f'(z), f''(z)), or None for the second where it is 0."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    slopes: Callable[[Tensor], tuple[Tensor, Tensor | None]]


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return torch.addcmul(s, s * z, 1 - s)  # s + z s (1 - s)


def _silu_slopes(z: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(z)
    ds = s * (1 - s)
    return torch.addcmul(s, z, ds), ds * (2 + z * (1 - 2 * s))


def _gelu_parts(z: Tensor) -> tuple[Tensor, Tensor]:
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))), density


def _gelu_slope(z: Tensor) -> Tensor:
    cdf, density = _gelu_parts(z)
    return cdf + z * density


def _gelu_slopes(z: Tensor) -> tuple[Tensor, Tensor]:
    cdf, density = _gelu_parts(z)
    return cdf + z * density, density * (2 - z * z)


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(F.silu, _silu_slope, _silu_slopes),
    "gelu": Activation(F.gelu, _gelu_slope, _gelu_slopes),
    "identity": Activation(lambda z: z, torch.ones_like, lambda z: (torch.ones_like(z), None)),
}
