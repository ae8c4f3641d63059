"""The write budget: fast forms match the definition, splits are exact, and no token breaks a memory.

Shapes: B rows, T tokens, H heads, D key width.
"""

from functools import partial
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor, library
from torch.nn import functional as F

from tests.kernels.cases import NATIVE, PARALLEL
from titans_kernels import neural_memory, read_memory, state_dtype, write_budget
from titans_kernels.memory import budget
from titans_kernels.memory.forms.triton import budget as kernels
from titans_kernels.memory.forms.triton import pieces
from titans_kernels.memory.parts.layout import document_borders
from titans_kernels.memory.parts.passes import edge

same = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)

BORDERS = [0, 5, 5, 36, 40]
CASES = [
    ((2, 23, 2, 3), 1, None), ((2, 23, 2, 3), 5, None), ((2, 40, 3, 18), 16, None), ((1, 9, 1, 4), 64, None),
    ((1, 40, 2, 18), 16, BORDERS), ((1, 40, 1, 3), 7, BORDERS),
]  # fmt: skip


def inputs(B: int, T: int, H: int, D: int, *, grad: bool = True) -> list[Tensor]:
    """k, eta, theta in float64: like keys of any norm; zero keys, and gates at their ends."""
    generator = torch.Generator().manual_seed(T + D)
    rand = lambda *s: torch.rand(*s, generator=generator, dtype=torch.float64)  # noqa: E731
    direction = F.normalize(rand(B, 1, H, D) + 1.5 * (rand(B, T, H, D) - 0.5), dim=-1)
    k, eta, theta = direction * (0.5 + rand(B, T, H, 1)), 0.95 * rand(B, T, H), 0.4 * rand(B, T, H)
    k[:, 3::11], eta[:, 5::7], eta[:, 4::9], theta[:, 2::6] = 0, 1, 0, 0
    return [x.requires_grad_(grad) for x in (k, eta, theta)]


def with_gradients(form, leaves: list[Tensor], *options) -> list[Tensor]:
    limited = form(*leaves, *options)
    weight = torch.linspace(-1, 1, limited.numel(), dtype=limited.dtype).view(limited.shape).cos()
    return [limited, *torch.autograd.grad((limited * weight).sum(), leaves)]


def definition(
    k: Tensor, eta: Tensor, theta: Tensor, chunk_size: int, cu_seqlens: Tensor | None = None,
    budget: float = 1.0,
) -> Tensor:  # fmt: skip
    """theta' of `write_budget`, token by token as in its definition."""
    k, eta, theta = (x.to(state_dtype(k)) for x in (k, eta, theta))
    if cu_seqlens is not None:
        borders = pairwise(document_borders(cu_seqlens, k.shape[1]))
        parts = [[x[:, a:b] for x in (k, eta, theta)] for a, b in borders if a < b]
        return torch.cat([definition(*part, chunk_size=chunk_size, budget=budget) for part in parts], 1)
    steps, limited = [], []
    for t in range(k.shape[1]):
        first = t - t % chunk_size
        G = [(k[:, t] * k[:, u]).sum(-1).abs() for u in range(first, t + 1)]
        room = budget - sum((steps[u] * G[u - first] for u in range(first, t)), torch.zeros_like(theta[:, t]))
        # compares products instead of quotients, since 1 - eta and G_tt may be 0
        counts, slack = G[-1] >= torch.finfo(theta.dtype).tiny, budget * edge(theta)
        room = torch.where(room > slack, room, 0)
        over = counts & (2 * theta[:, t] * G[-1] > (room + slack) * (1 - eta[:, t]))
        most = room / torch.where(counts, G[-1], 1)
        finite = counts & (eta[:, t] < 1)
        full = 2 * theta[:, t] / torch.where(finite, 1 - eta[:, t], 1)
        steps.append(torch.where(over, most, torch.where(finite, full, 0)))
        limited.append(torch.where(over, most * (1 - eta[:, t]) / 2, theta[:, t]))
    return torch.stack(limited, 1)


INTERPRETED = pytest.mark.skipif(not pieces.INTERPRETED, reason="a GPU is here: tests/kernels/test_gpu.py")
TRITON = pytest.param("triton", marks=INTERPRETED)


