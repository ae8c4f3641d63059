"""Linear attention and the scan: the parallel form against the recurrence, with packed documents."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import assert_same, needs_compiler
from titans_kernels import forms_used, linear_attention, recurrence, scans
from titans_kernels.recurrence import recurrent_linear_attention
from titans_kernels.scans import recurrent_scan, scan, selective_scan


def inputs(T: int, channels: int, strongest: float = 3.0) -> list[Tensor]:
    """q, k, v, logarithms of decays and the first state, for two rows of three heads."""
    g = torch.Generator().manual_seed(T)
    q, k = (torch.randn(2, T, 3, 4, generator=g, dtype=torch.float64) for _ in range(2))
    v = torch.randn(2, T, 3, 5, generator=g, dtype=torch.float64)
    decay = -strongest * torch.rand(2, T, 3, channels, generator=g, dtype=torch.float64)
    state = torch.randn(2, 3, 4, 5, generator=g, dtype=torch.float64)
    return [x.requires_grad_() for x in (q, k, v, decay, state)]


def documents(T: int) -> Tensor:
    """A document of one token, and borders within and on the border of a chunk of 8 or 64."""
    starts = torch.zeros(2, T, dtype=torch.long)
    for row, t in ((0, 3), (0, 4), (1, 8), (1, 30), (1, 64)):
        starts[row, min(t, T - 1)] = 1
    return starts.cumsum(1) + torch.tensor([[0], [T]])


compare = partial(assert_same, results=(1e-9, 1e-9), gradients=(1e-9, 1e-9))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T", [1, 7, 8, 9, 16, 17, 41])
@pytest.mark.parametrize(("form", "channels", "threads"), [
    *((form, channels, 1) for form in ("whole", "parts of a chunk") for channels in (1, 4)),
    *(pytest.param("native", 4, threads, marks=needs_compiler) for threads in (1, 2)),
])  # fmt: skip
def test_every_form_gives_the_recurrence(T, form, channels, threads, packed, monkeypatch, torch_threads):
    if form == "parts of a chunk":
        monkeypatch.setattr(recurrence, "PART_BYTES", 1)
    torch_threads(threads)
    x, options = inputs(T, channels), {} if form == "native" else {"chunk_size": 8}
    index = documents(T) if packed else None
    forms_used(forget=True)
    compare(linear_attention(*x, index, **options), recurrent_linear_attention(*x, index), x)
    assert ("linear_attention: native" in forms_used()) == (form == "native")


def scanned(T: int, rows: int) -> list[Tensor]:
    """Arguments of `selective_scan` for five channels of three states."""
    g = torch.Generator().manual_seed(T)
    shapes = [(rows, T, 5), (rows, T, 5), (rows, T, 3), (rows, T, 3), (5, 3), (rows, 5, 3)]
    dt, x, b, c, rate, state = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes)
    return [y.detach().requires_grad_() for y in (dt.exp(), x, b, c, rate.exp(), state)]


def by_token(dt, x, b, c, rate, h, index=None):
    """Mamba's recurrence as the paper has it."""
    outputs = []
    for t in range(dt.shape[1]):
        if index is not None and t:
            h = h * (index[:, t] == index[:, t - 1])[:, None, None]
        h = torch.exp(-dt[:, t, :, None] * rate) * h + (dt * x)[:, t, :, None] * b[:, t, None]
        outputs.append((h * c[:, t, None]).sum(-1))
    return torch.stack(outputs, 1), h


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("T", "rows"), [(1, 2), (16, 2), (17, 2), (41, 2), (41, 1)])
def test_selective_scan_is_mambas_recurrence(T, rows, packed, native, monkeypatch, torch_threads):
    torch_threads(3 - rows)  # a single row is shared out by channels
    x = scanned(T, rows)
    if not native:
        monkeypatch.setattr(scans, "serves", lambda *_: False)
        monkeypatch.setattr(scans, "PART_BYTES", 7 * x[-1].nbytes)  # of seven tokens
    index = documents(T)[:rows] if packed else None
    compare(selective_scan(*x, index), by_token(*x, index), x)


