"""The neural long-term memory as a plain layer on any [B, T, D] input (Sections 3.1, 3.2, 4.4).

Shapes: B batch, T tokens, D model width, H heads, E head width, C = H * E channels, K convolution width.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from titans_core.config import MemoryConfig
from titans_core.documents import Documents, check_not_empty, reset_rows
from titans_core.init import initialize
from titans_core.layers import GateLinear, HeadNorm
from titans_core.projections import ConvState, Projections, expand_rows
from titans_core.state import check_rows
from titans_kernels import (
    AnyState,
    DecodeState,
    Extension,
    MemoryState,
    OpenChunk,
    Residual,
    Rule,
    extend_memory,
    find_rule,
    neural_memory,
    read_memory,
    state_dtype,
    state_numel,
    write_budget,
)
from titans_kernels.memory.budget import effective_steps

CHANNEL_GATES = {"none": (), "alpha": ("alpha",), "all": ("alpha", "eta", "theta")}
"""Gates with a number per channel, by `MemoryConfig.channel_gates`."""


class Writes(NamedTuple):
    """Inputs of an update: k, v [B, T, H, E]; gates [B, T, H], or per channel [B, T, H, E]."""

    k: Tensor
    v: Tensor
    alpha: Tensor
    eta: Tensor
    theta: Tensor
    extra: Tensor
    """The rule's own gates [B, T, H, E], E being `Rule.extra_gates`."""


class MemoryCache(NamedTuple):
    """The recurrent state after any token, also inside a chunk."""

    memory: AnyState
    conv_state: ConvState
    gates: tuple[Tensor, ...] = ()
    """With one gate per chunk, the open chunk's, [B, 1, H] or [B, 1, H, E] each."""
    steps: tuple[Tensor, ...] = ()
    """With a write budget, the effective steps of the open chunk's tokens, [B, H, p]."""

    @property
    def start(self) -> MemoryState:
        """Weights and momentum at the start of the open chunk."""
        return MemoryState(self.memory.weights, self.memory.momentum)


class Watcher(Protocol):
    """Hooks called for every write and read of a memory: see `titans_core.inspection`."""

    def on_write(self, q: Tensor, writes: Writes, cache: MemoryCache, after: MemoryCache) -> None:
        """Take tokens written after ``cache``, which left ``after``, and read with q [B, T, H, E]."""

    def on_read(self, q: Tensor, weights: tuple[Tensor, ...]) -> None:
        """Take note before weights of an earlier token are read with q [B, T, H, E]."""


class Recorder(Protocol):
    """A hook called after every update of a memory: see `titans_core.telemetry`."""

    def on_update(
        self, memory: NeuralMemory, read: Callable[[Tensor], Tensor], writes: Writes, after: MemoryState,
        cu_seqlens: Tensor | None,
    ) -> None:  # fmt: skip
        """Record after tokens were written; ``read(q)`` is the read of other queries [B, T, H, E]."""


