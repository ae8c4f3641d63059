"""Output of a memory around its network f: M(x) = f(x), x + f(x), or x + LN(f(x)).

The last is used by the later published version of Titans and by TTT (Sun et al. 2024, arXiv 2407.04620).
LN has a weight w and a bias b per head, which are trained by the outer loss and are not part of the memory.

The inner gradient goes through the residual and LN. With ``z = f(k)``, ``n = (z - mean z) r`` and
``r = (var z + eps)^(-1/2)``, the prediction is ``p = k + n w + b``; the error e is the gradient of the inner
loss with respect to p, and

    d = J(e w),    J g = r (g - mean(g) - n mean(g n))

is the gradient with respect to z. It depends on the token and on z at the chunk's starting weights only. So d
is known before the chunk is written, the gradient of the last layer is still ``X^T d``, and a chunk needs the
same products as without LN: the parallel form stays exact. A read applies LN at the end,
``y_t = q_t + LN(f_t(q_t))``.

``x + f(x)`` needs no separate form: ``||k + f(k) - v||^2`` is the loss of f for the value ``v - k``.

Shapes: H heads, D width of a head, R rows (chunks x heads, the head running fastest), b tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-6


class Residual(NamedTuple):
    """``M(x) = x + f(x)``, or ``x + LN(f(x))`` with LN's weight and bias [H, D]."""

    weight: Tensor | None = None
    bias: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Residual:
        """Return the same residual in another dtype."""
        return Residual(*(x if x is None else x.to(dtype) for x in self))

    @property
    def norm(self) -> tuple[Tensor, ...]:
        """Weight and bias; empty without LN."""
        return () if self.weight is None or self.bias is None else (self.weight, self.bias)


def predict(residual: Residual | None, x: Tensor, z: Tensor) -> Tensor:
    """M(x) from z = f(x); [B, H, ..., D]."""
    if residual is None:
        return z
    if not residual.norm:
        return x + z
    weight, bias = (_heads_second(p, z) for p in residual.norm)
    return x + _normalised(z)[0] * weight + bias


def pull(residual: Residual | None, e: Tensor, z: Tensor) -> Tensor:
    """Gradient with respect to z = f(x), from e, the gradient with respect to M(x)."""
    if residual is None or not residual.norm:
        return e
    return _through(e * _heads_second(residual.norm[0], z), *_normalised(z))


class Norm(NamedTuple):
    """The residual and LN of some heads in chunks, with a hand-written backward.

    ``weight`` and ``bias`` are [heads, 1, D]; ``grads`` accumulates their gradients.
    """

    weight: Tensor
    bias: Tensor
    grads: tuple[Tensor, ...] = ()

    @staticmethod
    def of(parts: tuple[Tensor, ...], heads: slice, grads: tuple[Tensor, ...] = ()) -> Norm | None:
        """Build it from weight and bias [H, D] and the tensors of their gradients; None without LN."""
        if not parts:
            return None
        weight, bias = (x[heads, None] for x in parts)
        return Norm(weight, bias, tuple(x[heads, None] for x in grads))

    def output(self, x: Tensor, z: Tensor) -> Tensor:
        """M(x) from z = f(x); [R, b, D]."""
        n, _ = _normalised(self._split(z))
        return (n * self.weight).add_(self.bias).flatten(0, 1).add_(x)

    def output_backward(self, dy: Tensor, z: Tensor) -> Tensor:
        """Return the gradient of z from dy, the gradient of M(x); the gradient of x is dy itself."""
        (n, r), dy = _normalised(self._split(z)), self._split(dy)
        self._add(dy * n, dy)
        return _through(dy * self.weight, n, r).flatten(0, 1)

    def surprise(self, z: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """d of `residual`: the gradient of ``||M(k) - v||^2`` with respect to z = f(k)."""
        n, r = _normalised(self._split(z))
        e = self._error(n, k, v)
        return _through(e.mul_(self.weight), n, r).flatten(0, 1)

    def surprise_backward(self, dd: Tensor, z: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of z and of the prediction M(k) from d's; v's is minus the latter.

        With ``g = e w``: J is symmetric, so ``dg = J dd``. The gradient of n through J is
        ``-r (g mean(dd n) + dd mean(g n))``, r's is ``<dd, d> / r``, and ``dr/dz = -r^2 n / D``.
        """
        (n, r), dd = _normalised(self._split(z)), self._split(dd)
        e = self._error(n, k, v)
        g, dg = e * self.weight, _through(dd, n, r)
        dp = 2 * dg * self.weight
        self._add(e * dg + dp * n, dp)
        dn = dp * self.weight - r * (g * _mean(dd * n) + dd * _mean(g * n))
        dr = _mean(dd * _through(g, n, r)) / r
        dz = _through(dn, n, r).addcmul_(n, dr * r.square(), value=-1)
        return dz.flatten(0, 1), dp.flatten(0, 1)

    def _error(self, n: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``2 (M(k) - v)``."""
        return (n * self.weight).add_(self.bias).add_(self._split(k - v)).mul_(2)

    def _add(self, dweight: Tensor, dbias: Tensor) -> None:
        for grad, x in zip(self.grads, (dweight, dbias), strict=True):
            grad.add_(x.sum((0, 2))[:, None])

    def _split(self, x: Tensor) -> Tensor:
        """Rows [R, b, D] as [chunks, heads, b, D]."""
        return x.unflatten(0, (-1, self.weight.shape[0]))


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _normalised(z: Tensor) -> tuple[Tensor, Tensor]:
    """n and r of `residual`."""
    centred = z - _mean(z)
    r = torch.rsqrt(_mean(centred.square()) + EPS)
    return centred * r, r


def _through(g: Tensor, n: Tensor, r: Tensor) -> Tensor:
    """J g of `residual`."""
    return r * (g - _mean(g) - n * _mean(g * n))


def _heads_second(x: Tensor, like: Tensor) -> Tensor:
    """Reshape [H, D] to broadcast over [B, H, ..., D]."""
    return x.view(x.shape[0], *[1] * (like.ndim - 3), x.shape[1])
