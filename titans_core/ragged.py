"""Batches as transformers gives them: padded rows, packed documents, and states of rows of different lengths.

Shapes: B rows, T tokens of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.state import ModelState

IGNORED = -100
"""The label of a token without a loss."""


class Group(NamedTuple):
    """Rows of a batch that have read equally many tokens, and their state; None before the first token."""

    rows: list[int]
    state: ModelState | None

    @property
    def position(self) -> int:
        """Tokens that each row has read."""
        return self.state.position if self.state else 0

    def take(self, rows: list[int]) -> Group:
        """Return the group of these rows alone, which may repeat."""
        if rows == self.rows or self.state is None:
            return Group(rows, self.state)
        return Group(rows, self.state.take([self.rows.index(row) for row in rows]))


class RaggedState:
    """The states of a batch in the place of transformers' KV cache."""

    is_compileable = False

    def __init__(self, groups: list[Group], columns: int):
        self.groups, self.columns = groups, columns

    def get_seq_length(self, *_: Any) -> int:
        """Tokens given so far, masked ones included."""
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows that a beam search continues."""
        beams, groups = beam_idx.tolist(), []
        for group in self.groups:
            if new := [row for row, old in enumerate(beams) if old in group.rows]:
                groups.append(Group(new, group.take([beams[row] for row in new]).state))
        self.groups = groups

    def positions(self) -> list[int]:
        """Tokens that each row has read."""
        read = {row: group.position for group in self.groups for row in group.rows}
        return [read[row] for row in sorted(read)]


class PretrainedMixin:
    """Mixed into the models for transformers, whose ``forward`` refuses unknown arguments."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but only models whose weights are all there.

        Raises:
            ValueError: a weight is missing or has another shape; transformers would leave it uninitialised.
        """
        load = super().from_pretrained  # pyright: ignore[reportAttributeAccessIssue]
        model, info = load(*args, output_loading_info=True, **kwargs)
        absent = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
        if absent:
            raise ValueError(
                f"{model.name_or_path}: weights are missing or have another shape ({len(absent)} of them, "
                f"the first is {absent[0]}); the file is incomplete or of another config"
            )
        return (model, info) if output_loading_info else model

    def prepare_inputs_for_generation(
        self, *args: Any, inputs_embeds: Tensor | None = None, tokenizer: Any = None, **kwargs: Any
    ) -> Any:
        """Leave out the tokenizer, which `generate` gives with ``stop_strings``.

        `generate` takes ``inputs_embeds`` if the signature has the name.
        """
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return prepare(*args, inputs_embeds=inputs_embeds, **kwargs)


class Call(NamedTuple):
    """The tokens of a call, the unmasked ones of each row first."""

    x_BTD: Tensor
    read_BT: Tensor | None
    """True for the unmasked tokens; None if all are."""
    starts_BT: Tensor | None
    """The first token of each packed document; None if no row has several."""


def check_call(
    x_BTD: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, document_BT: Tensor | None,
    past: Any, labels: Tensor | None,
) -> Call:  # fmt: skip
    """Check the arguments of a ``forward``, and put unmasked tokens first. Raises ValueError, one line."""
    B, T = x_BTD.shape[:2]
    if not isinstance(past, RaggedState | None):
        raise ValueError(f"past_key_values: a {type(past).__name__}; give a call's output.past_key_values")
    if past is not None and (rows := len(past.positions())) != B:
        raise ValueError(f"past_key_values: a state of {rows} rows, not {B}; give these rows' own")
    if labels is not None:
        _check_labels(labels, B, T)
    read_BT = unmasked(attention_mask, past, B, T)
    order_BT = None
    if read_BT is not None:
        order_BT = (~read_BT).to(torch.uint8).argsort(dim=1, stable=True)
    starts_BT = document_starts(position_ids, document_BT, read_BT, order_BT, past, B, T)
    return Call(front(x_BTD, order_BT), read_BT, starts_BT)


def embedded(embedding: nn.Module, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Return the embedded tokens, [B, T, D]. Raises ValueError unless exactly one argument is given."""
    has_ids = input_ids is not None
    has_embeds = inputs_embeds is not None
    if has_ids and not has_embeds:
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids: {list(input_ids.shape)}, not [rows, tokens]")
        return embedding(input_ids)
    if has_embeds and not has_ids:
        return inputs_embeds
    raise ValueError("input_ids, inputs_embeds: give one of them")