class NeuralMemory(Projections):
    """Memory whose weights are updated by gradient descent at test time; `MemoryConfig` has its components.

    Args:
        d_model: width D of the input and output.
        config: the memory's components.
        initialized: False leaves initialisation to the model, whose depth scales the output projection.
        pointwise: as `ModelConfig.pointwise_conv`.

    Raises:
        ValueError: heads do not divide ``d_model``, the rule is unknown, or it does not take the given
            parameters; one line that begins with the field of `ModelConfig`.
    """

    def __init__(
        self, d_model: int, config: MemoryConfig, *, initialized: bool = True, pointwise: bool = False
    ):
        if d_model % config.heads:
            raise ValueError(f"memory.heads: {config.heads} does not divide d_model {d_model}")
        channels, kernel = d_model, config.conv or None
        unit = ("qk" if config.qk_norm else "") + ("v" if config.value_norm else "")
        super().__init__(d_model, config.heads, d_model // config.heads, kernel, unit, pointwise=pointwise)
        rule = _rule(config)
        self.config, self.rule = config, rule
        self.carries_momentum = config.momentum or rule.has_own_chunk or type(rule).update is not Rule.update
        """True if a state holds momentum; if eta is always 0, it has one zero per head and layer instead."""
        outputs = dict.fromkeys(("alpha", "eta", "theta"), config.heads)
        outputs |= dict.fromkeys(CHANNEL_GATES[config.channel_gates], channels)
        self.alpha = GateLinear(d_model, outputs["alpha"]) if config.decay else None
        self.eta = GateLinear(d_model, outputs["eta"]) if config.momentum else None
        self.theta = GateLinear(d_model, outputs["theta"])
        self.extra = GateLinear(d_model, config.heads * rule.extra_gates) if rule.extra_gates else None
        hidden = config.expansion * self.head_dim
        widths = [self.head_dim, *[hidden] * (config.depth - 1), self.head_dim]
        layers = [torch.empty(config.heads, *pair) for pair in pairwise(widths)]
        self.initial_weights = nn.ParameterList(layers)
        self.inner_norm = HeadNorm(config.heads, self.head_dim) if config.residual == "norm" else None
        self.add_output(d_model, config.output)
        self.recorder: Recorder | None = None
        self.watcher: Watcher | None = None
        # switches of `titans_core.interventions`
        self.muted, self.decays = False, True
        if initialized:
            initialize(self, n_layers=1)

    def forward(
        self,
        x_BTD: Tensor,
        cache: MemoryCache | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, MemoryCache | None]:
        """Write and read each token: y_t = M_t(q_t) (eqs. 11-15), normalised, gated and projected.

        Args:
            x_BTD: [B, T, D].
            cache: from `start` or an earlier call, after any token; None starts from the initial weights.
            documents: borders of packed documents. Each starts from ``cache``, which must then be a single
                state on a chunk border, such as ``start(1)``.

        Returns:
            [B, T, D] and the cache after the last token, None when packed.

        Raises:
            ValueError: there is no row or no token, ``cache`` is of another number of rows, or packed
                documents cannot start from it.
        """
        y, *_, cache = self.retrieve(x_BTD, cache, documents)
        return self.output(y, x_BTD), cache

    def retrieve(
        self,
        x_BTD: Tensor,
        cache: MemoryCache | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor, Writes, MemoryCache | None]:
        """Run `forward` up to the read: return y [B, T, H, E], queries, what was written, and the cache."""
        check_not_empty(x_BTD, "x_BTD")
        if documents is not None:
            return self._packed(x_BTD, cache or self.start(1), documents)
        check_rows(cache and cache.start.weights, len(x_BTD), "cache")
        cache = cache or self.start(len(x_BTD))
        q, writes, conv_state = self._project_tokens(x_BTD, cache.conv_state)
        y, cache = self._write(q, writes, cache)
        return y, q, writes, cache._replace(conv_state=conv_state)

    def read(
        self, x_BTD: Tensor, weights: tuple[Tensor, ...], conv_state: ConvState,
        documents: Documents | None = None,
    ) -> tuple[Tensor, ConvState]:  # fmt: skip
        """Return M(q) at given weights, without a write (eq. 21); ``conv_state`` is of q only."""
        (q,), conv_state = self.project(x_BTD, "q", conv_state, documents)
        if self.watcher is not None:
            self.watcher.on_read(q, weights)
        if documents is None or len(weights[0]) == 1:
            return self.output(self.predict(q, weights), x_BTD), conv_state
        y = documents.row(self.predict(documents.rows(q), weights))
        return self.output(y, x_BTD), conv_state

    def predict(self, q: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        """M(q) of q [B, T, H, E], at given weights."""
        return read_memory(q, weights, activation=self.config.activation, extension=self.extension())

    @property
    def start_weights(self) -> tuple[Tensor, ...]:
        """M_0 of each layer in the state, [H, D, F]."""
        return tuple(self.initial_weights)

    @property
    def base(self) -> tuple[Tensor, ...] | None:
        """The weights that forgetting decays to, None for zero. A state holds the distance from them."""
        return self.start_weights if self.config.forget_to == "initial" else None

    def absolute_weights(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Add the base to the weights of a state, which are stored relative to it."""
        base = self.base
        return weights if base is None else tuple(B + V for B, V in zip(base, weights, strict=True))

    def extension(self, gates: Tensor | None = None) -> Extension:
        """Parts beyond the paper's equations; ``gates`` of tokens are the rule's own."""
        norm, residual = self.inner_norm, None
        if self.config.residual != "none":
            residual = Residual() if norm is None else Residual(norm.weight_HE, norm.bias_HE)
        delta = not self.config.momentum and (self.config.rule == "gated_delta" or not self.config.decay)
        return Extension(residual, self.base, self.rule, gates, delta)

    def start(self, batch: int, prefix_PD: Tensor | None = None) -> MemoryCache:
        """Return the cache before the first token: initial weights, updated by any persistent tokens.

        The prefix is written in chunks of its own, so that the sequence starts on a chunk border; once, since
        it is the same for every row and document.
        """
        dtype = state_dtype(self.theta.weight)
        weights = tuple(W[None].to(dtype) for W in self.start_weights)
        zeros, conv_state = lambda: tuple(torch.zeros_like(W) for W in weights), self.zero_conv_state()
        state = MemoryState(weights if self.base is None else zeros(), zeros())
        if prefix_PD is not None and prefix_PD.shape[0]:
            prefix = prefix_PD[None]
            q, writes, conv_state = self._project_tokens(prefix, conv_state)
            _, state = self._run_operator(q, self._per_chunk(writes), state, record=False)
        if not self.carries_momentum:
            state = state._replace(momentum=zero_momentum(state.weights))
        expand = lambda t: t.expand(batch, *t.shape[1:])  # noqa: E731
        state = MemoryState(*(tuple(map(expand, part)) for part in state))
        return MemoryCache(DecodeState.of(state), expand_rows(conv_state, batch))

    def reset(self, cache: MemoryCache, reset_B: Tensor, prefix_PD: Tensor | None = None) -> MemoryCache:
        """``cache`` with rows ``reset_B`` [B] as in `start`, differentiable with respect to M_0.

        Raises:
            ValueError: the state is inside a chunk.
        """
        if cache.memory.position:
            raise ValueError(
                f"reset: the state is {cache.memory.position} tokens into a chunk "
                f"of {self.config.chunk_size}; reset rows on a chunk border"
            )
        return reset_rows(cache, reset_B, self.start(1, prefix_PD))

    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` tokens: memory, open chunk, convolution inputs."""
        c, opened = self.config, length % self.config.chunk_size
        shapes = [W.shape[1:] for W in self.start_weights]
        outputs = [gate.out_features for gate in (self.alpha, self.eta, self.theta) if gate is not None]
        gates = sum(outputs) // c.heads + 3 - len(outputs)  # without momentum or decay, a zero per head
        by_channel = gates > 3
        per_head = state_numel(shapes, opened, self.rule, gates if by_channel else None)
        if not self.carries_momentum:
            recomputed = opened > 0 and (by_channel or not self.rule.linear)
            per_head -= (1 + recomputed) * (sum(D * F for D, F in shapes) - len(shapes))
        if c.write_budget is not None:
            per_head += opened
        if c.gates_per == "chunk" and opened:
            per_head += gates + self.rule.extra_gates
        state = state_dtype(self.theta.weight).itemsize * c.heads * per_head
        return state + self.conv_bytes()

    def read_bytes(self, length: int, segment: int) -> int:
        """Bytes that reading at the weights of each segment's start adds (`MAC`).

        A copy of those weights once the memory has been updated since, and the convolution state of q.
        """
        moved = length % segment >= self.config.chunk_size
        weights = sum(W.numel() for W in self.start_weights) if moved else 0
        return state_dtype(self.theta.weight).itemsize * weights + self.conv_bytes("q")

    def _project_tokens(
        self, x: Tensor, conv_state: ConvState, documents: Documents | None = None
    ) -> tuple[Tensor, Writes, ConvState]:
        """Return queries [B, T, H, E], the inputs of the update, and the convolution state."""
        (q, k, v), conv_state = self.project(x, "qkv", conv_state, documents)
        return q, Writes(k, v, *self.gates(x)), conv_state

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """alpha, eta, theta and the rule's own gates of tokens x [B, T, D], as in `Writes`."""
        sigmoids = self.sigmoids(x)
        none = torch.zeros_like(sigmoids["theta"][..., : self.heads])
        split = lambda y: y if y.shape[-1] == self.heads else y.unflatten(-1, (self.heads, -1))  # noqa: E731
        alpha, eta, theta = (split(sigmoids.get(name, none)) for name in ("alpha", "eta", "theta"))
        theta = self.config.max_theta * theta
        alpha = alpha if self.config.max_alpha == 1.0 else self.config.max_alpha * alpha
        if not self.decays:
            alpha = torch.zeros_like(alpha)
        extra = sigmoids.get("extra", none[..., :0]).unflatten(-1, (self.heads, self.rule.extra_gates))
        return alpha, eta, theta, extra

    def sigmoids(self, x: Tensor) -> dict[str, Tensor]:
        """Sigmoid of each gate's linear layer by name, [B, T, outputs] in the precision of the state."""
        layers = {"alpha": self.alpha, "eta": self.eta, "theta": self.theta, "extra": self.extra}
        logits = {name: layer(x) for name, layer in layers.items() if layer is not None}
        return {name: torch.sigmoid(y.to(state_dtype(y))) for name, y in logits.items()}

    def _per_chunk(
        self, writes: Writes, documents: Documents | None = None, cache: MemoryCache | None = None
    ) -> Writes:
        """Give each token the gates of its chunk's first token, with gates per chunk; this is causal."""
        if self.config.gates_per == "token":
            return writes
        T, b = writes.k.shape[1], self.config.chunk_size
        token = torch.arange(T, device=writes.k.device)
        within = token if documents is None else documents.position_BT.flatten()
        opened = 0 if cache is None else cache.memory.position
        first = token - (within + opened) % b
        gates = writes[2:]
        if cache is not None and cache.gates:  # prepended, at index 0
            first = (first + 1).clamp(min=0)
            gates = [torch.cat(pair, 1) for pair in zip(cache.gates, gates, strict=True)]
        return Writes(writes.k, writes.v, *(gate[:, first] for gate in gates))

    def _held(self, writes: Writes, memory: AnyState) -> tuple[Tensor, ...]:
        """`MemoryCache.gates` after these tokens."""
        if self.config.gates_per == "token" or not memory.position:
            return ()
        # copies: a view in the cache would keep all tokens of the call in memory
        return tuple(gate[:, -1:].clone() for gate in writes[2:])

    def _packed(
        self, x_BTD: Tensor, cache: MemoryCache, documents: Documents
    ) -> tuple[Tensor, Tensor, Writes, MemoryCache | None]:
        if documents.part:
            return self._packed_parts(x_BTD, cache, documents)
        _check_packed_start(cache)
        conv_state = {name: inputs[:1] for name, inputs in cache.conv_state.items()}
        q, writes, _ = self._project_tokens(x_BTD, conv_state, documents)
        flat = Writes(*(w.flatten(0, 1)[None] for w in writes))
        state = MemoryState(*(tuple(s[0] for s in part) for part in cache.start))
        y, _ = self._run_operator(
            q.flatten(0, 1)[None], self._per_chunk(flat, documents), state, documents.cu_seqlens
        )
        return y[0].view(*x_BTD.shape[:2], *y.shape[2:]), q, writes, None

    def _packed_parts(
        self, x_1TD: Tensor, cache: MemoryCache, documents: Documents
    ) -> tuple[Tensor, Tensor, Writes, MemoryCache]:
        """Parts of documents in one row, from a state of each or one of all; returns the state after each."""
        q, writes, conv_state = self._project_tokens(x_1TD, cache.conv_state, documents)
        N, (weights, momentum) = len(documents.cu_seqlens) - 1, cache.start
        state = MemoryState(tuple(W.expand(N, -1, -1, -1) for W in weights), momentum)
        y, after = self._run_operator(q, self._per_chunk(writes, documents), state, documents.cu_seqlens)
        memory = DecodeState.of(after)
        memory = memory if self.carries_momentum else _without_momentum(memory)
        return y, q, writes, MemoryCache(memory, conv_state)

    def extend(self, q: Tensor, writes: Writes, cache: MemoryCache) -> tuple[Tensor, MemoryCache]:
        """Write tokens after ``cache``; what q [B, T, H, E] reads after each, and the new cache."""
        c, state = self.config, cache.memory
        state = state._replace(momentum=expand_momentum(state.momentum, state.weights))
        theta, steps = self.steps(writes, cache)
        y, after = extend_memory(
            q, *writes[:4], theta, state, chunk_size=c.chunk_size, activation=c.activation,
            surprise_bound=c.surprise_bound, backend=c.backend, extension=self.extension(writes.extra),
        )  # fmt: skip
        # copies: a view in the cache would keep all tokens of the call in memory
        held = (steps[..., steps.shape[-1] - after.position :].clone(),) if after.position else ()
        held = held if c.write_budget is not None else ()
        return y, MemoryCache(after, cache.conv_state, self._held(writes, after), held)

    def steps(self, writes: Writes, cache: MemoryCache) -> tuple[Tensor, Tensor]:
        """theta after the write budget, for tokens written after ``cache``.

        And the effective steps of the open chunk's tokens and of these [B, H, p + T]; empty without a budget.
        """
        c = self.config
        if c.write_budget is None:
            return writes.theta, writes.theta.new_empty(0)
        held = (cache.memory.keys, cache.steps[0]) if cache.steps else None
        theta, steps = effective_steps(
            writes.k, writes.eta, writes.theta, c.chunk_size, held=held, budget=c.write_budget
        )
        return theta, torch.cat([*cache.steps, steps.transpose(1, 2)], 2)

    def _write(self, q: Tensor, writes: Writes, cache: MemoryCache) -> tuple[Tensor, MemoryCache]:
        writes = self._per_chunk(writes, cache=cache)
        y, after = self.extend(q, writes, cache)
        if self.watcher is not None:
            self.watcher.on_write(q, writes, cache, after)
        if self.recorder is not None:
            self.recorder.on_update(
                self, lambda q: self.extend(q, writes, cache)[0], writes, after.memory.memory(), None
            )
        if not self.carries_momentum:
            after = after._replace(memory=_without_momentum(after.memory))
        return y, after

    def _run_operator(
        self,
        q: Tensor,
        writes: Writes,
        state: MemoryState,
        cu_seqlens: Tensor | None = None,
        *,
        record: bool = True,
    ) -> tuple[Tensor, MemoryState]:
        c, weights = self.config, state.weights
        if cu_seqlens is not None and self.recorder is not None and weights[0].ndim == 3:
            # from a start of each, states are returned
            weights = tuple(W.expand(len(cu_seqlens) - 1, *W.shape) for W in weights)
        momentum, theta = expand_momentum(state.momentum, weights), writes.theta
        if c.write_budget is not None:
            theta = write_budget(writes.k, writes.eta, theta, c.chunk_size, cu_seqlens, budget=c.write_budget)
        call = lambda q: neural_memory(  # noqa: E731
            q, *writes[:4], theta, weights, momentum, chunk_size=c.chunk_size, activation=c.activation,
            surprise_bound=c.surprise_bound, cu_seqlens=cu_seqlens, backend=c.backend,
            extension=self.extension(writes.extra),
        )  # fmt: skip
        y, after = call(q)
        if self.recorder is not None and record:
            self.recorder.on_update(self, lambda q: call(q)[0], writes, after, cu_seqlens)
        return y, after

    def output(self, y_BTHE: Tensor, x_BTD: Tensor) -> Tensor:
        """Normalise reads [B, T, H, E], gate them by x and project them to [B, T, D]."""
        if self.muted:
            return x_BTD.new_zeros(*x_BTD.shape[:-1], self.w_o.out_features)
        return self.merge(y_BTHE, x_BTD)


def _rule(config: MemoryConfig) -> Rule:
    try:
        rule = find_rule(config.rule)
    except ValueError as error:
        raise ValueError(f"memory.{error}") from None
    if rule.has_own_chunk and config.channel_gates == "all":
        raise ValueError(
            f"memory.channel_gates: all, but rule {rule} takes eta and theta per head; set alpha"
        )
    return rule


def _without_momentum(state: AnyState) -> AnyState:
    """``state`` with placeholders for its momentum."""
    state = state._replace(momentum=zero_momentum(state.weights))
    if isinstance(state, OpenChunk):
        state = state._replace(now=state.now._replace(momentum=state.momentum))
    return state


def zero_momentum(weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a placeholder, zeros [B, H, 1, 1] of each layer, for a momentum that no token uses."""
    return tuple(W.new_zeros(*W.shape[:2], 1, 1) for W in weights)


def expand_momentum(momentum: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Expand the momentum to the shape of the weights."""
    return tuple(S.expand_as(W) for S, W in zip(momentum, weights, strict=True))


def _check_packed_start(cache: MemoryCache) -> None:
    """Raise ValueError unless ``cache`` is a single state on a chunk border."""
    if cache.memory.position:
        raise ValueError(
            f"cache: {cache.memory.position} tokens into a chunk; documents must start on a chunk border"
        )
    rows = [W for W in cache.start.weights if W.shape[0] > 1 and W.stride(0)]
    if rows:
        raise ValueError(
            f"cache: {rows[0].shape[0]} sequences; packed documents must start from a single one, as start(1)"
        )
