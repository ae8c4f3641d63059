"""The memory operator: its parallel form against the recurrence, and that against first principles."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.cases import NATIVE
from titans_kernels import neural_memory, read_memory
from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.forms import chunked

TOKENS = ("q", "k", "v", "alpha", "eta", "theta")
CHUNKS = (1, 7, 16, 64)


class Case:
    """Random inputs of two heads: theta up to 0.1, alpha and eta exactly 0 and 1 at random tokens.

    ``edge`` sets (alpha, eta) everywhere; ``widths`` are those of the memory's layers.
    """

    def __init__(self, T: int, depth: int = 2, *, batch: int = 1, documents: int | None = None, edge=None,
                 dtype=torch.float64, theta: float = 0.1, widths=None):  # fmt: skip
        self.generator = torch.Generator().manual_seed(100 * T + depth)
        widths = widths or [3, *[4] * (depth - 1), 3]
        ends = widths[0], widths[0], widths[-1]
        q, k, v = (F.normalize(self.randn(batch, T, 2, n), dim=-1) for n in ends)
        # only one token of a row forgets all: after more of them a deep memory is as good as 0
        alpha, eta = self.gate(batch, T, 0.02, ones=0), self.gate(batch, T, 0.9, ones=0.05)
        gates = alpha, eta, theta * self.rand(batch, T, 2)
        if edge is not None:
            gates = *(torch.full_like(gates[2], value) for value in edge), gates[2]
        ready = lambda x: x.to(dtype).requires_grad_()  # noqa: E731
        self.inputs = [ready(x) for x in (q, k, v, *gates)]
        self.weights = tuple(ready(self.randn(2, *s) / s[0] ** 0.5) for s in pairwise(widths))
        rows = documents or batch
        self.momentum = tuple(ready(theta / 2 * self.randn(rows, 2, *s)) for s in pairwise(widths))

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def gate(self, batch: int, T: int, most: float, ones: float) -> Tensor:
        gate, chance = most * self.rand(batch, T, 2), self.rand(batch, T, 2)
        gate[chance < 0.05], gate[chance > 1 - ones] = 0, 1
        return gate.scatter(1, (T * self.rand(batch, 1, 2)).long(), 1.0)

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.inputs, *self.weights, *self.momentum]

    def run(self, **options) -> list[Tensor]:
        """y, weights, momentum and, of a random functional of them, the gradients of all inputs."""
        outputs = flat(neural_memory(*self.inputs, self.weights, self.momentum, **options))
        return [*outputs, *torch.autograd.grad(functional(outputs), self.leaves)]


def flat(result) -> list[Tensor]:
    y, state = result
    return [y, *state.weights, *state.momentum]


def functional(outputs: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    weight = lambda x: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)  # noqa: E731
    return torch.stack([(x * weight(x)).sum().double() for x in outputs]).sum()


def assert_close(expected: list[Tensor], found: list[Tensor], relative: float = 1e-9) -> None:
    for part, (a, b) in enumerate(zip(expected, found, strict=True)):
        norm, error = a.norm().item(), (b.to(a.dtype) - a).norm().item()
        allowed = relative * norm if norm > torch.finfo(b.dtype).tiny else 1e-12
        assert error <= allowed, f"tensor {part} is {error} off, of norm {norm}"


def assert_is_reference(case: Case, backend: str, **options) -> None:
    expected = case.run(backend="reference", **options)
    outputs = torch.cat([x.detach().flatten() for x in expected[: 1 + 2 * len(case.weights)]])
    assert torch.isfinite(outputs).all()
    assert outputs.abs().max() < 100
    assert_close(expected, case.run(backend=backend, **options))


def lengths(depth: int, chunk_size: int) -> list[int]:
    """Awkward ones, those about the first border, a last piece after two chunks; once a depth, a long row."""
    around = {1, 2, 63, 100, chunk_size - 1, chunk_size, chunk_size + 1, max(2 * chunk_size, 30) + 2} - {0}
    return sorted(around | ({257} if CHUNKS[depth - 1] == chunk_size else set()))


@pytest.mark.parametrize("chunk_size", [1, 7, 16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_chunked_is_the_recurrence(depth, chunk_size):
    for T, bound in product(lengths(depth, chunk_size), (None, 0.5)):
        assert_is_reference(Case(T, depth), "chunked", chunk_size=chunk_size, surprise_bound=bound)


def test_linear_online_memory_is_the_delta_rule():
    case = Case(40, 1, edge=(0.0, 0.0))
    q, k, v, *_, theta = (x.detach() for x in case.inputs)
    W, reads = case.weights[0].detach().expand(1, -1, -1, -1), []
    for t in range(q.shape[1]):
        kt, beta = k[:, t, :, :, None], 2 * theta[:, t, :, None, None]
        W = W - beta * kt @ (kt.mT @ W) + beta * kt @ v[:, t, :, None]
        reads.append((q[:, t, :, None] @ W)[:, :, 0])
    for backend in ("reference", "chunked"):
        y, state = neural_memory(*case.inputs, case.weights, chunk_size=1, backend=backend)
        assert_close([torch.stack(reads, 1), W], [y, state.weights[0]], 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("edge", list(product((0.0, 1.0), repeat=2)))
@pytest.mark.parametrize("backend", ["chunked", NATIVE])
def test_gates_at_an_end_everywhere(edge, backend):
    for depth, (b, theta), chunks in product((1, 3), ((1, 0.1), (7, 0.1), (16, 0.01), (64, 0.0005)), (1, 2)):
        case, bound = Case(b * chunks, depth, edge=edge, theta=theta), 0.5 if chunks == 1 else None
        assert_is_reference(case, backend, chunk_size=b, surprise_bound=bound)


@pytest.mark.parametrize("activation", sorted(name for name, f in ACTIVATIONS.items() if not f.gated))
def test_slopes_are_those_of_autograd(activation):
    f = ACTIVATIONS[activation]
    z = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    g = torch.linspace(1, 2, 101, dtype=torch.float64)
    (first,) = torch.autograd.grad(f.value(z).sum(), z, create_graph=True)
    second = torch.autograd.grad(first.sum(), z)[0] if first.requires_grad else torch.zeros_like(z)
    slopes = f.slopes(z.detach(), f.value(z.detach()))
    assert_close([first.detach(), second], list(slopes), 1e-12)
    assert_close([g * slopes[0]], [f.through(g, z.detach())], 1e-12)


@pytest.mark.parametrize("backend", ["reference", "autograd", "chunked", "auto"])
def test_a_final_state_that_is_not_wanted_has_no_layers(backend):
    case = Case(20, 2)
    call = partial(neural_memory, *case.inputs, case.weights, case.momentum, chunk_size=7, backend=backend)
    y, state = call(output_final_state=False)
    assert state == ((), ())
    expected = call()[0]
    grads = [torch.autograd.grad(x.square().sum(), case.leaves) for x in (y, expected)]
    assert_close([y, *grads[0]], [expected, *grads[1]], 0)


def kept_bytes(y: Tensor) -> int:
    """Bytes that the graph of y keeps for the operator's backward pass."""
    return sum(x.nbytes for x in y.grad_fn.saved_tensors)


