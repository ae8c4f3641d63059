"""The baselines' recurrences against the naive ones of flash-linear-attention, an independent implementation;
and its GPU kernels, in Triton's interpreter, against ours.

Outputs, final states and every gradient, in float32 as theirs are. Their q is scaled by one over the root of
the key width; ours is scaled by the caller.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.test_linear_attention import documents as packed_rows
from titans_kernels import Extension, forms_used, linear_attention, neural_memory, recurrence
from titans_kernels.memory.forms import online
from titans_kernels.memory.forms.triton import pieces
from titans_kernels.recurrence import recurrent_linear_attention
from titans_kernels.scans import scan

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="fla-core is not installed: pip install -e '.[dev]'"
)
B, T, H, E, V = 2, 37, 3, 8, 5


def theirs(module: str, name: str) -> Callable[..., Any]:
    with warnings.catch_warnings():
        # its import warns of what it does without: a GPU, FlashAttention; and torch of its torch.jit
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"fla.ops.{module}.naive"), name)


def leaves(*shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def recurrent(T: int, E: int, V: int, channels: int) -> list[Tensor]:
    """q, k, v, gates of so many channels and the first state."""
    return leaves((B, T, H, E), (B, T, H, E), (B, T, H, V), (B, T, H, channels), (B, H, E, V))


def agree(ours: Sequence, other: Sequence, given: Sequence, within: float = 1e-5) -> None:
    """Outputs, and the gradients of a sum of them with fixed weights."""
    collected = []
    for outputs in (ours, other):
        weights = [torch.linspace(-1, 1, y.numel()).view_as(y) for y in outputs]
        loss = torch.stack([(y * w).sum() for y, w in zip(outputs, weights, strict=True)]).sum()
        collected.append([*outputs, *torch.autograd.grad(loss, given, retain_graph=True)])
    assert any(x.abs().max() > 0.1 for x in collected[0])
    torch.testing.assert_close(*collected, rtol=within, atol=within)


def heads_first(*xs: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in xs]


def test_decays_of_channels_and_heads_and_the_scan_are_gla_retention_and_hgrn():
    given = q, k, v, gate, state = recurrent(T, E, V, E)
    log_decay = F.logsigmoid(gate) / 4
    ours = linear_attention(q * E**-0.5, k, v, log_decay, state)
    agree(ours, theirs("gla", "naive_recurrent_gla")(q, k, v, log_decay, state, True), given)
    given = q, k, v = leaves((B, T, H, E), (B, T, H, E), (B, T, H, V))
    log_decay = torch.log1p(-(2.0 ** (-5 - torch.arange(H))))[:, None].expand(B, T, H, 1)
    ours, _ = linear_attention(q * E**-0.5, k, v, log_decay, torch.zeros(B, H, E, V))
    agree([ours], heads_first(theirs("retention", "naive_retention")(*heads_first(q, k, v))), given)
    given = x, gate, state = leaves((B, T, E), (B, T, E), (B, E))
    log_decay = F.logsigmoid(gate)
    ours = scan(log_decay.exp(), x, state)
    agree([ours], theirs("hgrn", "naive_recurrent_hgrn")(x, log_decay, state)[:1], given)


@pytest.mark.parametrize(("gated", "backend"), [
    *((gated, backend) for gated in (False, True) for backend in ("reference", "auto", "online")),
    (False, "chunked"),
])  # fmt: skip
def test_linear_memory_in_chunks_of_one_is_the_delta_rule(gated, backend):
    keys = (B, T, H, E)
    given = q, k, v, write, keep, state = leaves(keys, keys, (B, T, H, V), keys[:3], keys[:3], (B, H, E, V))
    if not gated:
        given = [x for x in given if x is not keep]
    zeros = torch.zeros(B, T, H)
    k, beta, log_decay = F.normalize(k, dim=-1), write.sigmoid(), F.logsigmoid(keep) if gated else zeros
    # a step of theta changes M by twice theta times the error
    y, after = neural_memory(
        q * E**-0.5, k, v, -torch.expm1(log_decay), zeros, beta / 2, (state,),
        chunk_size=1, extension=Extension(rule="gated_delta" if gated else "paper"), backend=backend,
    )  # fmt: skip
    if gated:
        form = theirs("gated_delta_rule", "naive_recurrent_gated_delta_rule")
        other, last = form(q, k, v, beta, g=log_decay, initial_state=state, output_final_state=True)
    else:
        o, last = theirs("delta_rule", "delta_rule_recurrence")(*heads_first(q, k, v, beta), state)
        (other,) = heads_first(o)
    agree([y, *after.weights], [other, last], given)


def by_tensors(*bounds: Any) -> Iterator[Any]:
    """`range` as a kernel's loop has it when compiled: over tensors."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    whole = [int(x.handle.data.item()) if hasattr(x, "handle") else x for x in bounds]
    return (interpreter._implicit_cvt(i) for i in range(*whole))


