"""`accelerate`: a model's modules with their forward passes exchanged for C++ on a CPU.

A model is written in plain PyTorch. On a CPU at small widths its operators cost more to call than to run, so
methods of some modules have a second form here, equal up to rounding. `accelerate` gives each module of a
class in `METHODS` a subclass of its own class that calls the second form first; where it does not support a
call (another device, a hook, LoRA, torch.compile, a watcher) the module's own method runs.

This file knows modules by the qualified names of their classes and by their attributes, not by import.

Shapes: B batch, T tokens, D model width, H heads, E head width, C = H * E channels, K convolution width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from titans_kernels.attention import (
    CarriedState,
    SegmentOptions,
    SegmentTokens,
    SegmentWeights,
    WindowOptions,
    attend_segments,
    attend_window,
    serves_segments,
    serves_window,
)
from titans_kernels.layers import rms_norm, short_convolution
from titans_kernels.memory.forms.native import ACTIVATIONS
from titans_kernels.memory.forms.state import DecodeState
from titans_kernels.memory.options import state_dtype, without_autocast
from titans_kernels.memory.rules import Rule
from titans_kernels.native import library, serves
from titans_kernels.products import feed_forward, linear, token_losses

Method = Callable[..., Any]
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def accelerate(model: AnyModule) -> AnyModule:
    """Exchange methods of the model's modules in place, if it is on a CPU and the C++ library is available.

    Parameters, their names, hooks and the classes that ``isinstance`` sees stay. Modules of other classes,
    subclasses and modules replaced later run as they are. ``TITANS_NATIVE=0`` in the environment turns the
    library off.

    Returns:
        The model.
    """
    if all(p.device.type == "cpu" for p in model.parameters()) and library(torch.float32) is not None:
        for module in model.modules():
            if _name(type(module)) in METHODS and not _is_exchanged(type(module)):
                module.__class__ = _exchanged(type(module))
    return model


@cache
def _exchanged(cls: type[nn.Module]) -> type[nn.Module]:
    """Create a subclass with the methods of `METHODS` that is like the class in everything else."""
    own = {name: _first(method, getattr(cls, name)) for name, method in METHODS[_name(cls)].items()}
    own |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__reduce_ex__": _reduced}
    return type(cls)(cls.__name__, (cls,), {**own, "exchanged": cls})  # pyright: ignore[reportCallIssue]


def _first(method: Method, plain: Method) -> Method:
    """Try ``method``, then ``plain`` if it returns NotImplemented."""

    @functools.wraps(plain)
    def call(self: nn.Module, *args: Any, **options: Any) -> Any:
        if args and args[0].device.type == "cpu" and not torch.compiler.is_compiling():
            y = method(self, *args, **options)
            if y is not NotImplemented:
                return y
        return plain(self, *args, **options)

    return call


def _reduced(self: Any, protocol: Any) -> Any:
    """Copy and pickle as an exchanged module of the class, which alone can be imported."""
    _, _, *state = object.__reduce_ex__(self, protocol)
    return _restored, (type(self).exchanged,), *state


def _restored(cls: type[nn.Module]) -> nn.Module:
    kind = cls if library(torch.float32) is None else _exchanged(cls)
    return kind.__new__(kind)


@cache
def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_exchanged(cls: type) -> bool:
    return "exchanged" in vars(cls)


@cache
def _is_known(cls: type) -> bool:
    """Return True for a class whose attributes may be read, and not for a subclass under the same name."""
    plain = vars(cls).get("exchanged", cls)
    return _name(plain) in METHODS or _name(plain) in READ


def _intact(*modules: nn.Module) -> bool:
    """Return True if the modules' weights may be read in place of calling the modules.

    False with hooks, another class (LoRA wrappers, parametrisations) or a method replaced in the instance.
    """
    return all(
        _is_known(type(m))
        and not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)
        and not vars(m).keys() & REPLACEABLE
        for m in modules
    )


def _linear(layer: Any, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _norm(norm: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps, gate)


def _swiglu(mlp: Any, x: Tensor, norm: Any) -> Tensor:
    """`SwiGLU.forward`: norm, both products, SiLU and the residual connection in one pass."""
    if not _intact(norm, mlp.gate, mlp.up, mlp.down):
        return NotImplemented
    return feed_forward(x, norm.weight, mlp.gate.weight, mlp.up.weight, mlp.down.weight, norm.eps)


def _losses(model: Any, x_ND: Tensor, targets_N: Tensor) -> Tensor:
    """`LanguageModel.cross_entropy` without the logits."""
    return token_losses(x_ND, model.head.weight, targets_N) if _intact(model.head) else NotImplemented


def _heads(
    module: Any, x: Tensor, names: str, conv_state: dict[str, Tensor], documents: Any = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """`Projections.project`: one product, and one pass for SiLU, convolution and norm of all names."""
    layers, convs = _projections(module, names), _convolutions(module, names)
    if documents is not None and documents.part:  # each part has a state of its own
        return NotImplemented
    usable = serves(x, *(layer.weight for layer in layers)) and not torch.is_autocast_enabled("cpu")
    if not usable or not _intact(*layers, *convs):
        return NotImplemented
    y = linear(x, torch.cat([layer.weight for layer in layers]))
    if not module.silu:
        if module.normalized or convs:
            return NotImplemented
        heads = y.unflatten(-1, (len(names), module.heads, -1)).unbind(-3)
        # copies: a view in a KV cache would keep the others in memory
        return [h.contiguous() for h in heads], conv_state
    weight, state = _conv_weights(module, names), _conv_inputs(module, names, conv_state)
    borders, scaled = (
        None if documents is None else documents.cu_seqlens,
        [n in module.normalized for n in names],
    )
    pointwise = [conv.pointwise for conv in convs if conv.pointwise is not None]
    at_once = [False] * len(names) if pointwise else scaled
    heads = short_convolution(y, weight, state, at_once, module.heads, borders)
    if heads is None:
        return NotImplemented
    if pointwise:
        mixed = [layer(h.flatten(2)).view_as(h) for layer, h in zip(pointwise, heads, strict=True)]
        heads = [
            F.normalize(h, dim=-1, eps=1e-6) if unit else h for unit, h in zip(scaled, mixed, strict=True)
        ]
    if not convs or documents is not None:
        return heads, conv_state
    return heads, conv_state | _conv_state(module, names, _last_inputs(y, state))


def _projections(module: Any, names: str) -> list[Any]:
    return [getattr(module, f"w_{name}") for name in names]


def _convolutions(module: Any, names: str) -> list[Any]:
    return [getattr(module, f"conv_{name}") for name in names] if module.has_conv else []


def _conv_weights(module: Any, names: str) -> Tensor:
    """[K, names * C]; ones of width 1 without a convolution."""
    convs = _convolutions(module, names)
    if not convs:
        return module.w_k.weight.new_ones(1, len(names) * module.w_k.weight.shape[0])
    return torch.cat([conv.weight_KC for conv in convs], 1)


def _conv_inputs(module: Any, names: str, conv_state: dict[str, Tensor]) -> Tensor:
    """``conv_state`` as one tensor, [B, K - 1, names * C]."""
    if not module.has_conv:
        return module.w_k.weight.new_empty(1, 0, len(names) * module.w_k.weight.shape[0])
    return torch.cat([conv_state[name] for name in names], -1)


def _conv_state(module: Any, names: str, inputs: Tensor) -> dict[str, Tensor]:
    """Inverse of `_conv_inputs`."""
    return dict(zip(names if module.has_conv else "", inputs.chunk(len(names), -1), strict=False))


def _last_inputs(y: Tensor, state_BKC: Tensor) -> Tensor:
    """Return the convolution's last K - 1 inputs, including earlier ones if the call is shorter than that."""
    keep = state_BKC.shape[1]
    last = F.silu(y[:, max(0, y.shape[1] - keep) :])
    if last.shape[1] == keep:
        return last
    return torch.cat([state_BKC[:, last.shape[1] :].expand(len(y), -1, -1), last], 1)


