"""MAC, memory as context."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titans_core.attention import Attention, SegmentState
from titans_core.blocks.base import Positions
from titans_core.blocks.mag import GateOptions
from titans_core.blocks.segmented import Segmented, first_rows
from titans_core.config import ModelConfig
from titans_core.documents import Documents, Segments, reset_rows
from titans_core.layers import Gate, RMSNorm
from titans_core.memory import MemoryCache, NeuralMemory
from titans_core.projections import ConvState
from titans_core.window import KeyCache


class MACState(NamedTuple):
    """State of a MAC block between two calls."""

    written: MemoryCache  # the memory, to which attention's outputs are written
    segment: tuple[Tensor, ...]  # the weights that the open segment reads; none between two segments
    read_conv_state: ConvState
    attention: SegmentState
    seen: int  # tokens in the open segment


class MAC(Segmented):
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
        prefix, before = self.opened(x_BTD, state, positions.documents)
        if positions.documents is not None:
            return self.packed(x_BTD, positions.documents, prefix, before), None
        # an intervention may have made segments shorter than the open one is already
        before = self._closed_at_border(before)
        opened = -before.seen % self.segment_size
        if not opened:
            return self.segments(x_BTD, before, prefix)
        o, after = self.step(x_BTD[:, :opened], before, prefix)
        if opened >= x_BTD.shape[1]:
            return o, after
        rest, after = self.segments(x_BTD[:, opened:], after, prefix)
        return torch.cat([o, rest], 1), after

    def reset(self, state: MACState, reset_B: Tensor) -> MACState:
        if state.seen:
            raise ValueError(
                f"reset: the state is {state.seen} tokens into a segment of {self.segment_size}; "
                "reset rows on a segment border"
            )
        return reset_rows(state._replace(segment=()), reset_B, self.open(reset_B[:1], None)[1])

    def state_bytes(self, length: int) -> int:
        size, x = self.segment_size, self.memory_norm.weight
        convolutions = self.attention.conv_bytes("qkv") + self.attention.conv_bytes("kv")  # tokens and reads
        memory = self.memory.state_bytes(length) + self.memory.read_bytes(length, size)
        return memory + convolutions + 4 * (length % size) * x.nbytes

    def open(self, like: Tensor, state: MACState | None) -> tuple[KeyCache | None, MACState]:
        prefix, attention = self.attention.start(self.persistent_PD)
        if state is not None:
            return prefix, state
        cache = self.memory.start(len(like))
        reads = {name: inputs for name, inputs in cache.conv_state.items() if name == "q"}
        attention = SegmentState.after(attention, len(like))
        return prefix, MACState(cache, (), reads, attention, 0)

    def segment(
        self, x_BTD: Tensor, state: MACState, prefix: KeyCache | None, documents: Documents | None
    ) -> tuple[Tensor, MACState]:
        """Read, attend and write (eqs. 21-25): within the open segment, or segments of documents in a row."""
        if documents is not None:
            state = first_rows(state, documents.cu_seqlens)
        z = self.norm(x_BTD)
        seen = state.seen + x_BTD.shape[1]
        position_BT = torch.arange(state.seen, seen, device=x_BTD.device)[None]
        position_BT = position_BT if documents is None else documents.position_BT
        weights = state.segment or state.written.start.weights
        r, conv_state = self.memory.read(z, weights, state.read_conv_state, documents)
        y, attention = self.attention.segment(z, r, position_BT, state.attention, prefix, documents)
        y_BTD = x_BTD + y
        m, written = self.memory(self.memory_norm(y_BTD), state.written, documents)
        after = MACState(written, weights, conv_state, attention, seen)
        return y_BTD + self.gate(y_BTD, m), self._closed_at_border(after, documents is not None)

    def segments(self, x_BTD: Tensor, state: MACState, prefix: KeyCache | None) -> tuple[Tensor, MACState]:
        """Tokens from the start of a segment on, one segment after the other."""
        outputs = []
        for part in x_BTD.split(self.segment_size, 1):
            o, state = self.step(part, state, prefix)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    def layout(self, documents: Documents) -> Documents:
        return documents._replace(segments=Segments.of(documents, self.segment_size, self.is_compiled))

    def packed(self, x_BTD: Tensor, documents: Documents, prefix: KeyCache | None, state: MACState) -> Tensor:
        """Process all first segments, then all second ones, and so on; finished documents drop out."""
        layout = documents.segments or Segments.of(documents, self.segment_size)
        outputs = []
        steps = zip(layout.split(x_BTD), layout.steps, layout.following, strict=True)
        for tokens, segments, following in steps:
            o, state = self.step(tokens, state, prefix, segments, following)
            outputs.append(o)
        return layout.join(outputs, x_BTD)

    def _closed_at_border(self, state: MACState, packed: bool = False) -> MACState:
        """Close the segment if it ends here, as packed ones do: no chunk is open at the end of one."""
        if not packed and (not state.seen or state.seen % self.segment_size):
            return state
        return state._replace(segment=(), attention=state.attention.closed(), seen=0)
