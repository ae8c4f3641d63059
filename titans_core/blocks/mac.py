"""MAC, memory as context."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from titans_core.attention import Attention, AttentionState, SegmentState
from titans_core.blocks.base import Block, Positions
from titans_core.blocks.mag import GateOptions
from titans_core.config import ModelConfig
from titans_core.documents import Documents, Segments, reset_rows
from titans_core.layers import Gate, RMSNorm
from titans_core.memory import MemoryCache, NeuralMemory
from titans_core.projections import ConvState
from titans_core.window import KeyCache


class MACState(NamedTuple):
    """MAC's state."""

    written: MemoryCache  # the memory, to which attention's outputs are written
    segment: tuple[Tensor, ...]  # the weights that the open segment reads
    read_conv_state: ConvState
    attention: SegmentState
    seen: int  # tokens in the open segment


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
        self.segment_size, pointwise = config.attention.segment_size, config.pointwise_conv
        self.attention = Attention(config.d_model, config.attention, pointwise)
        self.memory_norm = RMSNorm(config.d_model)
        self.memory = NeuralMemory(config.d_model, config.memory, initialized=False, pointwise=pointwise)
        self.gate = Gate(config.d_model, self.options.gating)

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        size, window, chunk = config.attention.segment_size, config.attention.window, config.memory.chunk_size
        if size is None:
            raise ValueError("attention.segment_size: variant mac needs one")
        if size % chunk:
            raise ValueError(f"attention.segment_size: {size} is not a multiple of memory.chunk_size {chunk}")
        if window is not None and window < size:
            raise ValueError(
                f"attention.window: variant mac attends to whole segments; leave out {window}, "
                "or set attention.segment_size"
            )

    def mix(
        self, x_BTD: Tensor, state: MACState | None, positions: Positions
    ) -> tuple[Tensor, MACState | None]:
        prefix, attention = self.attention.start(self.persistent_PD)
        if positions.documents is not None:
            return self.packed(x_BTD, positions.documents, prefix, attention), None
        # an intervention may have made segments shorter than the open one is already
        state = self._closed_at_border(state or self.start(x_BTD.shape[0], attention))
        opened = -state.seen % self.segment_size
        if not opened:
            return self.segments(x_BTD, state, prefix)
        o, state = self.segment(x_BTD[:, :opened], state, prefix)
        if opened >= x_BTD.shape[1]:
            return o, state
        rest, state = self.segments(x_BTD[:, opened:], state, prefix)
        return torch.cat([o, rest], 1), state

    def reset(self, state: MACState, reset_B: Tensor) -> MACState:
        if state.seen:
            raise ValueError(
                f"reset: the state is {state.seen} tokens into a segment of {self.segment_size}; "
                "reset rows on a segment border"
            )
        return reset_rows(state, reset_B, self.start(1, self.attention.start(self.persistent_PD)[1]))

    def state_bytes(self, length: int) -> int:
        size, x = self.segment_size, self.memory_norm.weight
        convolutions = self.attention.conv_bytes("qkv") + self.attention.conv_bytes("kv")  # tokens and reads
        memory = self.memory.state_bytes(length) + self.memory.read_bytes(length, size)
        return memory + convolutions + 4 * (length % size) * x.nbytes

    def start(self, batch: int, attention: AttentionState) -> MACState:
        cache = self.memory.start(batch)
        reads = {name: inputs for name, inputs in cache.conv_state.items() if name == "q"}
        return MACState(cache, cache.start.weights, reads, SegmentState.after(attention, batch), 0)

    def segment(
        self, x_BTD: Tensor, state: MACState, prefix: KeyCache | None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, MACState]:  # fmt: skip
        """Read, attend and write (eqs. 21-25): within the open segment, or segments of documents in a row."""
        z = self.norm(x_BTD)
        seen = state.seen + x_BTD.shape[1]
        position_BT = torch.arange(state.seen, seen, device=x_BTD.device)[None]
        position_BT = position_BT if documents is None else documents.position_BT
        r, conv_state = self.memory.read(z, state.segment, state.read_conv_state, documents)
        y, attention = self.attention.segment(z, r, position_BT, state.attention, prefix, documents)
        y_BTD = x_BTD + y
        m, written = self.memory(self.memory_norm(y_BTD), state.written, documents)
        after = MACState(written, state.segment, conv_state, attention, seen)
        return y_BTD + self.gate(y_BTD, m), after if documents else self._closed_at_border(after)

    def segments(self, x_BTD: Tensor, state: MACState, prefix: KeyCache | None) -> tuple[Tensor, MACState]:
        """Tokens from the start of a segment on, one segment after the other."""
        outputs = []
        for part in x_BTD.split(self.segment_size, 1):
            o, state = self.segment(part, state, prefix)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    def layout(self, documents: Documents) -> Documents:
        return documents._replace(segments=Segments.of(documents, self.segment_size, self.is_compiled))

    def packed(
        self, x_BTD: Tensor, documents: Documents, prefix: KeyCache | None, attention: AttentionState
    ) -> Tensor:
        """Process all first segments, then all second ones, and so on; finished documents drop out."""
        layout = documents.segments or Segments.of(documents, self.segment_size)
        state, outputs = self.start(1, attention), []
        for tokens, segments in zip(layout.split(x_BTD), layout.steps, strict=True):
            state = _first_rows(state, len(segments.cu_seqlens) - 1)
            o, state = self.segment(tokens, state, prefix, segments)
            outputs.append(o)
        return layout.join(outputs, x_BTD)

    def _closed_at_border(self, state: MACState) -> MACState:
        """Close the segment if it ends here: at a multiple of the chunk, so no chunk is open."""
        if not state.seen or state.seen % self.segment_size:
            return state
        return state._replace(segment=state.written.start.weights, attention=state.attention.closed(), seen=0)


def _first_rows(state: MACState, rows: int) -> MACState:
    """Return the state of the documents that continue, all at the end of a segment."""
    state = state._replace(segment=state.written.start.weights, attention=state.attention.closed())
    return tree_map(lambda x: x[:rows] if isinstance(x, Tensor) else x, state)
