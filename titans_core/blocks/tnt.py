"""TNT (Li et al. 2025, arXiv 2511.07343): a global memory with large chunks, local ones with small chunks.

Shapes: B batch, T tokens, H heads, E head width; S tokens of a shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.blocks.base import Block, Positions
from titans_core.config import Frozen, MemoryConfig, ModelConfig, PositiveInt
from titans_core.documents import Documents, reset_rows
from titans_core.memory import MemoryCache, NeuralMemory, Writes
from titans_kernels import MemoryState, Rule, linear_attention, state_dtype
from titans_kernels.memory.forms.reference import clip_norm


@dataclass(frozen=True)
class ReadStart(Rule):
    """The paper's rule, but a token reads the weights at the start of its chunk: f(V_xi, q) of eq. 7."""

    reads: ClassVar[Literal["token", "chunk"]] = "chunk"


class TNTOptions(Frozen):
    """Options of TNT. The published runs have a global chunk of 2,048 and shards of 2,048 or 4,096 tokens."""

    global_chunk: PositiveInt = 64
    """Chunk size of the global memory; at most ``shard``, or tokens of one global chunk in two shards do not
    reach each other."""
    local_chunks: tuple[PositiveInt, ...] | None = None
    """Chunk size of each local memory; None: one, with ``memory.chunk_size``. Stage two of training lowers
    them (``start_from``)."""
    shard: PositiveInt = 64
    """S_L: a local memory starts anew from its learned weights every so many tokens of a document."""
    projection: Literal["clipped", "keys", "none"] = "clipped"
    """Local queries are projected onto the keys of the shard so far, ``q sum_s k_s k_s^T`` (Section 4.2):
    as published (keys), which grows with the number of keys; scaled down to norm 1 (clipped); or not at all.
    """


class LocalState(NamedTuple):
    """State of a local memory: that of its open shard."""

    cache: MemoryCache
    keys_BHEE: Tensor
    """Sum of ``k^T k`` over the keys of the open shard."""
    seen: int
    """Tokens of the open shard."""


class TNTState(NamedTuple):
    """States of a block's memories."""

    shared: MemoryCache
    local: tuple[LocalState, ...]


