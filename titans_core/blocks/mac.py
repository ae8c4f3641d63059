"""MAC, memory as context."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from titans_core.attention import Attention, AttentionState, KeyCache, SegmentState
from titans_core.blocks.base import Block, Positions
from titans_core.blocks.mag import GateOptions
from titans_core.config import ModelConfig
from titans_core.documents import Documents, reset_rows
from titans_core.layers import EPS, Gate, RMSNorm, is_plain
from titans_core.memory import MemoryCache, NeuralMemory, expand_momentum, zero_momentum
from titans_core.projections import ConvState
from titans_kernels import DecodeState, Rule, packed_layout
from titans_kernels.attention import (
    CarriedState,
    SegmentOptions,
    SegmentTokens,
    SegmentWeights,
    attend_segments,
    serves_segments,
)
from titans_kernels.memory.forms.native import ACTIVATIONS
from titans_kernels.native import serves


class MACState(NamedTuple):
    """MAC's state.

    ``written`` is the memory that attention's outputs are written to, ``segment`` the weights that the open
    segment reads, ``seen`` the number of tokens in the open segment.
    """

    written: MemoryCache
    segment: tuple[Tensor, ...]
    read_conv_state: ConvState
    attention: SegmentState
    seen: int


class MAC(Block):
    """Attention over one segment Z at a time, with what the memory retrieves of earlier ones (eqs. 21-25).

    r = M(q) of norm Z at the weights before Z, y = Z + Attn([p] || r || norm Z), o = y + gate(y, M(norm y)).
    Only y at Z's positions is written; each y_i is read at the weights after writing y_1 .. y_i.
    """

    Options = GateOptions
    preset_expansion = 4 / 3

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        assert config.attention.segment_size is not None  # by `check`
        self.segment_size = config.attention.segment_size
        self.attention = Attention(config.d_model, config.attention)
        self.memory_norm = RMSNorm(config.d_model)
        self.memory = NeuralMemory(config.d_model, config.memory, initialized=False)
        self.gate = Gate(config.d_model, self.options.gating)

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        segment, window = config.attention.segment_size, config.attention.window
        if segment is None:
            raise ValueError("attention.segment_size: variant mac needs one")
        if segment % config.memory.chunk_size:
            raise ValueError(
                f"attention.segment_size: {segment} is not a multiple of memory.chunk_size "
                f"{config.memory.chunk_size}"
            )
        if window is not None and window < segment:
            raise ValueError(
                f"attention.window: variant mac attends to whole segments; leave out {window}, "
                f"or set attention.segment_size"
            )

    def mix(
        self, x_BTD: Tensor, state: MACState | None, positions: Positions
    ) -> tuple[Tensor, MACState | None]:
        prefix, attention = self.attention.start(self.persistent_PD)
        if positions.documents is not None:
            return self._packed(x_BTD, positions.documents, prefix, attention), None
        T, size = x_BTD.shape[1], self.segment_size
        # an intervention may have made segments shorter than the open one is already
        now = self._closed_at_border(state or self._start(x_BTD.shape[0], attention))
        first = min(T, -now.seen % size)
        segments, last = divmod(T - first, size)
        compiled = self._compiled_weights(x_BTD, prefix, now) if segments else None
        sizes = [first, *([segments * size] if compiled else segments * [size]), last]
        outputs = []
        for part in x_BTD.split([n for n in sizes if n], 1):
            if compiled and part.shape[1] >= size:
                o, now = self._compiled(part, now, compiled)
            else:
                o, now = self._segment(part, now, prefix)
            outputs.append(o)
        return torch.cat(outputs, 1), now

    def reset(self, state: MACState, reset_B: Tensor) -> MACState:
        if state.seen:
            raise ValueError(
                f"reset: the state is {state.seen} tokens into a segment of {self.segment_size}; "
                "reset rows on a segment border"
            )
        return reset_rows(state, reset_B, self._start(1, self.attention.start(self.persistent_PD)[1]))

    def state_bytes(self, length: int) -> int:
        x = self.memory_norm.weight
        keys = 4 * (length % self.segment_size) * x.nbytes
        convolutions = self.attention.conv_bytes("qkv") + self.attention.conv_bytes("kv")  # tokens and reads
        memory = self.memory.state_bytes(length) + self.memory.read_bytes(length, self.segment_size)
        return memory + keys + convolutions

    def _start(self, batch: int, attention: AttentionState) -> MACState:
        cache = self.memory.start(batch)
        reads = {name: inputs for name, inputs in cache.conv_state.items() if name == "q"}
        return MACState(cache, cache.start.weights, reads, SegmentState.after(attention, batch), 0)

    def _segment(
        self,
        x_BTD: Tensor,
        state: MACState,
        prefix: KeyCache | None,
        padded: bool = False,
    ) -> tuple[Tensor, MACState]:
        """The next tokens of the open segment, not beyond its end."""
        z = self.norm(x_BTD)
        position_BT = torch.arange(state.seen, state.seen + x_BTD.shape[1], device=x_BTD.device)[None]
        r, conv_state = self.memory.read(z, state.segment, state.read_conv_state)
        y, attention = self.attention.segment(z, r, position_BT, state.attention, prefix)
        y_BTD = x_BTD + y
        m, written = self.memory(self.memory_norm(y_BTD), state.written, padded=padded)
        o, seen = y_BTD + self.gate(y_BTD, m), state.seen + x_BTD.shape[1]
        return o, self._closed_at_border(MACState(written, state.segment, conv_state, attention, seen))

    def _closed_at_border(self, state: MACState) -> MACState:
        """The state, its segment closed if it ends here: a multiple of the chunk, so no chunk is open."""
        if not state.seen or state.seen % self.segment_size:
            return state
        return state._replace(segment=state.written.start.weights, attention=state.attention.closed(), seen=0)

    def _compiled_weights(
        self, x_BTD: Tensor, prefix: KeyCache | None, state: MACState
    ) -> SegmentWeights | None:
        """What `attend_segments` takes, or None if it does not support the block or the call."""
        memory, attention = self.memory, self.attention
        c = memory.config
        if (
            # a state may have been made in another precision
            not serves(x_BTD, self.memory_norm.weight, *(memory.base or ()), *_floating(state))
            or c.backend not in ("auto", "native") or c.activation not in ACTIVATIONS
            or type(memory.rule) is not Rule
            or c.residual != "none"
            or memory.output_norm is None
            or (c.channel_gates, c.gates_per) != ("none", "token")
            or memory.watcher or memory.recorder or memory.muted or not memory.decays
            or attention.muted or not attention.config.silu
        ):  # fmt: skip
            return None
        gates = [gate for gate in (memory.alpha, memory.eta, memory.theta) if gate is not None]
        read = (*memory.layers("qkv"), *attention.layers("kv"), memory.w_o, attention.w_o, *gates)
        if not is_plain(*read, memory.output_norm, self.memory_norm):
            return None
        none = x_BTD.new_empty(0, attention.w_k.out_features)
        k, v = (none, none) if prefix is None else (x[0].transpose(0, 1).flatten(1) for x in prefix)
        scale = None if attention.scale_H is None else attention.head_dim * attention.scale_H
        weight, bias = (torch.cat([getattr(gate, name) for gate in gates]) for name in ("weight", "bias"))
        weights = SegmentWeights(
            memory.output_norm.weight, memory.w_o.weight,
            attention.weights("kv"), attention.conv_weights("kv"), attention.w_o.weight,
            self.memory_norm.weight, memory.weights("qkv"), memory.conv_weights("qkv"),
            weight, bias, k, v, x_BTD.new_ones(attention.heads) if scale is None else scale,
        )  # fmt: skip
        return weights if serves_segments(x_BTD, weights, self.segment_size) else None

    def _compiled(
        self, x_BTD: Tensor, state: MACState, weights: SegmentWeights, documents: Documents | None = None
    ) -> tuple[Tensor, MACState]:
        """Whole segments from the start of one, or all of packed documents, in one call."""
        memory, attention, c = self.memory, self.attention, self.memory.config
        rotary = attention.rotary(torch.arange(self.segment_size)[None])
        z = self.norm(x_BTD)
        (read,), read_conv_state = memory.project(z, "q", state.read_conv_state, documents)
        gate = None if memory.output_gate is None else memory.output_gate(z)
        (q, k, v), conv_state = attention.project(z, "qkv", state.attention.tokens.conv_state, documents)
        start = state.written.start
        carried = CarriedState(
            start._replace(momentum=expand_momentum(start.momentum, start.weights)),
            attention.conv_inputs("kv", state.attention.reads.conv_state),
            memory.conv_inputs("qkv", state.written.conv_state),
        )
        options = SegmentOptions(
            self.segment_size, c.chunk_size, c.activation, c.surprise_bound, c.write_budget,
            None if memory.alpha is None else c.max_alpha, memory.eta is not None, c.max_theta,
            attention.unit_bits("kv"), memory.unit_bits("qkv"),
            rotary and (rotary.cos[0, 0], rotary.sin[0, 0]), memory.base or (), EPS,
        )  # fmt: skip
        tokens, borders = SegmentTokens(x_BTD, read, gate, q, k, v), documents and documents.cu_seqlens
        y_BTD, z, m, after = attend_segments(tokens, weights, carried, options, borders)
        o = y_BTD + self.gate(y_BTD, memory.output(m, z))
        if after is None:  # packed: the caller has no use for a state
            return o, state
        start = after.memory
        if not memory.carries_momentum:
            start = start._replace(momentum=zero_momentum(start.weights))
        written = MemoryCache(DecodeState.of(start), memory.conv_state("qkv", after.write_inputs))
        reads = AttentionState(None, attention.conv_state("kv", after.read_inputs))
        segment = SegmentState(reads, AttentionState(None, conv_state))
        return o, MACState(written, start.weights, read_conv_state, segment, 0)

    def _packed(
        self,
        x_BTD: Tensor,
        documents: Documents,
        prefix: KeyCache | None,
        attention: AttentionState,
    ) -> Tensor:
        """All documents' first segments, then all second ones, and so on; finished documents drop out."""
        start = self._start(1, attention)
        if compiled := self._compiled_weights(x_BTD, prefix, start):
            return self._compiled(x_BTD, start, compiled, documents)[0]
        layout = packed_layout(documents.cu_seqlens, self.segment_size, x_BTD.device)
        flat = x_BTD.flatten(0, 1)[None, :, None]  # the layout expects heads: one
        segments_MTD = layout.split(flat)[:, 0]
        state, outputs, first = self._start(layout.documents, attention), [], 0
        for rows, padded in zip(layout.rows, layout.ragged, strict=True):
            state = _first_rows(state, rows)
            here = slice(first, first + rows)
            o, state = self._segment(segments_MTD[here], state, prefix, padded)
            outputs.append(o)
            first += rows
        return layout.join(torch.cat(outputs)[:, None])[0, :, 0].view_as(x_BTD)


def _floating(state: MACState) -> list[Tensor]:
    return [x for x in tree_leaves(state) if isinstance(x, Tensor) and x.is_floating_point()]


def _first_rows(state: MACState, rows: int) -> MACState:
    """The state of the documents that continue; all are at the end of a segment."""
    state = tree_map(lambda t: t[:rows] if isinstance(t, Tensor) else t, state)
    return state._replace(segment=state.written.start.weights)
