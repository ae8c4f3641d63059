"""Attention to a window with sink tokens, and the memory of what has left it.

The first ``sinks + window`` tokens see each other as in the source. Beyond them the sinks keep the distance
that they have there, and tokens that a layer keeps whole (`titans_core.adapt.kept`) have distance W, so
that no position grows with the text.

Shapes: B rows, T tokens of a call, h held tokens, D model width, H query heads, G heads of keys and values,
R = H / G, E head width, W window, S sinks; n blocks of c queries, which see W + c keys.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from titans_core.adapt import kept as keeping
from titans_core.adapt.families import Family
from titans_core.adapt.kept import AROUND, Kept
from titans_core.adapt.memory import AttentionMemory, MemoryCarry, MemoryOptions
from titans_kernels import without_autocast
from titans_kernels.memory.options import operand_dtype

UNSEEN = -1e30
"""Score of a key that a query does not see, so that a softmax over such keys alone is finite."""

Far = Literal["memory", "window", "full", "transfer"]
"""Replaces the tokens beyond the window. memory: the memory and the kept tokens. window: nothing; its
state can only be continued by such a call. full: the tokens themselves, as in the source model; no state
is returned. transfer: as full, and each memory's error against them is collected and differentiated."""


class Carry(NamedTuple):
    """An attention layer after any token: what it holds of the tokens before."""

    sinks_k: Tensor
    """The first S keys [B, S, G, E], before positions, as are all keys here."""
    sinks_v: Tensor
    k: Tensor
    """Of the last W tokens, [B, h, G, E]."""
    v: Tensor
    gates: Tensor
    """Their writing gates, [B, h, A]."""
    memory: MemoryCarry | None
    kept: Kept | None = None


class Pass:
    """One call of the model, as its attention layers share it."""

    def __init__(self, position: int = 0, blocks: tuple[Carry, ...] | None = None, far: Far = "memory"):
        self.position, self.blocks, self.far = position, blocks, far
        self.after: dict[int, Carry] = {}
        """The carry that each layer leaves, by its index."""
        self.errors: list[Tensor] = []
        """transfer: of each layer with a memory, the part [B] of the window's squared error that is left."""