def _sigmoids(memory: Any, x: Tensor) -> dict[str, Tensor]:
    """`NeuralMemory.sigmoids` of all gates in one product."""
    gates = {name: getattr(memory, name) for name in ("alpha", "eta", "theta", "extra")}
    gates = {name: layer for name, layer in gates.items() if layer is not None}
    layers = list(gates.values())
    if not _intact(*layers):
        return NotImplemented
    dtype, sizes = state_dtype(layers[0].weight), [layer.out_features for layer in layers]
    with without_autocast(x):
        weight, bias = (
            torch.cat([getattr(layer, name) for layer in layers]).to(dtype) for name in ("weight", "bias")
        )
        y = torch.sigmoid(linear(x.to(dtype), weight, bias)).split(sizes, -1)
    return dict(zip(gates, y, strict=True))


def _attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, position_BT: Tensor, state: Any, prefix: Any, documents: Any
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
    """`Attention.attend` without blocks of twice the window and queries of twice the width."""
    keys, T, alone = state.keys, q.shape[1], documents is None
    before = 0 if keys is None else keys.k.shape[2]
    if (
        module.cut
        or (alone and position_BT.shape != (1, T))
        or (keys is not None and len(keys.k) != len(q))
        or not serves_window(q, [k, v, *(prefix or ()), *(keys or ())], module.window, before)
    ):
        return NotImplemented
    keep, held_B = module.kept(state, before + T, T) if alone else (0, None)
    rotary = module.rotary(position_BT if alone else torch.arange(T)[None])
    rotary = None if rotary is None else (rotary.cos[0, 0], rotary.sin[0, 0])
    borders = None if alone else documents.cu_seqlens
    options = WindowOptions(module.window, keep, rotary, state.held_B, borders)
    scale = module.head_dim**-0.5 * _scale(module)
    y, after = attend_window(q, k, v, scale, options, prefix, keys)
    return y, after if alone else None, held_B