@pytest.mark.parametrize("channels", [1, 4])
def test_decay_that_forgets_everything_neither_overflows_nor_is_an_epsilon(channels):
    x = [y.float().detach().requires_grad_() for y in inputs(41, channels, strongest=400.0)]
    y, state = linear_attention(*x)
    expected, end = recurrent_linear_attention(*x)
    torch.testing.assert_close((y, state), (expected, end), rtol=1e-5, atol=1e-6)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(y.sum() + state.sum(), x))


@pytest.mark.parametrize("chunk_size", [8, 64])
@pytest.mark.parametrize("T", [1, 7, 8, 9, 41])
def test_scan_of_chunks_gives_the_recurrence(T, chunk_size):
    g = torch.Generator().manual_seed(T)
    a, b = (torch.rand(2, T, 3, 4, generator=g, dtype=torch.float64) for _ in range(2))
    a[0, T // 2] = 0  # where a document begins
    x = [y.requires_grad_() for y in (a, b, torch.rand(2, 3, 4, generator=g, dtype=torch.float64))]
    compare((scan(*x, chunk_size=chunk_size),), (recurrent_scan(*x),), x)


@pytest.mark.parametrize(("rows", "T"), [(0, 5), (2, 0)])
def test_without_rows_or_tokens_the_result_is_empty(rows, T):
    q, k, v, decay = (torch.rand(rows, T, 3, n) for n in (4, 4, 5, 1))
    state, a, h = torch.rand(rows, 3, 4, 5), torch.rand(rows, T, 3), torch.rand(rows, 3)
    for form in (linear_attention, recurrent_linear_attention):
        y, after = form(q, k, v, decay, state)
        assert y.shape == v.shape
        torch.testing.assert_close(after, state, rtol=0, atol=0)
    for form in (scan, recurrent_scan):
        assert form(a, a, h).shape == a.shape


@pytest.mark.slow
@torch._functorch.config.patch(donated_buffer=False)  # `graded` keeps the graph
# 600 tokens, the first length with longer chunks, take a minute
@pytest.mark.parametrize(
    ("lengths", "chunk_size"), [((10, 14), 4), pytest.param((40, 600), None, marks=pytest.mark.nightly)]
)
def test_compiled_scan_takes_rows_of_any_length(lengths, chunk_size):
    torch._dynamo.reset()
    compiled = torch.compile(partial(scan, chunk_size=chunk_size), backend="aot_eager", fullgraph=True)
    for T in lengths:
        g = torch.Generator().manual_seed(T)
        shapes = (1, T, 2), (1, T, 2), (1, 2)
        x = [torch.rand(*shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]
        compare((compiled(*x),), (recurrent_scan(*x),), x)


def test_tokens_of_a_part_are_known_where_the_number_of_rows_is_open():
    tokens = torch.compile(scans._part_tokens, fullgraph=True, dynamic=True, backend="eager")
    for rows in (2, 3):
        assert tokens(torch.zeros(rows, 2**20)) == scans.PART_BYTES // (rows * 2**22)


def test_one_state_serves_all_rows_and_shapes_that_do_not_fit_are_refused():
    q, k, v, decay, state = inputs(9, 4)
    y, end = linear_attention(q, k, v, decay, state[:1])
    torch.testing.assert_close((y, end), linear_attention(q, k, v, decay, state[:1].expand(2, -1, -1, -1)))
    for given, name in (
        ((q, k[:1], v, decay, state), "k"), ((q, k, v[:, :8], decay, state), "v"),
        ((q, k, v, decay[:1], state), "log_decay"), ((q, k, v, decay, state[:, :1]), "state"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: "):
            linear_attention(*given)
    dt, x, b, rate = torch.rand(2, 9, 6), torch.rand(2, 9, 6), torch.rand(2, 9, 4), torch.rand(6, 4)
    start = torch.rand(1, 6, 4)
    y, end = selective_scan(dt, x, b, b, rate, start)
    assert torch.equal(y, selective_scan(dt, x, b, b, rate, start.expand(2, -1, -1))[0])
    for given, name in (((dt[:1], x, b, b, rate, start), "dt"), ((dt, x, b, b, rate, start[:, :5]), "state")):
        with pytest.raises(ValueError, match=f"^{name}: "):
            selective_scan(*given)