class WindowAttention(nn.Module):
    """Mixed into a family's attention class, whose projections it uses."""

    family: Family
    layer_idx: int
    scaling: float

    def add_memory(self, config: Any, options: MemoryOptions) -> None:
        """Add the memory, unless the layer is to have the window alone."""
        heads, self.options = config.num_attention_heads, options
        groups = getattr(config, "num_key_value_heads", None) or heads
        with_memory = options.layers is None or self.layer_idx in options.layers
        self.shape = groups, getattr(self, "head_dim", config.hidden_size // heads)
        """Of a token's keys, [G, E]."""
        sizes = config.hidden_size, heads, *self.shape
        self.memory = AttentionMemory(*sizes, options) if with_memory else None
        self.most = options.kept if 2 * (self.layer_idx + 1) > config.num_hidden_layers else 0
        """Tokens kept whole; attention reads facts in the upper half of the layers."""

    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` tokens, on a border of chunks."""
        W, S, weight = self.options.window, self.options.sinks, next(cast(nn.Module, self).parameters())
        like = weight.new_empty(1, min(length, W), *self.shape)
        held = 2 * (like.nbytes + weight.new_empty(1, min(length, S), *self.shape).nbytes)
        if self.most:
            kept = keeping.start(like)
            G, size = self.shape[0], kept.score.itemsize
            held += (2 * like[:, :1].nbytes + G * size) * min(max(length - W - S, 0), self.most)
            held += size * (min(length, W + AROUND) + G * min(length, W)) + _bytes(kept.memory)
        if self.memory is None:
            return held
        gates = 4 * min(length, W) * self.memory.write.out_features
        return held + _bytes(self.memory.start(1, like)) + gates

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor] | None = None,
        call: Pass | None = None, **__: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attend; ``call`` has the state before and takes the one after. Returns [B, T, D]."""
        call, x = call or Pass(), hidden_states
        q, k, v = self.family.heads(self, x)
        if call.far in ("memory", "window"):
            y = self._carried(x, q, k, v, position_embeddings, call)
        else:
            y = self._full(q, k, v, position_embeddings)
            if call.far == "transfer" and self.memory is not None:
                call.errors.append(self._error(x, q, k, v, position_embeddings, y))
        return self.family.output(self, y.flatten(2)), None

    def _error(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, rotary: Any, full: Tensor) -> Tensor:
        """[B], the part of the window's squared error to full attention that the memory leaves."""
        start, beyond = self._start(q, k), self.options.window + self.options.sinks
        error = lambda y: (y - full.float())[:, beyond:].square().sum((1, 2, 3))  # noqa: E731
        with torch.no_grad():
            window, level, received = self._window(q, k, v, start, 0, rotary)
            window = window.float()
        with torch.enable_grad():
            read, near, _ = self._with_kept(q, window, level, received, start, k, v, 0, rotary)
            learnt, *_ = self._with_memory(x, q, read, near, start, k, v, 0)
            return _differentiated(error(learnt) / error(window).clamp(min=1e-9), cast(Any, self.memory))

    def _carried(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, rotary: Any, call: Pass) -> Tensor:
        before = call.blocks[self.layer_idx] if call.blocks else self._start(q, k)
        y, level, received = self._window(q, k, v, before, call.position, rotary)
        memory, gates, kept = before.memory, before.gates, before.kept
        if call.far == "memory":
            y, level, kept = self._with_kept(q, y, level, received, before, k, v, call.position, rotary)
        if self.memory is not None and call.far == "memory":
            y, memory, gates = self._with_memory(x, q, y, level, before, k, v, call.position)
        elif self.memory is not None:
            gates = torch.cat([gates, self.memory.gates(x)], 1)
        W, S = self.options.window, self.options.sinks
        # copies: views would keep the tokens of all calls
        last = lambda held, new: torch.cat([held, new], 1)[:, -W:].clone()  # noqa: E731
        first = lambda held, new: held if held.shape[1] == S else torch.cat([held, new], 1)[:, :S].clone()  # noqa: E731
        call.after[self.layer_idx] = Carry(
            first(before.sinks_k, k), first(before.sinks_v, v), last(before.k, k), last(before.v, v),
            gates[:, -W:].clone(), memory, kept,
        )  # fmt: skip
        return y

    def _start(self, q: Tensor, k: Tensor) -> Carry:
        none, memory = k[:, :0], self.memory
        gates = q.new_empty(q.shape[0], 0, memory.write.out_features if memory else 0, dtype=torch.float32)
        kept = keeping.start(k) if self.most else None
        return Carry(none, none, none, none, gates, memory.start(q.shape[0], q) if memory else None, kept)

    def _full(self, q: Tensor, k: Tensor, v: Tensor, rotary: Any) -> Tensor:
        """[B, T, H, E]: the source's attention from the first token."""
        R, positions = q.shape[2] // k.shape[2], torch.arange(q.shape[1], device=q.device)
        q, k = rotate(q, rotary, positions), rotate(k, rotary, positions)
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(R, 2), v.repeat_interleave(R, 2)))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling).transpose(1, 2)

    def _window(
        self, q: Tensor, k: Tensor, v: Tensor, before: Carry, position: int, rotary: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attend to window and sinks.

        Returns:
            [B, T, H, E]; [B, T, H], the log mean exp of its scores; and if tokens are kept [B, h + T, G], the
            attention that tokens receive from queries of this call that stand at least W / 2 later.
        """
        (B, T, H, E), G, W, S = q.shape, k.shape[2], self.options.window, self.options.sinks
        h, start, device = before.k.shape[1], min(position, S + W), q.device
        c = min(max(W // 4, 16), T)  # of W + c keys a query sees W
        n, at = -(-T // c), torch.arange(start, start + T, device=device)
        sinks_k, sinks_v = (torch.cat(pair, 1)[:, :S] for pair in ((before.sinks_k, k), (before.sinks_v, v)))
        sinks = torch.arange(sinks_k.shape[1], device=device)
        sinks_k = rotate(sinks_k, rotary, sinks).transpose(1, 2)[:, :, None]  # [B, G, 1, S, E]
        sinks_v = sinks_v.transpose(1, 2)[:, :, None]

        def queries(x: Tensor) -> Tensor:
            """[B, G, n, R c, E]."""
            x = F.pad(x, (0, 0, 0, 0, 0, n * c - T)).view(B, n, c, G, H // G, E)
            return x.permute(0, 3, 1, 4, 2, 5).reshape(B, G, n, -1, E)

        def blocks(x: Tensor) -> Tensor:
            """[B, G, n, W + c, E]."""
            x = F.pad(x, (0, 0, 0, 0, W - h, n * c - T))
            return x.unfold(1, W + c, c).permute(0, 2, 1, 4, 3).contiguous()

        keys = blocks(
            rotate(torch.cat([before.k, k], 1), rotary, torch.arange(start - h, start + T, device=device))
        )
        q = q * self.scaling
        query, key = torch.arange(c, device=device)[:, None], torch.arange(W + c, device=device)
        block = c * torch.arange(n, device=device)[:, None, None]
        sees = inside = (key > query) & (key <= W + query) & (block + key >= W - h)  # [n, c, W + c]
        query_at, held_and_new = queries(rotate(q, rotary, at)), torch.cat([before.v, v], 1)
        y, level = _attend(query_at, keys, blocks(held_and_new), sees)
        count, received = sees.sum(-1), None
        if S:
            near, near_level, sees = y, level, sinks <= start + block + query - W
            far = queries(rotate(q, rotary, at.clamp(max=S + W - 1)))
            y, level = _attend(far, sinks_k, sinks_v, sees)
            both = torch.logaddexp(near_level, level)
            y = near * (near_level - both).exp()[..., None] + y * (level - both).exp()[..., None]
            level, count = both, count + sees.sum(-1)
        if self.most:
            K = c + W // 2
            old = (inside & (key <= query + W // 2) & (block + query < T))[..., :K]
            received = _received(query_at, keys[..., :K, :], level, old)
            received = F.pad(received, (0, 0, 0, W))[:, W - h : W + T]

        def tokens(x: Tensor) -> Tensor:
            """[B, G, n, R c, ..] to [B, T, H, ..]."""
            x = x.unflatten(3, (-1, c))
            order = (0, 2, 4, 1, 3, *range(5, x.ndim))
            return x.permute(order).flatten(1, 2).flatten(2, 3)[:, :T]

        level = level.unflatten(3, (-1, c)) - count[:, None].log()
        return tokens(y.to(v.dtype)), tokens(level.flatten(3, 4)), received

    def _with_kept(
        self, q: Tensor, y: Tensor, level: Tensor, received: Tensor | None, before: Carry, k: Tensor,
        v: Tensor, position: int, rotary: Any,
    ) -> tuple[Tensor, Tensor, Kept | None]:  # fmt: skip
        """Return the window's output and levels with the kept tokens mixed in, and those kept after."""
        kept, T, W, S = before.kept, q.shape[1], self.options.window, self.options.sinks
        if kept is None or received is None:
            return y, level, None
        received = received + F.pad(kept.received, (0, 0, 0, T))
        surprise, kept = keeping.write(kept._replace(received=received[:, -W:].clone()), k, v, W)
        lead = max(S + W - position, 0)
        if lead >= T:
            return y, level, kept
        first = before.k.shape[1] + lead - W
        leaving = slice(first, first + T - lead)
        k, v = (torch.cat(pair, 1)[:, leaving] for pair in ((before.k, k), (before.v, v)))
        score = received[:, leaving] + keeping.WEIGHT * surprise[:, lead:, None]
        at = torch.zeros(T - lead, dtype=torch.long, device=q.device)
        keys, queries = rotate(k, rotary, at), rotate(q[:, lead:], rotary, at + W) * self.scaling
        read, far, kept = keeping.attend(_attend, queries, kept, keys, v, score, self.most)
        near, far = level[:, lead:], far - math.log(W + S)  # as the window's levels are
        both = torch.logaddexp(near, far)
        mixed = y[:, lead:] * (near - both).exp()[..., None] + read * (far - both).exp()[..., None]
        return (
            torch.cat([y[:, :lead], mixed.to(y.dtype)], 1), torch.cat([level[:, :lead], both], 1), kept,
        )  # fmt: skip

    def _with_memory(
        self,
        x: Tensor,
        q: Tensor,
        y: Tensor,
        level: Tensor,
        before: Carry,
        k: Tensor,
        v: Tensor,
        position: int,
    ) -> tuple[Tensor, MemoryCarry | None, Tensor]:
        """Return the window's output ``y`` with the memory's read mixed in, the memory after, and gates."""
        memory, T, W, S = self.memory, q.shape[1], self.options.window, self.options.sinks
        assert memory is not None
        assert before.memory is not None
        gates = torch.cat([before.gates, memory.gates(x)], 1)
        lead = max(S + W - position, 0)  # queries that see all tokens before them
        if lead >= T:
            return y, before.memory, gates
        first = before.k.shape[1] + lead - W
        leaving = slice(first, first + T - lead)
        k, v = (torch.cat(pair, 1)[:, leaving] for pair in ((before.k, k), (before.v, v)))
        read, after = memory.extend(q[:, lead:], k, v, gates[:, leaving], before.memory)
        far = before.memory.far_B[:, None] + torch.arange(1, T - lead + 1, device=q.device)
        share = memory.share(x[:, lead:], q[:, lead:], level[:, lead:], far)
        window = y[:, lead:].float()
        mixed = (window + share * (read - window)).to(y.dtype)
        return torch.cat([y[:, :lead], mixed], 1), after, gates


def _bytes(state: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(state) if isinstance(x, Tensor))


def _attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Call `_Attention` on operands of autocast's dtype, as its backward pass runs outside of autocast."""
    dtype = operand_dtype(q)
    return _Attention.apply(q.to(dtype), k.to(dtype), v.to(dtype), sees)


@torch.no_grad()
def _received(q: Tensor, k: Tensor, level: Tensor, sees: Tensor) -> Tensor:
    """[B, K + (n - 1) c, G]: the attention that tokens receive from n blocks of queries; mean of R heads.

    Args:
        q: scaled queries [B, G, n, R c, E].
        k: keys of each block, [B, G, n, K, E].
        level: log sums of exponentials of the queries, [B, G, n, R c].
        sees: [n, c, K].
    """
    dtype, (n, c, K) = operand_dtype(q), sees.shape
    p = (q.to(dtype) @ k.to(dtype).mT).to(level.dtype).sub_(level[..., None]).exp_()
    p = p.unflatten(3, (-1, c)).masked_fill_(~sees[:, None], 0).sum(4).mean(3).float()
    return F.fold(p.flatten(0, 1).mT, (K + (n - 1) * c, 1), (K, 1), stride=(c, 1)).view(*p.shape[:2], -1).mT


class _Attention(torch.autograd.Function):
    """Softmax attention and the log sum of exponentials of its scores, whose gradients torch does not take.

    With p = softmax(q k^T) and y = p v, the gradient of the scores is p (dy v^T - (dy . y) + dlevel): two
    passes over the scores in place of autograd's nine.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        """Return y [B, G, n, R c, E] and levels [B, G, n, R c], at least in float32.

        Args:
            ctx: of autograd.
            q: scaled queries [B, G, n, R c, E].
            k: keys [B, G, n or 1, K, E], and values ``v``.
            sees: [n, c, K]. A query that sees no key has a level below any other.
        """
        scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
        scores.unflatten(3, (-1, sees.shape[1])).masked_fill_(~sees[:, None], UNSEEN)
        p = scores.softmax(-1)
        level = scores.amax(-1) - p.amax(-1).log()  # the largest p is exp(largest score - level)
        p = p.to(v.dtype)
        y = p @ v
        ctx.save_for_backward(q, k, v, y, p)
        return y, level

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """From the gradients of y and the levels to the gradients of q, k and v."""
        q, k, v, y, p = ctx.saved_tensors
        dy, dlevel = gradients
        ds = (dy @ v.mT).to(dlevel.dtype)
        ds -= ((dy.to(ds.dtype) * y).sum(-1) - dlevel)[..., None]
        ds = ds.mul_(p).to(q.dtype)
        dk, dv = (x.sum_to_size(k.shape) for x in (ds.mT @ q, p.mT @ dy))
        return ds @ k, dk, dv, None


def _differentiated(loss_B: Tensor, module: nn.Module) -> Tensor:
    """Take the gradients of a sum of losses now, so that no graph is kept; rows must count alike."""
    if not loss_B.requires_grad:
        return loss_B
    parameters = [p for p in module.parameters() if p.requires_grad]
    with without_autocast(loss_B):
        gradients = torch.autograd.grad(loss_B.sum(), parameters)
    # zero, with these gradients
    zero = sum(((p - p.detach()) * g).sum() for p, g in zip(parameters, gradients, strict=True))
    return loss_B.detach() + zero / len(loss_B)


def rotate(x_BTHE: Tensor, rotary: tuple[Tensor, Tensor] | None, at_T: Tensor) -> Tensor:
    """Rotate heads to positions ``at_T`` [T] of tables (cos, sin) [1, P, E]; as they are without a table."""
    if rotary is None:
        return x_BTHE
    cos, sin = (table[0, at_T, None] for table in rotary)
    a, b = x_BTHE.chunk(2, -1)
    return x_BTHE * cos + torch.cat([-b, a], -1) * sin
