"""The gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from titans_kernels.memory.rules.base import Rule


@dataclass(frozen=True)
class GatedDelta(Rule):
    """The gradient at the decayed state, as in Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464, eq. 10).

    Token by token, ``M_t = (1 - alpha_t) M_{t-1} + S_t`` with the gradient in S_t taken at
    ``(1 - alpha_t) M_{t-1}``, the state after forgetting and before the write. A linear memory without
    momentum (row vectors, ``W = S^T``) has the gradient ``2 k (k^T W - v^T)``, so

        W_t = a W - theta 2 k (k^T a W - v^T) = a (I - 2 theta k k^T) W + 2 theta k v^T,   a = 1 - alpha_t,

    the published ``S_t = S_{t-1} (a (I - beta k k^T)) + beta v k^T`` with ``beta = 2 theta_t``.

    Within a chunk the paper's gradients ignore what the chunk has already written (16), which makes them
    parallel. Decay does not depend on gradients, so it is kept: token t of a chunk that starts from M_{t'}
    uses the decayed state ``(1 - alpha_{t'+1}) ... (1 - alpha_t) M_{t'}``. For chunks of one token this is
    exactly the recurrence above.
    """

    def gradient_point(self, weights: Tensor, decay: Tensor) -> Tensor:
        return decay * weights