def _check_labels(labels: Tensor, B: int, T: int) -> None:
    if labels.shape != (B, T):
        raise ValueError(f"labels: {list(labels.shape)}, not [{B}, {T}], a label for each token")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels: {labels.dtype}, not tokens")


def targets(
    labels: Tensor, read_BT: Tensor | None, count: Tensor | int | None
) -> tuple[Tensor, Tensor | int | None]:
    """Return ``labels`` [B, T] without those behind a masked token, and ``count`` less their share.

    A masked token predicts nothing, but transformers' Trainer counts the first token behind padding. With the
    share of this call, a step's loss is the mean of its micro-batches', each weighted by what Trainer counts.
    """
    if read_BT is None:
        return labels, count
    kept = labels.masked_fill(~F.pad(read_BT[:, :-1], (1, 0), value=True), IGNORED)
    if count is not None:
        some, every = ((x[:, 1:] != IGNORED).sum().clamp(min=1) for x in (kept, labels))
        count = count * some / every
    return kept, count


def unmasked(mask: Tensor | None, past: RaggedState | None, B: int, T: int) -> Tensor | None:
    """[B, T] bool, the tokens of this call that are read; None for all."""
    if mask is None:
        return None
    before = past.columns if past else 0
    if mask.shape not in {(B, T), (B, before + T)}:
        raise ValueError(
            f"attention_mask: {list(mask.shape)}, not [{B}, {before + T}]; only padding can be masked"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            "attention_mask: has values that are neither 0 nor 1; give packed documents by position_ids"
        )
    if past and mask.shape[1] > T and mask[:, :before].sum(1).tolist() != past.positions():
        raise ValueError("attention_mask: of earlier tokens it masks others than when they were read")
    read_BT = mask[:, -T:].bool()
    return None if read_BT.all() else read_BT


def front(x: Tensor, order_BT: Tensor | None) -> Tensor:
    """``x`` [B, T, ...] with the unmasked tokens of each row first."""
    return x if order_BT is None else x.take_along_dim(order_BT.view(*order_BT.shape, *[1] * (x.ndim - 2)), 1)


def documents(
    cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None, seq_idx: Tensor | None, B: int, T: int,
    device: torch.device,
) -> Tensor | None:  # fmt: skip
    """[B, T], the packed document of each token as given by borders or indices; None if by neither."""
    if cu_seq_lens_k is not None and (cu_seq_lens_q is None or not torch.equal(cu_seq_lens_q, cu_seq_lens_k)):
        raise ValueError("cu_seq_lens_k: differs from cu_seq_lens_q; a document reads itself alone")
    if seq_idx is not None and seq_idx.shape != (B, T):
        raise ValueError(f"seq_idx: {list(seq_idx.shape)}, not [{B}, {T}]")
    if cu_seq_lens_q is None:
        return seq_idx
    borders = cu_seq_lens_q.flatten()
    if borders[0] != 0 or borders[-1] != B * T or (borders.diff() < 0).any():
        cause = f"{borders.tolist()} does not rise from 0 to {B * T}"
        raise ValueError(f"cu_seq_lens_q: {cause}; give every document's offset, then the number of tokens")
    tokens = torch.arange(B * T, device=device)
    document_BT = torch.searchsorted(borders.to(tokens), tokens, right=True).view(B, T)
    if seq_idx is not None and not torch.equal(_changes(seq_idx), _changes(document_BT)):
        raise ValueError("seq_idx: has other documents than cu_seq_lens_q")
    return document_BT


def _changes(document_BT: Tensor) -> Tensor:
    return document_BT[:, 1:] != document_BT[:, :-1]