def _scale(attention: Any) -> Tensor:
    """Factor of the scores beside 1 / sqrt(E), [H]."""
    if attention.scale_H is None:
        return attention.w_q.weight.new_ones(attention.heads)
    return attention.head_dim * attention.scale_H


def _mac_segments(block: Any, x: Tensor, state: Any, prefix: Any) -> tuple[Tensor, Any]:
    """`MAC.segments`: whole segments in one call, then the last one if it is open."""
    whole = x.shape[1] // block.segment_size * block.segment_size
    weights = _segment_weights(block, x, prefix, state) if whole else None
    if weights is None:
        return NotImplemented
    o, state = _segments(block, x[:, :whole], state, weights)
    if whole == x.shape[1]:
        return o, state
    rest, state = block.segment(x[:, whole:], state, prefix, None)
    return torch.cat([o, rest], 1), state


def _mac_packed(block: Any, x: Tensor, documents: Any, prefix: Any, start: Any) -> Tensor:
    """`MAC.packed`: all documents in one call."""
    weights = _segment_weights(block, x, prefix, start)
    return NotImplemented if weights is None else _segments(block, x, start, weights, documents)[0]


def _segment_weights(block: Any, x: Tensor, prefix: Any, state: Any) -> SegmentWeights | None:
    """Return the weights of a call of `attend_segments`, or None if it does not support the call."""
    memory, attention = block.memory, block.attention
    c = memory.config
    if (
        # a state may have been made in another precision
        not serves(x, block.memory_norm.weight, *(memory.base or ()), *_floating(state))
        or block.is_compiled
        or not _intact(*memory.modules(), *attention.modules(), block.memory_norm)
        or c.backend not in ("auto", "native") or c.activation not in ACTIVATIONS
        or type(memory.rule) is not Rule
        or c.residual != "none"
        or memory.output_norm is None
        or (c.channel_gates, c.gates_per) != ("none", "token")
        or memory.watcher or memory.recorder or memory.muted or not memory.decays
        or attention.muted or not attention.silu or attention.config.output
        or any(conv.pointwise for m in (memory, attention) for conv in _convolutions(m, "q"))
    ):  # fmt: skip
        return None
    none = x.new_empty(0, attention.w_k.out_features)
    k, v = (none, none) if prefix is None else (p[0].transpose(0, 1).flatten(1) for p in prefix)
    gates = [gate for gate in (memory.alpha, memory.eta, memory.theta) if gate is not None]
    weight, bias = (torch.cat([getattr(gate, name) for gate in gates]) for name in ("weight", "bias"))
    joined = lambda m, names: torch.cat([layer.weight for layer in _projections(m, names)])  # noqa: E731
    weights = SegmentWeights(
        memory.output_norm.weight, memory.w_o.weight,
        joined(attention, "kv"), _conv_weights(attention, "kv"), attention.w_o.weight,
        block.memory_norm.weight, joined(memory, "qkv"), _conv_weights(memory, "qkv"),
        weight, bias, k, v, _scale(attention),
    )  # fmt: skip
    return weights if serves_segments(x, weights, block.segment_size) else None