class LocalMemory(NeuralMemory):
    """A memory that starts anew every ``shard`` tokens, so that all shards of a text are computed at once."""

    def __init__(self, d_model: int, config: MemoryConfig, options: TNTOptions):
        super().__init__(d_model, config, initialized=False)
        self.shard, self.projection = options.shard, options.projection

    def fresh(self, batch: int) -> LocalState:
        """The state at the start of a text."""
        cache = self.start(batch)
        keys = cache.start.weights[0].new_zeros(batch, self.heads, self.head_dim, self.head_dim)
        return LocalState(cache, keys, 0)

    def forward_shards(
        self, x_BTD: Tensor, state: LocalState | None, documents: Documents | None
    ) -> tuple[Tensor, LocalState | None]:
        """As `NeuralMemory.forward`, in shards. Returns [B, T, D] and the state, None when packed."""
        B, T, _ = x_BTD.shape
        if documents is not None:
            q, writes, _ = self._project_tokens(x_BTD, self.zero_conv_state(), documents)
            flat, borders = [x.flatten(0, 1)[None] for x in (q, *writes)], documents.cu_seqlens
            y = self._whole(flat[0], Writes(*flat[1:]), documents.position_BT.flatten(), borders)
            return self._output(y[0].unflatten(0, (B, T)), x_BTD), None
        first = self.fresh(B)
        state = state or first
        q, writes, conv_state = self._project_tokens(x_BTD, state.cache.conv_state)
        opened, keys, seen, outputs, at = state.cache, state.keys_BHEE, state.seen, [], 0
        while at < T:
            whole = 0 if seen or self.watcher is not None else (T - at) // self.shard * self.shard
            here = slice(at, at + (whole or min(self.shard - seen, T - at)))
            part, now = q[:, here], Writes(*(x[:, here] for x in writes))
            if whole:
                flat = [x.flatten(0, 1)[None] for x in (part, *now)]
                starts = torch.arange(0, B * whole + 1, whole, dtype=torch.int32, device=q.device)
                position = torch.arange(whole, device=q.device).repeat(B)
                y = self._whole(flat[0], Writes(*flat[1:]), position, starts)[0].unflatten(0, (B, whole))
            else:
                part, keys = self._projected(part, now.k, keys)
                now = self._per_chunk(now, cache=opened)
                y, memory = self._write(part, now, opened.memory, record=True)
                opened = MemoryCache(memory, {}, self._held(now, memory))
                seen = (seen + part.shape[1]) % self.shard
                if not seen:
                    opened, keys = first.cache, first.keys_BHEE
            outputs.append(y)
            at = here.stop
        y = self._output(torch.cat(outputs, 1), x_BTD)
        return y, LocalState(opened._replace(conv_state=conv_state), keys, seen)

    def _whole(self, q: Tensor, writes: Writes, position: Tensor, borders: Tensor) -> Tensor:
        """Reads [1, N, H, E] of documents at ``position`` of each token, whose borders are ``borders``."""
        first = position % self.shard == 0
        index = first.cumsum(0)[None]
        starts = torch.nonzero(first).flatten() if not first.is_meta else borders[:-1]
        with torch.inference_mode(False):
            cu_seqlens = F.pad(starts, (0, 1), value=len(position)).to(torch.int32)
        start = self.start(1).start
        zero = start.weights[0].new_zeros(1, self.heads, self.head_dim, self.head_dim)
        q, _ = self._projected(q, writes.k, zero, index)
        if self.config.gates_per == "chunk":
            chunk = torch.arange(len(position), device=position.device)
            chunk = chunk - position % self.shard % self.config.chunk_size
            writes = Writes(*writes[:2], *(gate[:, chunk] for gate in writes[2:]))
        state = MemoryState(*(tuple(x[0] for x in part) for part in start))
        return self._run_operator(q, writes, state, cu_seqlens)[0]

    def _projected(
        self, q: Tensor, k: Tensor, keys: Tensor, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries projected onto the keys so far, the token's own among them, and the sum over keys."""
        if self.projection == "none":
            return q, keys
        unit = F.normalize(k.to(keys.dtype), dim=-1, eps=1e-6)
        no_decay = unit.new_zeros(*unit.shape[:3], 1)
        found, keys = linear_attention(q, unit, unit, no_decay, keys, index)
        return clip_norm(found, 1.0) if self.projection == "clipped" else found, keys


class TNT(Block):
    """o = x + V(norm x) + sum_i W_i(norm x): eq. 7, with projections of its own for each memory.

    V is the global memory: its chunks are ``global_chunk`` long, its state is carried, and a token reads it
    at the start of its chunk. A local memory W_i has a chunk of its own and starts anew every ``shard``
    tokens, so shards do not wait for each other. The text leaves open whether the memories share queries,
    keys and values; here each has its own, and outputs are added after each one's norm, gate and projection.
    The sum of projected keys starts anew with the shard. ``memory.rule`` is that of the local memories.
    """

    Options = TNTOptions
    uses_persistent = False
    preset_memory: ClassVar = {"momentum": False, "decay": False}

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        memory, options = config.memory, self.options
        shared = {"chunk_size": options.global_chunk, "rule": f"{__name__}:ReadStart", "rule_options": {}}
        self.shared = NeuralMemory(config.d_model, memory.model_copy(update=shared), initialized=False)
        self.local = nn.ModuleList(
            LocalMemory(config.d_model, memory.model_copy(update={"chunk_size": size}), options)
            for size in options.local_chunks or (memory.chunk_size,)
        )

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        options = cls.read_options(config)
        for size in options.local_chunks or (config.memory.chunk_size,):
            if options.shard % size:
                raise ValueError(
                    f"options.shard: {options.shard} is not a multiple of the local chunk {size}"
                )

    def mix(
        self, x_BTD: Tensor, state: TNTState | None, positions: Positions
    ) -> tuple[Tensor, TNTState | None]:
        z, documents = self.norm(x_BTD), positions.documents
        y, shared = self.shared(z, None if state is None else state.shared, documents)
        found, outputs = [], [x_BTD, y]
        for memory, before in zip(
            self.local, state.local if state else [None] * len(self.local), strict=True
        ):
            assert isinstance(memory, LocalMemory)
            y, after = memory.forward_shards(z, before, documents)
            outputs.append(y)
            found.append(after)
        after = None if shared is None else TNTState(shared, tuple(found))
        return torch.stack(outputs).sum(0), after

    def reset(self, state: TNTState, reset_B: Tensor) -> TNTState:
        local = []
        for memory, before in zip(self.local, state.local, strict=True):
            assert isinstance(memory, LocalMemory)
            if before.seen:
                raise ValueError(
                    f"reset: the state is {before.seen} tokens into a shard of {memory.shard}; "
                    "reset rows on a shard border"
                )
            local.append(reset_rows(before, reset_B, memory.fresh(1)))
        return TNTState(self.shared.reset(state.shared, reset_B), tuple(local))

    def state_bytes(self, length: int) -> int:
        keys = state_dtype(self.norm.weight).itemsize * self.shared.heads * self.shared.head_dim**2
        local = [memory.state_bytes(length) + keys for memory in self.local]  # pyright: ignore[reportCallIssue]
        return self.shared.state_bytes(length) + sum(local)