@pytest.fixture
def form(request, monkeypatch) -> str:
    """The form that `write_budget` takes."""
    if request.param == "pytorch":
        monkeypatch.setattr(budget, "serves", lambda *tensors: False)
    elif request.param == "triton":
        monkeypatch.setattr(budget, "_has_kernel", lambda *call: True)
    return request.param


@pytest.mark.parametrize("form", [NATIVE, "pytorch"], indirect=True)
@pytest.mark.parametrize(("limit", "shape", "chunk_size", "borders"), [
    *((1.0, *case) for case in CASES), *((limit, *case) for limit in (0.6, 2.0) for case in CASES[2::3]),
])  # fmt: skip
def test_the_fast_forms_are_the_definition(shape, chunk_size, borders, form, limit):
    leaves, borders = inputs(*shape), None if borders is None else torch.tensor(borders)
    slow, fast = (partial(form, budget=limit) for form in (definition, write_budget))
    expected = with_gradients(slow, leaves, chunk_size, borders)
    assert 0.1 < (expected[0] < leaves[2]).double().mean() < 0.9  # many are limited
    assert (expected[0] <= leaves[2]).all()
    assert all(torch.isfinite(x).all() for x in expected)
    same(with_gradients(fast, leaves, chunk_size, borders), expected)


@INTERPRETED
@pytest.mark.parametrize(("shape", "chunk_size", "borders", "prefix", "tile"), [
    (*CASES[1], 0, 512), (*CASES[1], 3, 512), ((1, 70, 2, 18), 48, None, 3, 512),
    ((1, 130, 1, 8), 128, None, 0, 512), (*CASES[4], 0, 512), ((1, 40, 2, 18), 32, [0, 1, 1, 36, 40], 0, 512),
    ((1, 40, 2, 40), 32, [0, 1, 1, 36, 40], 0, 64),  # keys of three tiles
])  # fmt: skip
def test_the_kernels_in_the_interpreter(shape, chunk_size, borders, prefix, tile, monkeypatch):
    monkeypatch.setattr(kernels, "TILE_BYTES", tile)
    tokens = [x.float() for x in inputs(*shape, grad=False)]
    options = chunk_size, None if borders is None else torch.tensor(borders)
    result = kernels.forward(*tokens, *options, prefix)
    double = [x.double() for x in tokens]
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5, check_dtype=False)
    close(result, budget._forward(*double, *options, prefix))
    given = [torch.randn_like(x) for x in result]
    grads = kernels.backward([*given, *tokens, *result], *options)
    close(grads, budget._backward([x.double() for x in (*given, *tokens, *result)], *options))


@pytest.mark.parametrize(("form", "dtype"), [
    *product(["pytorch", *PARALLEL[1:]], [torch.float32, torch.float64]),
    pytest.param("triton", torch.float32, marks=INTERPRETED),
], indirect=["form"])  # fmt: skip
def test_gradient_of_repeated_keys_does_not_depend_on_rounding(form, dtype):
    """Keys in any direction give the gradient of keys along an axis, where all products are exact."""
    axis = torch.eye(9, dtype=dtype)[0].expand(1, 12, 1, 9)
    # steps of 0.4 leave 0.2 for the third; steps of 0.5 fit exactly
    for step in (0.4, 0.5, 1.0):
        gates = torch.full((1, 12, 1), 0.5, dtype=dtype), torch.full((1, 12, 1), step / 4, dtype=dtype)
        expected = with_gradients(write_budget, [x.clone().requires_grad_() for x in (axis, *gates)], 12)
        for seed in range(2 if form == "triton" else 8):
            turn = torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            turn = torch.linalg.qr(turn)[0].to(dtype)
            leaves = [x.clone().requires_grad_() for x in (axis @ turn, *gates)]
            limited, dk, *dgates = with_gradients(write_budget, leaves, 12)
            close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
            close([limited, dk, *dgates], [expected[0], expected[1] @ turn, *expected[2:]])


