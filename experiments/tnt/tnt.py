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
    """State of a local memory in its open shard."""

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
    """A memory with weights and gates of its own, whose queries, keys and values are given.

    It starts anew every ``shard`` tokens, so that all shards of a text are computed at once. A shard starts
    from the learned weights of the call that has its first token: in training with a carried state these are
    the current step's, with their gradient. Within a shard that began in an earlier step the state is as
    detached as any other, and its start gets no gradient.
    """

    def __init__(self, d_model: int, config: MemoryConfig, options: TNTOptions):
        bare = {"conv": False, "output": ()}
        super().__init__(d_model, config.model_copy(update=bare), initialized=False)
        del self.w_q, self.w_k, self.w_v, self.w_o
        self.shard, self.projection = options.shard, options.projection

    def fresh(self, batch: int) -> LocalState:
        """Return the state at the start of a text."""
        cache = self.start(batch)
        keys = cache.start.weights[0].new_zeros(batch, self.heads, self.head_dim, self.head_dim)
        return LocalState(cache, keys, 0)

    def read_shards(
        self, q: Tensor, writes: Writes, state: LocalState | None, documents: Documents | None
    ) -> tuple[Tensor, LocalState | None]:
        """Write and read tokens [B, T, H, E]: what they read, and the state, None when packed."""
        B, T = q.shape[:2]
        if documents is not None:
            flat, borders = [x.flatten(0, 1)[None] for x in (q, *writes)], documents.cu_seqlens
            y = self._whole(flat[0], Writes(*flat[1:]), documents.position_BT.flatten(), borders)
            return y[0].unflatten(0, (B, T)), None
        opened, keys, seen = state if state is not None and state.seen else self.fresh(B)
        outputs, at = [], 0
        while at < T:
            whole = 0 if seen or self.watcher is not None else (T - at) // self.shard * self.shard
            tokens = slice(at, at + (whole or min(self.shard - seen, T - at)))
            part, now = q[:, tokens], Writes(*(x[:, tokens] for x in writes))
            if whole:
                flat = [x.flatten(0, 1)[None] for x in (part, *now)]
                starts = torch.arange(0, B * whole + 1, whole, dtype=torch.int32, device=q.device)
                position = torch.arange(whole, device=q.device).repeat(B)
                y = self._whole(flat[0], Writes(*flat[1:]), position, starts)[0].unflatten(0, (B, whole))
            else:
                part, keys = self._projected(part, now.k, keys)
                y, opened = self._write(part, now, opened)
                seen = (seen + part.shape[1]) % self.shard
                if not seen:
                    opened, keys, _ = self.fresh(B)
            outputs.append(y)
            at = tokens.stop
        return torch.cat(outputs, 1), LocalState(opened, keys, seen)

    def _whole(self, q: Tensor, writes: Writes, position: Tensor, borders: Tensor) -> Tensor:
        """Return reads [1, N, H, E] of packed documents with ``borders``, at each token's ``position``."""
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
        """Project queries onto the keys so far, the token's own included; return also the sum over keys."""
        if self.projection == "none":
            return q, keys
        unit = F.normalize(k.to(keys.dtype), dim=-1, eps=1e-6)
        no_decay = unit.new_zeros(*unit.shape[:3], 1)
        projected, keys = linear_attention(q, unit, unit, no_decay, keys, index)
        return clip_norm(projected, 1.0) if self.projection == "clipped" else projected, keys


class TNT(Block):
    """o = x + out(V(q) + sum_i W_i(q')): eq. 7; reads are added before the norm, gate and output projection.

    V is the global memory: its chunks are ``global_chunk`` long, its state is carried, and a token reads it
    at the start of its chunk. A local memory W_i has a chunk of its own and starts anew every ``shard``
    tokens, so shards do not wait for each other. All share queries, keys and values, as in eqs. 5 to 7, and
    have weights and gates of their own. The sum of projected keys starts anew with the shard.
    ``memory.rule`` is the local memories' rule.
    """

    Options = TNTOptions
    uses_persistent = False
    preset_memory: ClassVar = {"momentum": False, "decay": False}

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        memory, options = config.memory, self.options
        shared = {"chunk_size": options.global_chunk, "rule": f"{__name__}:ReadStart"}
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
        z, documents, states = self.norm(x_BTD), positions.documents, []
        before = None if state is None else state.shared
        y, q, writes, shared = self.shared.retrieve(z, before, documents)
        local = [None] * len(self.local) if state is None else state.local
        for memory, before in zip(self.local, local, strict=True):
            assert isinstance(memory, LocalMemory)
            local_writes = Writes(writes.k, writes.v, *memory.gates(z))
            read, after = memory.read_shards(q, local_writes, before, documents)
            y = y + read
            states.append(after)
        out = x_BTD + self.shared.output(y, z)
        return out, None if shared is None else TNTState(shared, tuple(states))

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