@pytest.fixture
def kernels(monkeypatch):
    """Their kernels in Triton's interpreter, each with the first of its tunings: there is nothing to time."""
    if not pieces.INTERPRETED:
        pytest.skip("a GPU is here: tests/kernels/test_gpu.py")
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    monkeypatch.setattr(tuner, "_bench", lambda *_, **__: [1.0] * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in (
            "common.chunk_h", "common.chunk_o", "gla.chunk", "simple_gla.chunk", "common.chunk_delta_h",
            "delta_rule.wy_fast", "gated_delta_rule.wy_fast", "gated_delta_rule.chunk_fwd",
        ):  # fmt: skip
            loaded = importlib.import_module(f"fla.ops.{module}")
            monkeypatch.setattr(loaded, "range", by_tensors, raising=False)


@pytest.mark.parametrize(("T", "channels", "documents"), [
    (17, 1, True), (17, 16, False),
    pytest.param(70, 1, False, marks=pytest.mark.slow), pytest.param(70, 16, True, marks=pytest.mark.slow),
])  # fmt: skip
def test_their_kernels_are_the_recurrence(kernels, T, channels, documents):
    given = q, k, v, gate, state = recurrent(T, 16, 32, channels)
    tokens, index = (q, k / 4, v, F.logsigmoid(gate), state), packed_rows(T) if documents else None
    actual, expected = recurrence.fla_attention(*tokens, index), recurrent_linear_attention(*tokens, index)
    agree(actual, expected, given)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_their_delta_rule_is_the_memory_in_chunks_of_one(kernels, monkeypatch, gated, documents):
    T, E = 70, 16
    shapes = *[(1, T, H, E)] * 3, *[(1, T, H)] * 2, (1 + 2 * documents, H, E, E)
    given = q, k, v, write, keep, state = leaves(*shapes)
    given = given if gated else [x for x in given if x is not keep]
    operands = torch.float32 if gated else torch.float16  # the kernel without a decay takes no float32
    alpha, zeros = 1 - keep.sigmoid() if gated else torch.zeros(1, T, H), torch.zeros(1, T, H)
    borders, results = torch.tensor([0, 1, 40, T], dtype=torch.int32) if documents else None, []
    for served in (False, True):
        monkeypatch.setattr(online, "fla_refusal", lambda *_, served=served: None if served else "a CPU")
        forms_used(forget=True)
        y, after = neural_memory(
            *(x.to(operands) for x in (q / 4, F.normalize(k, dim=-1), v)), alpha, zeros, write.sigmoid() / 2,
            (state,), chunk_size=1, cu_seqlens=borders, backend="online",
            extension=Extension(rule="gated_delta" if gated else "paper", is_delta_rule=True),
        )  # fmt: skip
        results.append([y, *after.weights])
        assert any("flash-linear" in form for form in forms_used()) == served
    agree(*reversed(results), given, within=5e-5 if gated else 2e-2)


# their kernels overflow where they then mask: numpy warns of it, a GPU does not
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in (exp2|multiply):RuntimeWarning")
@pytest.mark.parametrize("channels", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_token_that_forgets_everything_leaves_nothing_and_no_error(kernels, channels):
    # two of the kernels' chunks, or two of the parts that decays of channels are computed in
    T = 70 if channels == 1 else 30
    given = q, k, v, gate, state = recurrent(T, 16, 32, channels)
    for decay in (-1e6, -torch.inf):
        tokens = q, k / 4, v, F.logsigmoid(gate).index_fill(1, torch.tensor([20, T - 5]), decay), state
        # differences of sums of up to 92, in float32
        agree(recurrence.fla_attention(*tokens), recurrent_linear_attention(*tokens), given, within=5e-5)


@pytest.mark.slow
# Dynamo looks at the .grad of what it is given in the middle of a graph
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_leave_their_graph_for_the_kernels(kernels, monkeypatch):
    monkeypatch.setattr(recurrence, "fla_refusal", lambda *_: None)  # as on a GPU
    given = q, k, v, gate, state = recurrent(40, 16, 32, 1)

    def block(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor) -> list[Tensor]:
        return [y / 2 for y in linear_attention(q / 4, k, v, F.logsigmoid(gate), state)]

    forms_used(forget=True)
    torch._dynamo.reset()
    actual = torch.compile(block, backend="aot_eager")(*given)
    assert forms_used() == ["linear_attention: flash-linear-attention's chunk_simple_gla"]
    agree(actual, [y / 2 for y in recurrent_linear_attention(q / 4, k, v, F.logsigmoid(gate), state)], given)


class OnAGPU:
    """A stand-in for values on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, tokens: int, width: int):
        self.shape = (1, tokens, 1, width)


BF16 = torch.bfloat16


@pytest.mark.parametrize(("tokens", "width", "decays", "operands", "version", "major", "why"), [
    (64, 32, 16, BF16, "3.6.0", 9, None), (64, 32, 16, torch.float32, "3.6.0", 9, "TF32"),
    (64, 32, 16, torch.float64, "3.6.0", 9, "float64"), (1, 32, 16, BF16, "3.6.0", 9, "fewer than 16"),
    (64, 8, 16, torch.float16, "3.6.0", 9, "narrower"), (64, 17, 16, BF16, "3.6.0", 9, "odd"),
    # their backward of one decay a head would refuse
    (64, 32, 1, BF16, "3.6.0", 9, "Hopper"), (64, 32, 1, BF16, "3.7.0+git12ab", 9, "Hopper"),
    *((64, 32, 1, BF16, *of, None) for of in (("3.7.1", 9), ("3.8.0rc1", 9), ("3.6.0", 8), ("3.6.0", 10))),
])  # fmt: skip
def test_what_the_kernels_do_not_serve(monkeypatch, tokens, width, decays, operands, version, major, why):
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    reason = recurrence.fla_refusal(OnAGPU(tokens, width), 32, decays, operands)  # pyright: ignore[reportArgumentType]
    assert (reason is None) == (why is None)
    assert (why or "") in (reason or "")
    assert recurrence.fla_refusal(torch.zeros(1, 64, 1, 32), 32, 16, BF16) == "a CPU"
