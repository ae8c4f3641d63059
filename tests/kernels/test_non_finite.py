"""A NaN or an inf of one token reaches later tokens, and earlier ones of its chunk at most."""

import math
from functools import cache

import pytest
import torch
from torch.nn import functional as F

from tests.kernels.cases import NATIVE, needs_compiler
from titans_kernels import neural_memory
from titans_kernels.memory.forms.triton import pieces

TOKENS = ("q", "k", "v", "alpha", "eta", "theta")
AT, CHUNK = 40, 16
interpreted = pytest.mark.skipif(not pieces.INTERPRETED, reason="a GPU is here: the kernels run on it")

# form: chunk size, groups of columns, tokens of the block whose earlier tokens a non-finite number may reach
FORMS = {
    "reference": (CHUNK, None, 1), "generic": (CHUNK, None, CHUNK), "chunked": (CHUNK, None, CHUNK),
    "chunked by column": (CHUNK, 2, CHUNK), "native": (CHUNK, None, CHUNK), "online": (1, None, 32),
    "triton": (CHUNK, None, CHUNK),
}  # fmt: skip


def inputs(T: int, groups: int | None) -> dict[str, torch.Tensor]:
    """Two rows of two heads of width 16."""
    generator = torch.Generator().manual_seed(1)
    rand = lambda *s: torch.rand(2, T, 2, *s, generator=generator)  # noqa: E731
    q, k, v = (F.normalize(rand(16) - 0.5, dim=-1) for _ in range(3))
    alpha = 0.05 * rand(*([groups] if groups else []))
    return dict(zip(TOKENS, (q, k, v, alpha, 0.8 * rand(), 0.1 * rand()), strict=True))


def reads(form: str, **changed: torch.Tensor) -> torch.Tensor:
    chunk_size, groups, _ = FORMS[form]
    generator = torch.Generator().manual_seed(2)
    depth = 1 if form in ("online", "triton") else 2
    weights = tuple(torch.randn(2, 16, 16, generator=generator) / 4 for _ in range(depth))
    options = {"chunk_size": chunk_size, "backend": form.split()[0]}
    return neural_memory(**inputs(64, groups) | changed, weights=weights, **options)[0]


unchanged = cache(reads)


def first_changed(form: str, name: str, value: float) -> int | None:
    """The first token whose read changes with one of ``name`` at `AT`; nothing else of the batch changes."""
    tokens = inputs(64, FORMS[form][1])
    tokens[name][0, AT, 0] = value
    before, after = unchanged(form), reads(form, **{name: tokens[name]})
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[:, :, 1], before[:, :, 1])
    return min((t for t in range(64) if not torch.equal(after[0, t, 0], before[0, t, 0])), default=None)


@pytest.mark.parametrize("form", [
    pytest.param(form, marks={"native": needs_compiler, "triton": interpreted}.get(form, ()))
    for form in FORMS
])  # fmt: skip
def test_non_finite_number_reaches_no_further_than_its_block(form):
    block = FORMS[form][2]
    for name in TOKENS if form != "triton" else ("k", "v", "theta"):
        for value in (math.nan, math.inf) if form != "triton" else (math.nan,):
            assert first_changed(form, name, value) in range(AT - AT % block, AT + 1), (name, value)


@pytest.mark.parametrize("form", ["reference", "generic", "chunked", NATIVE])
def test_large_finite_number_reaches_later_tokens_alone(form):
    for name in TOKENS:
        assert first_changed(form, name, 1e30) == AT, name