@pytest.mark.parametrize("form", [NATIVE, "pytorch", TRITON], indirect=True)
def test_gradient_at_a_limit_is_of_the_side_that_is_stated(form):
    """A step that exactly fits has a smaller one's gradient, a budget used up and a key of norm 0 none."""
    dtype, h = (torch.float32, 1e-2) if form == "triton" else (torch.float64, 1e-4)
    direction = F.normalize(torch.randn(5, dtype=dtype), dim=-1)
    k = direction.expand(1, 3, 1, 5).clone().requires_grad_()
    theta = torch.tensor([0.5, 0.2, 0.1], dtype=dtype).view(1, 3, 1).requires_grad_()
    steps = lambda k, theta: write_budget(k, torch.zeros_like(theta), theta, 8)[0, :, 0]  # noqa: E731
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-4 if form == "triton" else 1e-9)
    now, first = steps(k, theta), torch.tensor([1, 0, 0], dtype=dtype).view(1, 3, 1)
    below, above = (now - steps(k, theta - h * first)) / h, (steps(k, theta + h * first) - now) / h
    close(torch.stack([below, above]), torch.tensor([[1, -1, 0], [0, 0, 0]], dtype=dtype))
    rows = [torch.autograd.grad(x, [k, theta], retain_graph=True) for x in now]
    assert [row[1][0, 0, 0].item() for row in rows] == [1, 0, 0]
    assert not any(row[0].any() for row in rows)
    zero, theta = (k * (1 - first[..., None])).detach().requires_grad_(), (theta / 2 + 0.4 - first * 0.4)
    now, aside = steps(zero, theta), h * first[..., None] * direction
    close([(steps(zero + s, theta) - now)[1] / h for s in (aside, -aside)], [now.new_tensor(-0.25)] * 2)
    assert not torch.autograd.grad(now.sum(), zero)[0][0, 0].any()


@pytest.mark.parametrize("channels", ["eta", "theta", "both"])
def test_columns_of_a_token_shrink_by_the_factor_of_the_largest(channels):
    k, eta, theta = (x.detach() for x in inputs(2, 23, 2, 3))
    part = torch.rand(2, 23, 2, 4, dtype=k.dtype, generator=torch.Generator().manual_seed(0))
    part[..., 1] = 1
    eta = eta[..., None] * part if channels != "theta" else eta
    theta = theta[..., None] * part if channels != "eta" else theta
    leaves = [k, eta.clamp(max=0.9), theta]
    wide = [x if x.ndim == 4 else x[..., None] for x in leaves[1:]]
    largest = (wide[1] / (1 - wide[0])).amax(-1)
    factor = torch.where(largest > 0, definition(k, torch.zeros_like(largest), largest, 5) / largest, 1)
    same(write_budget(*leaves, 5), theta * (factor[..., None] if theta.ndim == 4 else factor))
    steps = 2 * wide[1] * factor[..., None] / (1 - wide[0]) * (k != 0).any(-1)[..., None]
    same(steps.amax(-1), budget.effective_steps(*leaves, 5)[1])
    fits = torch.full_like(theta, 1e-3)
    assert torch.equal(write_budget(k, leaves[1], fits, 5), fits)
    leaves = [x.requires_grad_() for x in leaves]
    assert all(torch.isfinite(g).all() for g in with_gradients(write_budget, leaves, 5))


@pytest.mark.parametrize("limit", [1.0, 0.7])
def test_steps_of_a_cut_chunk_equal_those_of_the_whole(limit):
    k, eta, theta = inputs(2, 23, 2, 3)
    options = {"chunk_size": 5, "budget": limit}
    expected, steps = budget.effective_steps(k, eta, theta, **options)
    for cut in range(1, 23):
        first, p = cut - cut % 5, cut % 5
        held = (k[:, first:cut].transpose(1, 2), steps[:, first:cut].transpose(1, 2)) if p else None
        actual, _ = budget.effective_steps(*(x[:, cut:] for x in (k, eta, theta)), **options, held=held)
        same(actual, expected[:, cut:])
        grads = [torch.autograd.grad(x.square().sum(), (k, eta, theta), retain_graph=True)
                 for x in (actual, expected[:, cut:])]  # fmt: skip
        same(*grads)