def document_starts(
    position_ids: Tensor | None, document_BT: Tensor | None, read_BT: Tensor | None, order_BT: Tensor | None,
    past: RaggedState | None, B: int, T: int,
) -> Tensor | None:  # fmt: skip
    """[B, T] bool, where packed documents begin, unmasked tokens first; None if no row has several."""
    starts = None if document_BT is None else _changes(front(document_BT, order_BT))
    if position_ids is not None:
        if position_ids.shape not in {(1, T), (B, T)}:
            raise ValueError(f"position_ids: {list(position_ids.shape)}, not [{B}, {T}]")
        position_BT = front(position_ids.expand(B, T), order_BT)
        jumps = position_BT[:, 1:] != position_BT[:, :-1] + 1
        if read_BT is not None:
            jumps &= front(read_BT, order_BT)[:, 1:]
        restarts = (position_BT == 0) | (position_BT == position_BT[:, :1])
        if (jumps & ~(restarts[:, 1:] if starts is None else starts)).any():
            raise ValueError(
                "position_ids: do not rise by 1; they may restart where a packed document begins"
            )
        first, read = position_BT[:, 0].tolist(), past.positions() if past else []
        if any(a != b for a, b in zip(first, read, strict=False)):
            raise ValueError(f"position_ids: begin at {first}, and {read} tokens were read before")
        starts = jumps if starts is None else starts
    return F.pad(starts, (1, 0), value=True) if starts is not None and starts.any() else None


def read_ragged(
    encode: Callable[[Tensor, ModelState | None], tuple[list[Tensor], ModelState | None]], outputs: int,
    x_BTD: Tensor, read_BT: Tensor | None, past: RaggedState | None, keep_state: bool,
) -> tuple[list[Tensor], RaggedState | None]:  # fmt: skip
    """Return the ``outputs`` streams [B, T, D] of ``encode(x, state)``, and the state after the last token.

    The tokens that are read, ``read_BT`` or all, are at the front of their rows in ``x_BTD``. Those behind
    them change nothing before, so that all rows go through the model at once, unless states are carried.
    """
    B, T = x_BTD.shape[:2]
    lengths = [T] * B
    if read_BT is not None and (past is not None or keep_state):
        lengths = read_BT.sum(1).tolist()
    groups: list[Group] = []
    parts: list[list[Tensor]] = []
    for group in past.groups if past else [Group(list(range(B)), None)]:
        for length in sorted({lengths[row] for row in group.rows}):
            rows, state = group.take([row for row in group.rows if lengths[row] == length])
            x = x_BTD if rows == list(range(B)) else x_BTD[rows]
            streams = [torch.zeros_like(x[:, :0])] * outputs
            if length:
                streams, state = encode(x[:, :length], state)
            parts.append([F.pad(stream, (0, 0, 0, T - length)) for stream in streams])
            groups.append(Group(rows, state))
    row = torch.tensor([row for group in groups for row in group.rows], device=x_BTD.device)
    streams = parts[0]
    if len(parts) > 1:
        streams = [torch.cat(part)[row.argsort()] for part in zip(*parts, strict=True)]
    if read_BT is not None:  # back to the place of each, a masked token's from the last one read
        place_BT = (read_BT.cumsum(1) - 1).clamp(min=0)
        streams = [stream.take_along_dim(place_BT[..., None], 1) for stream in streams]
    return streams, RaggedState(groups, (past.columns if past else 0) + T) if keep_state else None


def keep(x_BTD: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Return the last ``logits_to_keep`` tokens of ``x_BTD``, all for 0, or the given positions [N]."""
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.ndim != 1 or logits_to_keep.is_floating_point():
            raise ValueError(
                f"logits_to_keep: {list(logits_to_keep.shape)}, neither a number nor positions [N]"
            )
        return x_BTD[:, logits_to_keep]
    if logits_to_keep < 0:
        raise ValueError(f"logits_to_keep: {logits_to_keep} is below 0")
    return x_BTD[:, -logits_to_keep:]
