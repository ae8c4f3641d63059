"""Random calls of the operators, with the compiled forms and with PyTorch's: each is the recurrence.

With a C++ compiler, the default form is the compiled one; the default without a compiler is tested on the
same cases.
"""

import random
from collections.abc import Iterator
from copy import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.cases import Call, assert_same, needs_compiler
from titans_kernels import MemoryState, Residual, forms_used, neural_memory
from titans_kernels.layers import rms_norm, short_convolution
from titans_kernels.memory import op
from titans_kernels.native import library


@pytest.fixture(params=[pytest.param("compiled", marks=needs_compiler), "pytorch"])
def forms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Which forms a CPU has."""
    if request.param == "pytorch":
        monkeypatch.setenv("TITANS_NATIVE", "0")
        library.cache_clear()
    yield request.param
    library.cache_clear()


class Drawn(Call):
    """A call of random sizes and options, in float64."""

    def __init__(self, seed: int):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rand = lambda *s: torch.rand(*s, generator=generator, dtype=torch.float64)  # noqa: E731
        one = draw.choice
        T, H, D, depth = draw.randint(1, 40), one([1, 2]), one([3, 5, 8, 17]), one([1, 1, 2, 3])
        packed, B = one([False, False, True]), one([1, 2])
        self.borders, self.first, N = None, T, B
        if packed:
            cuts = sorted(draw.choices(range(T + 1), k=draw.randint(0, 3)))
            self.borders, B, N = torch.tensor([0, *cuts, T]), 1, len(cuts) + 1
            self.first = int(self.borders[1])  # tokens of the first document
        self.kind = one(["none", "none", "none", "input", "norm"])
        hidden = [one([2, 16, 40]) for _ in range(depth - 1)]
        widths = [D, *hidden, D if self.kind != "none" else one([2, 5, D])]
        tokens = [F.normalize(rand(B, T, H, n) - 0.5, dim=-1) for n in (widths[0], widths[0], widths[-1])]
        gates = [0.05 * rand(B, T, H), 0.9 * rand(B, T, H), 0.05 * rand(B, T, H)]
        for gate, value in zip(gates, (0.0, one([0.0, 1.0]), 0.0), strict=True):
            gate[rand(B, T, H) < 0.1] = value
        shapes = [(H, *pair) for pair in pairwise(widths)]
        self.tokens = [x.requires_grad_() for x in (*tokens, *gates)]
        self.state = MemoryState(
            tuple(((rand(*s) - 0.5) * 3 / s[1] ** 0.5).requires_grad_() for s in shapes),
            tuple((0.1 * (rand(N, *s) - 0.5)).requires_grad_() for s in shapes),
        )
        own = one([False, False, True])
        self.base = tuple(((rand(*s) - 0.5) / s[1] ** 0.5).requires_grad_() for s in shapes) if own else None
        norm = (1 + rand(H, D)).requires_grad_(), (rand(H, D) - 0.5).requires_grad_()
        self.residual = {"none": None, "input": Residual(), "norm": Residual(*norm)}[self.kind]
        self.options = {
            "chunk_size": one([1, 2, 7, 16, 64]), "surprise_bound": one([None, 0.3, 1.0]),
            "activation": one(["silu", "gelu", "identity"]),
        }  # fmt: skip

    def run(self, backend: str) -> list[Tensor]:
        return self.whole(backend=backend, cu_seqlens=self.borders, **self.options)

    def in_pieces(self) -> Tensor:
        """Reads of the first row or document alone, cut where a chunk may be open."""
        first, T, (weights, momentum) = copy(self), self.first, self.state
        first.tokens = [x[:1, :T] for x in self.tokens]
        first.state = MemoryState(tuple(W[None] for W in weights), tuple(S[:1] for S in momentum))
        sizes = [n for n in (T // 3, T // 2 - T // 3, T - T // 2) if n]
        return first.pieces(sizes, **self.options)[0] if sizes else self.tokens[2][:1, :0]


@pytest.mark.parametrize("seed", range(60))
def test_memory_is_the_recurrence(forms, seed):
    call = Drawn(seed)
    expected = call.run("reference")
    forms_used(forget=True)
    actual = call.run("auto")
    online = {"neural_memory: online"} & {*forms_used()}
    assert ("neural_memory: native" in forms_used()) == (forms == "compiled" and not online)
    assert_same(expected, actual, call.leaves)
    with torch.no_grad():  # the compiled form continues a chunk without a gradient alone
        y = call.in_pieces()
        torch.testing.assert_close(y, expected[0][:1, : y.shape[1]], rtol=1e-10, atol=1e-11)


# Triton, with its widths and float32, has a file of its own
HERE = {form.name: form for form in op.FORMS if form.tolerance and form.name != "triton"}


@pytest.mark.parametrize("name", HERE)
def test_form_computes_what_its_row_of_the_table_says(name):
    form, computed = HERE[name], 0
    for seed in range(30):
        call = Drawn(seed)
        if name == "online":
            call.options |= {"chunk_size": 1, "surprise_bound": None}
        inputs = op.Inputs.of(*call.tokens)
        options = op.Options(
            *(call.options[name] for name in ("chunk_size", "activation", "surprise_bound")), call.borders,
            residual=call.residual, base=call.base or (),
        )  # fmt: skip
        if form.refusal(inputs, call.state.weights, options):
            with pytest.raises(ValueError, match="does not support this call: it "):
                call.run(form.name)
            continue
        result = call.run(form.name)
        computed += 1
        for x, y in zip(call.run("reference"), result, strict=True):
            assert (x - y).norm() <= form.tolerance * x.norm() + 1e-12
    assert computed >= 7


@pytest.mark.parametrize("seed", range(10))
def test_norm_and_convolution_are_their_definitions(forms, seed):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    randn = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_()  # noqa: E731
    B, T, D = draw.randint(1, 3), draw.randint(1, 9), draw.choice([1, 6, 17])
    x, weight, gate = randn(B, T, D), randn(D), randn(B, T, D)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    assert_same([expected], [rms_norm(x, weight, 1e-6)], [x, weight])
    assert_same([expected * gate * gate.sigmoid()], [rms_norm(x, weight, 1e-6, gate)], [x, weight, gate])
    K = draw.choice([1, 2, 4])
    kernel, state = randn(K, D), randn(B, K - 1, D)
    actual = short_convolution(x, kernel, state, [False], 1)
    # without the library the models have one of their own
    assert (actual is None) == (forms == "pytorch")
    if actual is not None:
        padded = torch.cat([state, F.silu(x)], 1)
        y = torch.stack([sum(kernel[j] * padded[:, K - 1 + t - j] for j in range(K)) for t in range(T)], 1)
        assert_same([y], [part.squeeze(2) for part in actual], [x, kernel, state])


def float32_error(backend: str, **options) -> float:
    """Largest relative error of reads or gradients, with keys of norm 2: four layers all but diverge."""
    generator, collected = torch.Generator().manual_seed(5), []
    randn = lambda *s: torch.randn(*s, generator=generator)  # noqa: E731
    rand = lambda: torch.rand(1, 256, 2, generator=generator)  # noqa: E731
    tokens = [*(randn(1, 256, 2, 8) / 2**0.5 for _ in range(3)), 0.02 * rand(), 0.6 * rand(), 0.1 * rand()]
    weights = [randn(2, 8, 8) * 1.4 / 8**0.5 for _ in range(4)]
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (*tokens, *weights)]
        y, _ = neural_memory(*leaves[:6], tuple(leaves[6:]), chunk_size=16, backend=backend, **options)
        functional = torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y).cos()
        collected.append([y.detach(), *torch.autograd.grad((y * functional).sum(), leaves)])
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(*collected, strict=True))


@pytest.mark.parametrize("backend", ["generic", "auto"])
def test_surprise_bound_keeps_float32_near_float64(forms, backend):
    """Without one an unbounded deep memory magnifies rounding ten thousand times, in every form."""
    assert float32_error(backend) > 1e-3
    assert float32_error(backend, surprise_bound=1.0) < 1e-5