@pytest.mark.slow
def test_operators_keep_the_rules_of_the_library_and_compile():
    for shape, chunk_size, borders in (CASES[1], CASES[4]):
        leaves, borders = inputs(*shape), None if borders is None else torch.tensor(borders)
        options = chunk_size, borders
        library.opcheck(budget.budget_steps, (*leaves, *options, 0))
        tokens = [x.detach() for x in leaves]
        result = budget.budget_steps(*tokens, *options, 0)
        arguments = (*map(torch.ones_like, result), *tokens, *result, *options)
        library.opcheck(budget.budget_steps_backward, arguments)
    leaves = inputs(2, 23, 2, 3)
    run = torch.compile(partial(write_budget, chunk_size=5), fullgraph=True, backend="aot_eager")
    same(with_gradients(run, leaves), with_gradients(write_budget, leaves, 5))


LARGEST = {1.0: 6.0, 2.0: 12.0}
"""By budget the squared error that no token below reaches, at depth 1 to 4. Values have norm 1: 1 is a memory
that knows nothing, 4 one that holds the opposite of the value."""
ETAS, THETAS = (0.0, 0.5, 0.9, 0.95), (0.15, 0.5, 1.0)
ATTACKS = ("repeated", "nearly", "alternating", "flipping", "mixed", "crowded", "opposed", "opposed_random")