def test_long_sequences_keep_only_every_few_states(monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 1)
    monkeypatch.setattr(chunked, "KEEP_WORK_BYTES", 0)
    case = Case(256, 1)
    run = lambda: neural_memory(*case.inputs, case.weights, chunk_size=1, backend="chunked")[0]  # noqa: E731
    states = 256 * 2 * 2 * 3 * 3 * 8  # tokens x heads x (weights and momentum)
    kept = kept_bytes(run())
    assert kept > states
    monkeypatch.setattr(chunked, "KEEP_BYTES", states // 8)
    assert kept_bytes(run()) <= kept - states * 7 // 8


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_cut_at_a_chunk_border_changes_nothing(backend):
    case = Case(50, 3)
    options = {"chunk_size": 16, "surprise_bound": 0.5, "backend": backend}
    whole = flat(neural_memory(*case.inputs, case.weights, case.momentum, **options))
    state, reads = (case.weights, case.momentum), []
    for piece in (slice(0, 16), slice(16, 48), slice(48, 50)):
        y, state = neural_memory(*(x[:, piece] for x in case.inputs), *state, **options)
        reads.append(y)
    cut = flat((torch.cat(reads, 1), state))
    expected, found = (torch.autograd.grad(functional(x), case.leaves) for x in (whole, cut))
    assert_close([*whole, *expected], [*cut, *found], 1e-12)


def test_no_later_token_and_no_other_row_reaches_a_read():
    case = Case(40, 3, batch=2)
    y, _ = neural_memory(*case.inputs, case.weights, case.momentum, chunk_size=16, surprise_bound=0.5)
    for t in (0, 15, 16, 25):
        for gradient in torch.autograd.grad(y[0, t].square().sum(), case.inputs, retain_graph=True):
            assert gradient[0, t + 1 :].count_nonzero() == 0
            assert gradient[1].count_nonzero() == 0
    into_gates = torch.autograd.grad(y[0, 39].square().sum(), case.inputs[1:])
    assert all(g[0, :39].count_nonzero() > 0 for g in into_gates)


def test_bfloat16_input_and_autocast_leave_the_state_in_float32():
    single = Case(20, 2, dtype=torch.float32)
    low = [x.detach().bfloat16() for x in single.inputs]
    y, state = neural_memory(*low, single.weights, chunk_size=16)
    assert y.dtype == torch.bfloat16
    assert {x.dtype for x in (*state.weights, *state.momentum)} == {torch.float32}
    exact = neural_memory(*(x.float() for x in low), single.weights, chunk_size=16)[1]
    assert_close(list(exact.weights), list(state.weights), 0)

    plain = single.run(chunk_size=16, surprise_bound=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = single.run(chunk_size=16, surprise_bound=0.5)
        read = read_memory(single.inputs[0], single.weights)
    assert_close(plain, mixed, 0)
    assert read.dtype == torch.float32


def test_inference_gives_the_same_and_keeps_nothing():
    case = Case(40, 2)
    expected = flat(neural_memory(*case.inputs, case.weights, case.momentum, chunk_size=7))
    with torch.inference_mode():
        found = flat(neural_memory(*case.inputs, case.weights, case.momentum, chunk_size=7))
    assert all(not x.requires_grad for x in found)
    assert_close([x.detach() for x in expected], found, 0)


def shorter(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] - 1)


# what is changed of a good call, and how its message begins
BAD = {
    "no tokens": (lambda a: {n: a[n][:, :0] for n in TOKENS}, "q: no rows, tokens or heads"),
    "no rows": (lambda a: {n: a[n][:0] for n in TOKENS}, "q: no rows, tokens or heads"),
    "chunk size": (lambda a: {"chunk_size": 0}, "chunk_size: 0 must be at least 1"),
    "chunk size type": (lambda a: {"chunk_size": 2.5}, "chunk_size: 2.5 is not a whole number"),
    "chunk size bool": (lambda a: {"chunk_size": True}, "chunk_size: True is not a whole number"),
    "no layer": (lambda a: {"weights": (), "momentum": None}, "weights: a memory needs at least one layer"),
    "k short": (lambda a: {"k": shorter(a["k"], 1)}, "k: shape (1, 19, 2, 3)"),
    "v heads": (lambda a: {"v": shorter(a["v"], 2)}, "v: shape (1, 20, 1, 3)"),
    "alpha": (lambda a: {"alpha": shorter(a["alpha"], 1)}, "alpha: shape (1, 19, 2)"),
    "eta": (lambda a: {"eta": shorter(a["eta"], 2)}, "eta: shape (1, 20, 1)"),
    "theta": (lambda a: {"theta": a["theta"][..., None]}, "theta: shape (1, 20, 2, 1)"),
    "k wide": (lambda a: {"k": shorter(a["k"], 3)}, "k, v: widths"),
    "v wide": (lambda a: {"v": shorter(a["v"], 3)}, "k, v: widths"),
    "weights": (lambda a: {"weights": (a["weights"][0], shorter(a["weights"][1], 1))}, "weights[1]: shape"),
    "momentum": (lambda a: {"momentum": (a["momentum"][0],) * 2}, "momentum[1]: shape"),
    "layers": (lambda a: {"momentum": a["momentum"][:1]}, "momentum: 1 layers, but weights has 2"),
    "activation": (lambda a: {"activation": "relu"}, "activation: 'relu' is not one of"),
    "backend": (lambda a: {"backend": "cuda"}, "backend: 'cuda' is not one of"),
    "bound": (lambda a: {"surprise_bound": 0.0}, "surprise_bound: 0.0 must be above 0"),
    "bound nan": (lambda a: {"surprise_bound": float("nan")}, "surprise_bound: nan must be above 0"),
    "bound negative": (lambda a: {"surprise_bound": -1}, "surprise_bound: -1 must be above 0"),
    "bound type": (lambda a: {"surprise_bound": "1"}, "surprise_bound: '1' is not a number"),
    "borders type": (
        lambda a: {"cu_seqlens": torch.tensor([0.0, 20.0])},
        "cu_seqlens: torch.float32 is not a tensor of int32 or int64",
    ),
    "borders list": (lambda a: {"cu_seqlens": [0, 20]}, "cu_seqlens: list is not a tensor of int32 or int64"),
    "borders shape": (
        lambda a: {"cu_seqlens": torch.tensor([[0, 20]])},
        "cu_seqlens: shape (1, 2) is not [N + 1]",
    ),
    "borders end": (
        lambda a: {"cu_seqlens": torch.tensor([0, 19])},
        "cu_seqlens: must rise from 0 to T = 20",
    ),
    "falling borders": (lambda a: {"cu_seqlens": torch.tensor([0, 6, 5, 20])}, "cu_seqlens: must rise"),
    "packed batch": (
        lambda a: {n: torch.cat([a[n]] * 2) for n in TOKENS} | {"cu_seqlens": torch.tensor([0, 20])},
        "cu_seqlens: packed documents need B = 1, not 2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named(name):
    case = Case(20, 2)
    good = dict(zip(TOKENS, case.inputs, strict=True))
    good |= {"weights": case.weights, "momentum": case.momentum}
    change, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}[^\n]*$"):
        neural_memory(**(good | change(good)))
