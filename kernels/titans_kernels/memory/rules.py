"""Update rules of the memory: `Rule` is the paper's; a subclass is another, named by its import path.

A rule is made of hooks (`loss`, `gradient_point`, `update`, `reads`), or replaces the computation of a whole
chunk (`chunk`). Fast forms support `Rule` itself and, with chunks of one token, `GatedDelta`; every other
rule is computed by `forms.generic`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from titans_kernels.registry import Registry


@dataclass(frozen=True)
class Rule:
    """The paper's rule (eqs. 12-14, 16).

    The dataclass fields of a subclass are its parameters. Its methods must be differentiable functions of
    torch, since the gradient of the outer loss flows through them.
    """

    reads: ClassVar[Literal["token", "chunk"]] = "token"
    """Weights that a token reads: those after its own write (eq. 15), or those at the start of its chunk."""
    extra_gates: ClassVar[int] = 0
    """Number of gates beside alpha, eta and theta, each in [0, 1] per token and head. They follow the other
    arguments of `loss`, as [...], and of `update`, as [B, H, 1, 1]."""
    extra_bias: ClassVar[float] = 0.0
    """Their initial bias before the sigmoid."""

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        """Inner loss ``||M(k) - v||^2`` per token (eq. 12): two [..., D] to [...]."""
        return (prediction - v).square().sum(-1)

    def gradient_point(self, weights: Tensor, decay: Tensor) -> Tensor:
        """Return the weights of a layer at which a token's gradient is taken.

        The paper uses the weights at the start of the chunk, unchanged (eq. 16).

        Args:
            weights: weights at the start of the token's chunk.
            decay: product of 1 - alpha over the chunk's tokens up to and including this one, broadcastable to
                ``weights``.
        """
        return weights

    def update(
        self, weights: Tensor, momentum: Tensor, gradient: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor,
        *extra: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Weights and momentum [B, H, D, F] of a layer after a token.

        ``S' = eta S - theta gradient`` (eq. 14) and ``W' = (1 - alpha) W + S'`` (eq. 13). A gate is
        [B, H, 1, 1], or [B, H, 1, F] if it differs by column. A rule may keep any state of the weights'
        shape as its momentum.
        """
        momentum = eta * momentum - theta * gradient
        return (1 - alpha) * weights + momentum, momentum

    def chunk(self, tokens: Any, state: Any, options: Any) -> tuple[Tensor, Any]:
        """Write and read the tokens of a chunk; override it for a rule that the hooks cannot express.

        It may call `forms.generic.write_chunk`, which computes a chunk by the hooks, and change its results.

        Args:
            tokens: `Inputs` of one chunk, [B, H, b, ...] each; the last one may have fewer than
                ``options.chunk_size``.
            state: `MemoryState` at the start of the chunk; with a base, weights are offsets from it.
            options: `Options` of the call; `forms.reference` has `apply_memory` for reads, `surprise` for
                gradients.

        Returns:
            y [B, H, b, D_v] and the state after the chunk.
        """
        raise NotImplementedError(f"{self} is made of hooks: forms.generic.write_chunk computes its chunks")

    def error(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        """Gradient of the inner loss with respect to the prediction, [..., D]; derived from `loss`."""
        if type(self).loss is Rule.loss:
            return 2 * (prediction - v)
        fixed = (v, *extra)
        loss, pullback = vjp(self.loss, prediction, create_graph=flows(prediction, *fixed), fixed=fixed)
        return pullback(torch.ones_like(loss))[0]

    @property
    def has_own_chunk(self) -> bool:
        """True if the rule replaces `chunk`."""
        return type(self).chunk is not Rule.chunk

    @property
    def has_paper_update(self) -> bool:
        """True if the hooks keep the paper's update and gradient point; loss and reads may differ."""
        own = type(self)
        return own.update is Rule.update and own.gradient_point is Rule.gradient_point

    @property
    def linear(self) -> bool:
        """True if a chunk is linear in its tokens' gradients, with the coefficients of `parts.gates`."""
        return self.has_paper_update and not self.has_own_chunk


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


PAPER = Rule()
RULES = Registry(
    "rule",
    Rule,
    {"paper": "titans_kernels.memory.rules:Rule", "gated_delta": "titans_kernels.memory.rules:GatedDelta"},
)
"""Rules by name; ``RULES["mine"] = MyRule`` adds one in this process."""


def find_rule(name: str) -> Rule:
    """Instantiate a rule.

    Args:
        name: a key of `RULES`, or an import path ``package.module:Class`` of a subclass of `Rule`; with the
            rule's parameters in parentheses, ``package.module:Class(p=2.5, q=3)``.

    Raises:
        ValueError: there is no such rule, or a parameter is unknown or invalid; a one-line message.
    """
    if name == "paper":  # without an import, which torch.compile cannot trace
        return PAPER
    match = re.fullmatch(r"([^()]*)(?:\((.*)\))?", name)
    if match is None:
        raise ValueError(f"rule: {name!r} should be package.module:Class or package.module:Class(p=2.5)")
    path, given = match.groups(default="")
    kind, parameters = RULES.find(path), {}
    known = [field.name for field in fields(kind)]
    for part in filter(str.strip, given.split(",")):
        key, _, value = part.partition("=")
        if (key := key.strip()) not in known:
            fix = f"give one of {', '.join(known)}" if known else "it has none"
            raise ValueError(f"rule: {path} has no parameter {key!r}; {fix}")
        try:
            parameters[key] = float(value)
        except ValueError:
            raise ValueError(f"rule: {key} of {path} is {value.strip()!r}, not a number") from None
    try:
        return kind(**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rule: {path}: {error}") from None


def vjp(
    function: Callable[..., Tensor], *inputs: Tensor, create_graph: bool, fixed: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
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