def attack(T: int, D: int, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values [attacks, T, H, D] of norm 1: 64 random tokens, then what `ATTACKS` says."""
    generator = torch.Generator().manual_seed(D)
    rows, H, t = len(ATTACKS), len(ETAS) * len(THETAS), torch.arange(T)[:, None, None]
    unit = lambda *s: F.normalize(torch.randn(*s, H, D, generator=generator), dim=-1)  # noqa: E731
    k, v = unit(1, 1).repeat(rows, T, 1, 1), unit(1, 1).repeat(rows, T, 1, 1)
    of = {name: i for i, name in enumerate(ATTACKS)}
    k[of["nearly"]] += 0.05 * unit(T)
    v[of["nearly"]] += 0.05 * unit(T)
    k[of["alternating"]] *= 1 - 2 * (t % 2)
    v[of["flipping"]] *= 1 - 2 * (t // chunk_size % 2)
    random = (t // 160 % 2 == 0).expand(T, H, D)
    k[of["mixed"]], v[of["mixed"]] = (torch.where(random, unit(T), x[of["mixed"]]) for x in (k, v))
    k[of["crowded"]], k[of["opposed_random"]] = unit(T).abs(), unit(T)  # all within one orthant; anywhere
    k[:, :64], v[:, :64] = unit(64), unit(64)
    return F.normalize(k, dim=-1), F.normalize(v, dim=-1)


@torch.no_grad()
def largest_errors(depth: int, chunk_size: int, *, limit: float | None, T: int = 640, D: int = 16) -> Tensor:
    """Of each attack, eta and theta the largest ``||M_{t-1}(k_t) - v_t||^2``, [attacks, etas, thetas]."""
    k, v = attack(T, D, chunk_size)
    rows, _, H, _ = k.shape
    pairs = torch.meshgrid(torch.tensor(ETAS), torch.tensor(THETAS), indexing="ij")
    eta, theta = (x.flatten().expand(rows, T, H) for x in pairs)
    generator = torch.Generator().manual_seed(depth)
    weights = tuple(torch.randn(rows, H, D, D, generator=generator) / D**0.5 for _ in range(depth))
    state, worst = (weights, None), torch.zeros(rows, H)
    opposed = [ATTACKS.index(name) for name in ("opposed", "opposed_random")]
    for start in range(0, T, chunk_size):
        part = slice(start, min(start + chunk_size, T))
        keys, values = k[:, part], v[:, part]
        if start >= 64:
            values[opposed] = -F.normalize(read_memory(keys, state[0])[opposed], dim=-1)
        alpha = torch.full_like(theta[:, part], 0.002)
        first = read_memory(keys[:, :1], state[0])
        # read with the next token's key: the prediction that the next token surprises
        steps = theta[:, part]
        if limit is not None:
            steps = write_budget(keys, eta[:, part], steps, chunk_size, budget=limit)
        following, after = neural_memory(
            torch.roll(keys, -1, 1), keys, values, alpha, eta[:, part], steps, *state, chunk_size=chunk_size,
            surprise_bound=1.0,
        )  # fmt: skip
        errors = (torch.cat([first, following[:, :-1]], 1) - values).square().sum(-1)
        worst, state = torch.maximum(worst, errors.nan_to_num(torch.inf).amax(1)), after
    return worst.view(rows, len(ETAS), len(THETAS))


# a token a chunk takes seconds
@pytest.mark.parametrize(("limit", "depth", "chunk_size"), [
    *((1.0, depth, 16) for depth in (1, 2, 3, 4)), *((2.0, depth, 64) for depth in (1, 2, 3, 4)),
    (1.0, 3, 64), (2.0, 4, 16), (1.0, 4, 1), (2.0, 2, 1),
])  # fmt: skip
def test_no_token_breaks_the_memory(limit, depth, chunk_size):
    result = largest_errors(depth, chunk_size, limit=limit)
    assert result.max() < LARGEST[limit], dict(zip(ATTACKS, result.amax((1, 2)).tolist(), strict=True))


def test_without_the_budget_repeated_tokens_do():
    assert largest_errors(2, 16, limit=None)[ATTACKS.index("repeated")].max() > 1e4


def _written(v: Tensor, bound: float | None, backend: str, depth: int = 1) -> Tensor:
    """Return the first layer's row of one token's key, after its value v [5].

    The errors of all layers have norm 2 |v|: the first layer was 0, the others are rotations.
    """
    k, gates = torch.eye(5, dtype=v.dtype)[0].view(1, 1, 1, 5), torch.zeros(3, 1, 1, 1, dtype=v.dtype)
    generator = torch.Generator().manual_seed(0)
    turn, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=generator))
    W = (torch.zeros(1, 5, 5, dtype=v.dtype), *[turn.to(v.dtype)[None]] * (depth - 1))
    _, state = neural_memory(
        k, k, v.view(1, 1, 1, 5), *gates[:2], gates[2] + 0.5, W, backend=backend, surprise_bound=bound,
        activation="identity", chunk_size=16,
    )  # fmt: skip
    return state.weights[0][0, 0, 0]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("backend", "dtype"), [
    *product(["reference", "generic", *PARALLEL], [torch.float32, torch.float64]),
    pytest.param("triton", torch.float32, marks=INTERPRETED),
])  # fmt: skip
def test_gradient_at_the_surprise_bound_is_that_within_it(backend, dtype, depth):
    """At |d| = c within a few roundings, in any direction. Above, only what is across d passes."""
    at = 1 - 8 * torch.finfo(dtype).eps
    for seed in range(1 if backend == "triton" else 2):
        draw = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        v = (F.normalize(draw, dim=-1) / 2).to(dtype).requires_grad_()
        slopes = {}
        for c in (None, at, 0.999):
            row = _written(v, c, backend, depth)
            (slopes[c],) = torch.autograd.grad(row @ row.detach(), v)
        close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
        close(slopes[at], slopes[None])
        close(slopes[0.999], torch.zeros_like(v))  # along d
    zero = torch.zeros(5, dtype=dtype, requires_grad=True)  # a norm of 0
    grads = [torch.autograd.grad(_written(zero, c, backend, depth).sum(), zero)[0] for c in (None, at)]
    assert grads[0].any()
    same(*grads)


@pytest.mark.parametrize("name", ["eta", "theta"])
def test_gates_of_another_shape_than_the_keys_are_refused(name):
    k, eta, theta, *_ = inputs(2, 9, 3, 4, grad=False)
    gates = {"eta": eta, "theta": theta} | {name: torch.zeros(1, 1, 1)}
    with pytest.raises(ValueError, match=rf"^{name}: \[1, 1, 1\] does not fit keys \[2, 9, 3, 4\]"):
        write_budget(k, gates["eta"], gates["theta"], 4)
