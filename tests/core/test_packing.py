"""MAC's packed segments without padding, and flash attention's joined parts, in float64."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.core.small import perturbed, tokens
from titans_core import Documents, LanguageModel, attention, record, window
from titans_core.documents import Segments

ROWS, LENGTH = 2, 61
BORDERS = ((0, 3), (0, 4), (0, 40), (1, 16), (1, 17), (1, 33))


def starts() -> Tensor:
    marked = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    for border in BORDERS:
        marked[border] = True
    return marked


def grads(m: LanguageModel, y: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y.square().mean(), list(m.parameters()), materialize_grads=True)]


def one_by_one(m: LanguageModel, x: Tensor) -> Tensor:
    rows = []
    for row, begins in zip(x, starts(), strict=True):
        borders = [0, *(t for t in range(1, LENGTH) if begins[t]), LENGTH]
        rows.append(torch.cat([m(row[None, i:j]).logits for i, j in pairwise(borders)], 1))
    return torch.cat(rows)


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("conv", [False, 4, 9])
def test_segments_of_packed_documents_equal_document_by_document(monkeypatch, conv, spare):
    m, x = perturbed("mac", conv=conv, attention={"conv_kernel": 9}), tokens(ROWS, LENGTH)
    monkeypatch.setattr(type(m.blocks[0]), "is_compiled", spare)
    expected, actual = grads(m, one_by_one(m, x)), grads(m, m(x, document_starts=starts()).logits)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_telemetry_of_packed_segments_equals_document_by_document():
    m, x = perturbed("mac"), tokens(ROWS, LENGTH)
    with record(m) as packed:
        m(x, document_starts=starts())
    with record(m) as alone:
        one_by_one(m, x)
    names = ("surprise", "alpha_mean", "eta_mean", "theta_mean")
    expected = {name: pytest.approx(alone.summary()[name], rel=1e-9) for name in names}
    assert {name: packed.summary()[name] for name in names} == expected


def test_packed_segments_of_real_lengths_waste_little():
    """Lengths are log-normal with a median of 600 tokens, as in FineWeb."""
    torch.manual_seed(0)
    for _ in range(20):
        begins = torch.zeros(16, 4096, dtype=torch.bool)
        for row in begins:
            at = 0
            while at < 4096:
                row[at] = True
                at += int(torch.randn(()).exp() * 600) + 1
        documents = Documents.from_starts(begins)
        assert len(Segments.of(documents, 1024, spare=True).order) / begins.numel() - 1 < 0.001


def dense(q: Tensor, k: Tensor, borders: Tensor, left: int) -> Tensor:
    """Scores [H, N, N] that varlen flash attention takes."""
    at = torch.arange(len(q))
    document = torch.bucketize(at, borders[1:], right=True)
    gap = at[:, None] - at
    seen = (document[:, None] == document) & (gap >= 0) & ((gap <= left) | (left < 0))
    return (torch.einsum("nhe,mhe->hnm", q, k) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)


def forward(q, k, v, borders, longest, left):
    scores = dense(q, k, borders, left)
    return torch.einsum("hnm,mhe->nhe", scores.softmax(-1), v), scores.logsumexp(-1)


def backward(dy, q, k, v, y, lse, borders, longest, left):
    """The gradients as the kernel computes them, from given outputs and log-sum-exps."""
    P = (dense(q, k, borders, left) - lse[..., None]).exp()
    dP = torch.einsum("nhe,mhe->hnm", dy, v) - (dy * y).sum(-1).T[..., None]
    dS = P * dP * q.shape[-1] ** -0.5
    spread = torch.einsum("hnm,mhe->nhe", dS, k), torch.einsum("hnm,nhe->mhe", dS, q)
    return *spread, torch.einsum("hnm,nhe->mhe", P, dy)


@pytest.mark.parametrize("persistent", [0, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", ["mac", "mag", "mal", "transformer"])
def test_joined_flash_attention_equals_masked_attention(monkeypatch, variant, packed, persistent):
    options = {} if variant == "mac" else {"window": 12}
    m, x = perturbed(variant, persistent=persistent, **options), tokens(ROWS, LENGTH)
    given, calls = {"document_starts": starts()} if packed else {}, []
    expected = grads(m, m(x, **given).logits)
    monkeypatch.setattr(attention, "flash_supports", lambda q: calls.append(1) or True)
    monkeypatch.setattr(window, "flash_forward", forward)
    monkeypatch.setattr(window, "flash_backward", backward)
    torch.testing.assert_close(grads(m, m(x, **given).logits), expected, rtol=1e-9, atol=1e-11)
    assert calls