def _floating(state: Any) -> list[Tensor]:
    return [x for x in tree_leaves(state) if isinstance(x, Tensor) and x.is_floating_point()]


def _segments(
    block: Any, x: Tensor, state: Any, weights: SegmentWeights, documents: Any = None
) -> tuple[Tensor, Any]:
    """Whole segments from the start of one, or all of packed documents, in one call."""
    memory, attention, c = block.memory, block.attention, block.memory.config
    rotary = attention.rotary(torch.arange(block.segment_size)[None])
    z = block.norm(x)
    (read,), read_conv_state = memory.project(z, "q", state.read_conv_state, documents)
    gate = None if memory.output_gate is None else memory.output_gate(z)
    (q, k, v), conv_state = attention.project(z, "qkv", state.attention.tokens.conv_state, documents)
    start = state.written.start
    momentum = tuple(S.expand_as(W) for S, W in zip(start.momentum, start.weights, strict=True))
    carried = CarriedState(
        start._replace(momentum=momentum),
        _conv_inputs(attention, "kv", state.attention.reads.conv_state),
        _conv_inputs(memory, "qkv", state.written.conv_state),
    )
    options = SegmentOptions(
        block.segment_size, c.chunk_size, c.activation, c.surprise_bound, c.write_budget,
        None if memory.alpha is None else c.max_alpha, memory.eta is not None, c.max_theta,
        _bits(attention, "kv"), _bits(memory, "qkv"),
        None if rotary is None else (rotary.cos[0, 0], rotary.sin[0, 0]), memory.base or (),
        block.memory_norm.eps,
    )  # fmt: skip
    borders = None if documents is None else documents.cu_seqlens
    given = SegmentTokens(x, read, gate, q, k, v)
    y, z, m, after = attend_segments(given, weights, carried, options, borders)
    o = y + block.gate(y, memory.output(m, z))
    if after is None:  # packed: the caller has no use for a state
        return o, state
    start = after.memory
    if not memory.carries_momentum:
        zeros = tuple(W.new_zeros(*W.shape[:2], 1, 1) for W in start.weights)
        start = start._replace(momentum=zeros)
    written = state.written._replace(
        memory=DecodeState.of(start), conv_state=_conv_state(memory, "qkv", after.write_inputs)
    )
    reads, tokens = state.attention
    now = type(state.attention)(
        reads._replace(keys=None, conv_state=_conv_state(attention, "kv", after.read_inputs)),
        tokens._replace(keys=None, conv_state=conv_state),
    )
    return o, type(state)(written, (), read_conv_state, now, 0)


def _bits(module: Any, names: str) -> int:
    """Bit i for the i-th name if it is normalised."""
    return sum(1 << i for i, name in enumerate(names) if name in module.normalized)


METHODS: dict[str, dict[str, Method]] = {
    "torch.nn.modules.linear.Linear": {"forward": _linear},
    "titans_core.layers.RMSNorm": {"forward": _norm},
    "titans_core.layers.SwiGLU": {"forward": _swiglu},
    "titans_core.memory.NeuralMemory": {"project": _heads, "sigmoids": _sigmoids},
    "titans_core.attention.Attention": {"project": _heads, "attend": _attend},
    "titans_core.blocks.mac.MAC": {"segments": _mac_segments, "packed": _mac_packed},
    "titans_core.model.LanguageModel": {"cross_entropy": _losses},
}
"""Methods exchanged, by class."""
READ = (
    "titans_core.layers.GateLinear",
    "titans_core.layers.CausalConv",
    "torch.nn.modules.container.ParameterList",
)
"""Further classes whose weights are read."""
REPLACEABLE = {name for methods in METHODS.values() for name in methods} | {"forward", "output"}
"""Methods that a module must not have of its own for its weights to be read."""
