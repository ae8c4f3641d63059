"""The memory operator: its parallel form against the recurrence, and that against first principles."""

import re
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import PARALLEL, Case
from titans_kernels import DecodeState, Extension, Residual, extend_memory, neural_memory, read_memory
from titans_kernels.memory.forms import chunked

TOKENS = ("q", "k", "v", "alpha", "eta", "theta")
CHUNKS = (1, 7, 16, 64)


def lengths(depth: int, chunk_size: int) -> list[int]:
    """One token, those about the first border, a last piece after two chunks; once a depth, a long row."""
    around = {1, chunk_size - 1, chunk_size, chunk_size + 1, max(2 * chunk_size, 30) + 2} - {0}
    return sorted(around | ({257} if CHUNKS[depth - 1] == chunk_size else set()))


@pytest.mark.parametrize("chunk_size", [1, 7, 16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_parallel_forms_are_the_recurrence(depth, chunk_size):
    for T, bound in product(lengths(depth, chunk_size), (None, 0.5)):
        Case(T, depth).check(*PARALLEL, chunk_size=chunk_size, surprise_bound=bound)


@pytest.mark.slow
@pytest.mark.parametrize("edge", list(product((0.0, 1.0), repeat=2)))
def test_gates_at_an_end_everywhere(edge):
    for depth, (b, theta), chunks in product((1, 3), ((1, 1.0), (7, 0.5), (16, 0.1), (64, 0.005)), (1, 2)):
        case, options = Case(b * chunks, depth), {"chunk_size": b}
        options["surprise_bound"] = 0.5 if chunks == 1 else None
        with torch.no_grad():
            for gate, value in zip(case.tokens[3:5], edge, strict=True):
                gate.fill_(value)
            for steps in (case.tokens[5], *case.state.momentum):
                steps.mul_(theta)
        case.check(*PARALLEL, **options)


@pytest.mark.parametrize("backend", ["reference", "generic", "chunked", "auto"])
def test_packed_documents_from_one_start_return_no_state(backend):
    case, options = Case(20, documents=2), {"chunk_size": 7, "backend": backend}
    options["cu_seqlens"] = torch.tensor([0, 9, 20])
    shared = [tuple(x[0] for x in part) for part in case.state]
    y, state = neural_memory(*case.tokens, *shared, **options)
    assert state == ((), ())
    each = [tuple(x.expand(2, *x.shape) for x in part) for part in shared]
    expected, after = neural_memory(*case.tokens, *each, **options)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    assert [len(W) for W in after.weights] == [2, 2]


def kept_bytes(y: Tensor) -> int:
    """Bytes that the graph of y keeps for the operator's backward pass."""
    return sum(x.nbytes for x in y.grad_fn.saved_tensors)


def test_long_sequences_keep_only_every_few_states(monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK_BYTES", 1)
    monkeypatch.setattr(chunked, "KEEP_WORK_BYTES", 0)
    case = Case(256, 1)
    run = lambda: case.whole(chunk_size=1, backend="chunked")[0]  # noqa: E731
    states = 256 * 2 * 2 * 4 * 4 * 8  # tokens x heads x (weights and momentum)
    kept = kept_bytes(run())
    assert kept > states
    monkeypatch.setattr(chunked, "KEEP_BYTES", states // 8)
    assert kept_bytes(run()) <= kept - states * 7 // 8


def shorter(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] - 1)


def borders(*at) -> dict[str, Tensor]:
    return {"cu_seqlens": torch.tensor(at)}


INTS = "is not a tensor of int32 or int64"
HEADS = torch.ones(2, 4, dtype=torch.float64)


# what is changed of a good call, and how its message begins
BAD = {
    "no tokens": (lambda a: {n: a[n][:, :0] for n in TOKENS}, "q: no rows, tokens or heads"),
    "chunk size": (lambda a: {"chunk_size": 0}, "chunk_size: 0 must be at least 1"),
    "chunk size bool": (lambda a: {"chunk_size": True}, "chunk_size: True is not a whole number"),
    "no layer": (lambda a: {"weights": (), "momentum": None}, "weights: a memory needs at least one layer"),
    "k short": (lambda a: {"k": shorter(a["k"], 1)}, "k: shape (1, 19, 2, 4)"),
    "v heads": (lambda a: {"v": shorter(a["v"], 2)}, "v: shape (1, 20, 1, 4)"),
    "alpha": (lambda a: {"alpha": shorter(a["alpha"], 1)}, "alpha: shape (1, 19, 2)"),
    "eta": (lambda a: {"eta": shorter(a["eta"], 2)}, "eta: shape (1, 20, 1)"),
    "theta": (lambda a: {"theta": a["theta"][:, :5]}, "theta: shape (1, 5, 2) is not [B, T, H]"),
    "k wide": (lambda a: {"k": shorter(a["k"], 3)}, "k, v: widths"),
    "weights": (lambda a: {"weights": (a["weights"][0], shorter(a["weights"][1], 1))}, "weights[1]: shape"),
    "momentum": (lambda a: {"momentum": (a["momentum"][0],) * 2}, "momentum[1]: shape"),
    "layers": (lambda a: {"momentum": a["momentum"][:1]}, "momentum: 1 layers, but weights has 2"),
    "activation": (lambda a: {"activation": "relu"}, "activation: 'relu' is not one of"),
    "backend": (lambda a: {"backend": "cuda"}, "backend: 'cuda' is not one of"),
    "bound": (lambda a: {"surprise_bound": 0.0}, "surprise_bound: 0.0 must be above 0"),
    "bound nan": (lambda a: {"surprise_bound": float("nan")}, "surprise_bound: nan must be above 0"),
    "bound type": (lambda a: {"surprise_bound": "1"}, "surprise_bound: '1' is not a number"),
    "borders type": (lambda a: borders(0.0, 20.0), f"cu_seqlens: torch.float32 {INTS}"),
    "borders list": (lambda a: {"cu_seqlens": [0, 20]}, f"cu_seqlens: list {INTS}"),
    "borders shape": (lambda a: borders([0, 20]), "cu_seqlens: shape (1, 2) is not [N + 1]"),
    "borders end": (lambda a: borders(0, 19), "cu_seqlens: must rise from 0 to T = 20"),
    "falling borders": (lambda a: borders(0, 6, 5, 20), "cu_seqlens: must rise"),
    "packed batch": (
        lambda a: {n: torch.cat([a[n]] * 2) for n in TOKENS} | borders(0, 20),
        "cu_seqlens: packed documents need B = 1, not 2",
    ),
}
BAD |= {
    "base layers": (lambda a: {"extension": Extension(base=a["weights"][:1])},
                    "base: 1 layers, but weights has 2"),
    "base shape": (lambda a: {"extension": Extension(base=a["weights"])},
                   "base[0]: shape (1, 2, 4, 8) is not"),
    "half a norm": (lambda a: {"extension": Extension(Residual(HEADS))},
                    "residual: LN needs a weight and a bias, or neither"),
    "norm shape": (lambda a: {"extension": Extension(Residual(HEADS, HEADS[:1]))},
                   "residual: bias of shape (1, 4) is not [H, D] = (2, 4)"),
    "residual widths": (lambda a: {"extension": Extension(Residual()), "v": a["v"][..., :3], "momentum": None,
                                   "weights": (a["weights"][0], a["weights"][1][..., :3])},
                        "residual: x + f(x) of widths 4 and 3"),
    **{f"groups of {name}": (lambda a, name=name: {name: a[name][..., None].expand(-1, -1, -1, 3)},
                             f"{name}: 3 groups of columns, which 8 columns do not divide into")
       for name in ("alpha", "eta")},
    "numbers of groups": (lambda a: {name: a[name][..., None].expand(-1, -1, -1, n)
                                     for name, n in (("alpha", 2), ("theta", 4))},
                          "alpha: 2 groups of columns, another gate has 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named(name):
    case = Case(20)
    good = dict(zip(TOKENS, case.tokens, strict=True)) | case.state._asdict()
    change, message = BAD[name]
    given, refused = good | change(good), f"^{re.escape(message)}[^\n]*$"
    with pytest.raises((TypeError, ValueError), match=refused):
        neural_memory(**given)
    if name.startswith("base"):
        with pytest.raises(ValueError, match=refused):
            read_memory(given["q"], given["weights"], extension=given["extension"])
    if name in ("no tokens", "chunk size", "activation", "base layers"):
        state = DecodeState.of(case.state._make((given.pop("weights"), given.pop("momentum"))))
        with pytest.raises(ValueError, match=refused):
            extend_memory(**given, state=state)
