"""The Triton kernels in Triton's interpreter, against the token-by-token reference in float64."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import normalize

from tests.kernels import cases
from titans_kernels import MemoryState, forms_used, neural_memory, ran
from titans_kernels.bench.shapes import SHAPES
from titans_kernels.bench.support import table
from titans_kernels.memory.forms import native
from titans_kernels.memory.forms.triton import assembler, pieces, refusal, shapes, tables
from titans_kernels.memory.forms.triton import op as triton_op
from titans_kernels.memory.forms.triton.launch import Card
from titans_kernels.memory.options import Options

pytestmark = pytest.mark.skipif(not pieces.INTERPRETED, reason="a GPU is here: tests/kernels/test_gpu.py")


@dataclass(frozen=True)
class Case:
    """A call; widths from keys to values."""

    widths: tuple[int, ...]
    T: int
    b: int = 64
    bound: float | None = 0.5
    activation: str = "silu"
    borders: tuple[int, ...] | None = None
    B: int = 1
    H: int = 1
    resets: bool = True
    """True if some tokens forget all, the others much: too little is then left of a deep memory for operands
    of half precision."""
    base: bool = False
    """Decay of the weights to a base; the initial weights are then offsets from it."""

    @property
    def name(self) -> str:
        packed = ("" if self.borders is None else " packed") + self.base * " base"
        return f"{'-'.join(map(str, self.widths))} T{self.T} b{self.b} {self.bound} {self.activation}{packed}"


SHORT, DEEP = (16, 16), (16, 32, 16)
CASES = [
    # depth 1: columns over programs, and one program under a bound
    Case(SHORT, 1, 16, bound=None), Case((32, 64), 50, 32, bound=None, B=2, H=2), Case((32, 64), 100),
    Case((64, 32), 130, bound=None),
    # depth 2, in registers
    Case(DEEP, 1, 16), Case((16, 32, 64), 50, 32, H=2), Case((32, 64, 16), 64, bound=None),
    Case(DEEP, 70, 32), Case(DEEP, 70, activation="gelu"), Case((16, 16, 16), 40, 16, activation="identity"),
    # wider and deeper: streamed
    Case((16, 128), 64, 128), Case((32, 128, 16), 66, 64), Case((16, 16, 16, 32), 34, 16, bound=None),
    Case((16, 32, 32, 16), 70), Case((16, 32, 32, 16), 1, 16, H=2), Case((32, 16, 16, 16, 16), 64, 32),
    Case((16, 32, 32, 32, 16), 100, 128), Case((256, 16), 20, 16, bound=None),
    # padded to widths of tiles
    Case((4, 4), 20, 16, bound=None), Case((24, 40, 24), 34, 16), Case((24, 24, 24), 34, 16, base=True),
    # packed documents, one of one token and two of none
    Case(SHORT, 34, 16, borders=(0, 1, 18, 18, 34, 34)), Case(DEEP, 34, 16, borders=(0, 1, 18, 18, 34, 34)),
    Case((16, 16, 16, 16), 34, 16, borders=(0, 1, 18, 18, 34, 34)),
    # one memory as wide as a model: a launch for each stage of a chunk
    Case((16, 320), 40, 16),
    # decay towards a base, of every path
    Case(SHORT, 50, 16, base=True), Case((16, 32, 16), 34, 16, B=2, base=True),
    Case((16, 32, 64), 70, borders=(0, 1, 18, 18, 70, 70), base=True),
    Case((16, 128, 16), 40, 32, bound=None, H=2, base=True), Case((16, 16, 16, 16, 32), 34, 16, base=True),
    Case((16, 32, 32, 16), 34, 16, borders=(0, 1, 18, 18, 34, 34), base=True),
]  # fmt: skip


class Call(cases.Call):
    """Random inputs of a case, in float64, gates at exactly 0 and 1 among them."""

    def __init__(self, case: Case):
        self.case, draw = case, torch.Generator().manual_seed(0)
        B, T, H, D, V = case.B, case.T, case.H, case.widths[0], case.widths[-1]
        documents, pairs = len(case.borders or range(B + 1)) - 1, list(pairwise(case.widths))
        normal = lambda *size: torch.randn(*size, generator=draw, dtype=torch.float64)  # noqa: E731
        tokens = [
            normalize(normal(B, T, H, D), dim=-1), normalize(normal(B, T, H, D), dim=-1),
            normal(B, T, H, V) / V**0.5, torch.sigmoid(normal(B, T, H) - 2),
            torch.sigmoid(normal(B, T, H) - 0.5), 0.5 * torch.sigmoid(normal(B, T, H) - 1),
        ]  # fmt: skip
        if case.resets:
            tokens[3][:, 5::17], tokens[3][:, 7::13], tokens[4][:, 3::11] = 1, 0, 0
        else:
            tokens[3] *= 0.02
        weights = tuple(normal(documents, H, a, b) / a**0.5 for a, b in pairs)
        momentum = tuple(normal(documents, H, a, b) * 0.05 for a, b in pairs)
        self.tokens, self.state = tokens, MemoryState(weights, momentum)
        self.base = tuple(0.5 * normal(H, a, b) / a**0.5 for a, b in pairs) if case.base else None
        self.cast(torch.float64)

    def results(self, backend: str) -> list[Tensor]:
        """Outputs, final states and every gradient."""
        case, borders = self.case, self.case.borders
        outputs = self.whole(
            chunk_size=case.b, activation=case.activation, surprise_bound=case.bound, backend=backend,
            cu_seqlens=None if borders is None else torch.tensor(borders),
        )  # fmt: skip
        return [*outputs, *cases.graded(outputs, self.leaves)]

    def round_operands(self, dtype: torch.dtype, to: torch.dtype) -> None:
        self.tokens[:3] = [x.detach().to(dtype).to(to).requires_grad_() for x in self.tokens[:3]]


def single(case: Case) -> Call:
    call = Call(case)
    call.cast(torch.float32)
    return call


def error(case: Case, operands: torch.dtype = torch.float32) -> float:
    """The largest relative root-mean-square error of the kernels' results; inputs rounded alike for both."""
    call = Call(case)
    call.round_operands(operands, torch.float64)
    expected = call.results("reference")
    size = lambda x: float(x.detach().double().square().mean().sqrt()) + 1e-30  # noqa: E731
    scales = [size(x) for x in expected]
    for l, B in enumerate(call.base or ()):  # an offset W - B is as exact as W is
        scales[1 + l] += size(B)
    call.cast(torch.float32)
    call.round_operands(operands, operands)
    actual = call.results("triton")
    assert all(torch.isfinite(x).all() for x in actual)
    return max(size(x - y) / scale for x, y, scale in zip(actual, expected, scales, strict=True))


@pytest.fixture(autouse=True)
def no_fallback(caplog):
    """A test that meant the kernels must not have been given `chunked`."""
    ran.warn_once.cache_clear()
    yield
    assert "chunked in place of triton" not in caplog.text


# one case of each kernel stays in `make test-fast`
FAST = {SHORT, DEEP, (16, 16, 16, 32)}


def marked(cases: list[Case]) -> list:
    fast = {case.widths: case for case in reversed(cases) if case.widths in FAST and case.borders is None}
    slow = [() if fast.get(case.widths) is case else pytest.mark.slow for case in cases]
    return [pytest.param(case, id=case.name, marks=mark) for case, mark in zip(cases, slow, strict=True)]


@pytest.mark.parametrize("case", marked(CASES))
def test_kernels_equal_the_reference(case):
    assert error(case) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    Case((32, 64), 34, 16, bound=None, B=2), Case((32, 48, 16), 34, 16, H=2), Case((16, 32, 32, 64), 34, 16),
    Case((16, 32, 16), 34, 16, borders=(0, 1, 18, 18, 34, 34), base=True, activation="gelu"),
], ids=lambda case: case.name)  # fmt: skip
def test_stages_of_wide_memories_equal_the_reference_with_several_tiles(case, monkeypatch):
    """At widths that the interpreter has time for."""
    monkeypatch.setattr(shapes, "MOST_STREAMED", 0)
    monkeypatch.setattr(shapes.Shape, "tile", 16)
    assert error(case) < 1e-5


@pytest.mark.parametrize("case", [Case((32, 64), 50, 32, bound=None), Case((64, 32), 50, 32)], ids=str)
@pytest.mark.parametrize("keep", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_reads_ride_along_where_programs_fill_the_card(case, keep, monkeypatch):
    """The other form of the forward, and a backward that finds again what was not kept."""
    asked = []
    monkeypatch.setattr(triton_op, "card_of", lambda device: Card(1, 90))
    monkeypatch.setattr(triton_op, "KEEP_BYTES", 2**40 if keep else 0)
    ride = triton_op.reads_ride_along
    monkeypatch.setattr(triton_op, "reads_ride_along", lambda *a: asked.append(ride(*a)) or asked[-1])
    assert error(case) < 1e-5
    assert asked == [True]


@pytest.mark.parametrize("widths", [SHORT, DEEP, pytest.param((16, 16, 16, 16), marks=pytest.mark.slow)])
def test_documents_begin_with_one_state_that_is_not_copied(widths, monkeypatch):
    """As training on packed documents calls it: one start for all, and no state of each at the end."""
    call, seen, forward = Call(Case(widths, 34, 16, borders=(0, 1, 18, 18, 34))), [], triton_op.forward
    call.state = MemoryState(*(tuple(x[0] for x in part) for part in call.state))

    def spied(shape, x, start, base, **options):
        y, after, kept = forward(shape, x, start, base, **options)
        seen.append((start.shape[0], after.numel()))
        return y, after, kept

    def results(backend: str, dtype: torch.dtype) -> list[Tensor]:
        call.cast(dtype)
        borders = torch.tensor(call.case.borders)
        y, *state = call.whole(chunk_size=16, surprise_bound=0.5, cu_seqlens=borders, backend=backend)
        assert not state
        return [y, *cases.graded([y], call.leaves)]

    monkeypatch.setattr(triton_op, "forward", spied)
    expected, actual = results("reference", torch.float64), results("triton", torch.float32)
    assert seen == [(1, 0)]
    for x, reference in zip(actual, expected, strict=True):
        assert (x - reference).norm() <= 1e-5 * reference.norm() + 1e-12


@pytest.mark.parametrize(("case", "keep_bytes", "again"), [
    (Case(SHORT, 20, 16), 0, 1), (Case(SHORT, 20, 16), 2**30, 0), (Case(SHORT, 20, 16), None, 0),
    pytest.param(Case((16, 32, 32, 16), 20, 16), 0, 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_states_found_again_are_those_kept(case, keep_bytes, again, monkeypatch):
    recalls, recall = [], triton_op.recall
    kept = single(case).results("triton")
    monkeypatch.setattr(triton_op, "recall", lambda *args: recalls.append(args) or recall(*args))
    monkeypatch.setattr(triton_op, "KEEP_BYTES", keep_bytes)
    result = single(case).results("triton")
    assert len(recalls) == again
    assert all(map(torch.equal, kept, result))


def test_what_is_kept_is_a_share_of_the_card(monkeypatch):
    card = type("Card", (), {"total_memory": 64 * 2**31})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert triton_op.keep_bytes(torch.device("cuda:0")) == 2**31
    assert triton_op.keep_bytes(torch.device("cpu")) == 2**29


# the interpreter cuts bfloat16 off where a GPU rounds, which costs a few times the error
@pytest.mark.parametrize(("operands", "limit"), [(torch.float16, 3e-3), (torch.bfloat16, 4e-2)], ids=str)
@pytest.mark.slow
@pytest.mark.parametrize("widths", [(32, 32), (32, 32, 32), (32, 32, 32, 32)], ids=["1", "2", "3"])
def test_operands_of_half_precision(widths, operands, limit):
    assert error(Case(widths, 64, 32, activation="gelu", B=2, resets=False), operands) < limit


def test_every_path_is_among_the_cases():
    paths = set()
    for case in CASES:
        call = Call(replace(case, T=max(case.T, 2), borders=None))
        q, start = call.tokens[0], torch.zeros(case.B, case.H, 1)
        shape = triton_op._shape(q, start, None, case.widths, case.b, case.activation, case.bound or 0.0)
        paths.add((shape.path, bool(case.bound)))
    either = {(path, bound) for path in ("columns", "resident", "streamed") for bound in (True, False)}
    assert paths == either | {("stepped", True)}


@pytest.mark.parametrize("dtype", refusal.TYPES, ids=str)
def test_every_shape_that_is_measured_has_its_kernels(dtype):
    for shape in (shape for shape in SHAPES.values() if shape.chunk_size > 1):
        weights = tuple(torch.empty(1, *pair) for pair in shape.pairs)
        assert why(torch.empty(1, 1, 1, shape.head_dim, dtype=dtype), weights, shape.chunk_size) == "served"


REFUSED = {
    "backend: no kernel computes in torch.float64": lambda q, W: (q.double(), W, 64),
    "chunk_size: 48 is not one": lambda q, W: (q, W, 48),
    "chunk_size: 256 is not one": lambda q, W: (q, W, 256),
    "heads: a memory is 2304 wide": lambda q, W: (q, layers(32, 2304), 64),
    "hidden widths [16, 64] differ": lambda q, W: (q, layers(32, 16, 64, 32), 64),
}


def why(q: Tensor, W: tuple[Tensor, ...], b: int, dtype: torch.dtype | None = None) -> str:
    return refusal.refusal(q, W, Options(b, "silu", None, None, operands=dtype)) or "served"


def test_docs_have_the_table_of_what_the_kernels_support():
    assert "\n".join(table()) in (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def layers(*widths: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(1, *pair) for pair in pairwise(widths))


@pytest.mark.parametrize("reason", REFUSED)
def test_a_shape_without_a_kernel_says_why(reason):
    assert reason in why(*REFUSED[reason](torch.zeros(1, 8, 1, 32), layers(32, 32)))
    assert why(torch.zeros(1, 8, 1, 24), layers(24, 48, 24), 64) == "served"


@pytest.fixture
def on_a_card(monkeypatch) -> pytest.MonkeyPatch:
    """A Hopper and CUDA 13.4's assembler, as far as `refusal` can tell."""
    monkeypatch.setattr(refusal, "INTERPRETED", False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(assembler, "select", lambda arch: ((13, 4), "TRITON_PTXAS_PATH"))
    monkeypatch.delenv("TITANS_PTXAS", raising=False)
    return monkeypatch


@pytest.mark.usefixtures("on_a_card")
def test_float32_chunks_of_128_are_too_large_for_a_card():
    q, W = torch.zeros(1, 8, 1, 32), layers(32, 32)
    assert "chunk_size: 128 in float32" in why(q, W, 128)
    assert why(q, W, 64) == why(q, W, 128, torch.bfloat16) == "served"


@pytest.mark.parametrize("version", [(12, 4), (12, 8), (13, 0), (13, 1), (13, 4)])
def test_an_assembler_that_is_wrong_on_hopper_is_refused_there_alone(version, on_a_card):
    q, W = torch.zeros(1, 8, 1, 32), layers(32, 32)
    on_a_card.setattr(assembler, "select", lambda arch: (version, "TRITON_PTXAS_PATH"))
    reason = why(q, W, 64)
    assert (reason == "served") == (version not in ((12, 8), (13, 0)))
    assert reason == "served" or "set TRITON_PTXAS_PATH to one of CUDA 13.1 or later" in reason
    on_a_card.setenv("TITANS_PTXAS", "any")
    assert why(q, W, 64) == "served"
    on_a_card.delenv("TITANS_PTXAS")
    on_a_card.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert why(q, W, 64) == "served"


@pytest.mark.parametrize(("arch", "current", "others", "chosen"), [
    # Triton 3.7.1, which torch 2.13 pins: the newer of its two, on Hopper alone
    (90, (12, 8), {"a": (12, 8), "b": (13, 1)}, "b"), (80, (12, 8), {"a": (12, 8), "b": (13, 1)}, None),
    (100, (13, 1), {"a": (12, 8), "b": (13, 1)}, None),
    # Triton 3.9 takes the newer one itself
    (90, (13, 4), {"a": (12, 9), "b": (13, 4)}, None),
    # of several that are good the newest; of none that is none, and the kernels are refused
    (90, (13, 0), {"a": (12, 4), "b": (13, 10), "c": (13, 4)}, "b"),
    (90, (12, 8), {"a": (12, 8), "b": (12, 9)}, None),
])  # fmt: skip
def test_the_newest_assembler_of_the_wheel_replaces_one_that_is_wrong(arch, current, others, chosen):
    assert assembler.choose(arch, current, others) == chosen


@pytest.mark.parametrize("user", [False, True], ids=["of the wheel", "of the user"])
def test_triton_compiles_with_the_assembler_that_is_selected_unless_the_user_set_one(user, monkeypatch):
    from triton import knobs
    from triton.backends.nvidia import compiler

    good = assembler._version(knobs.nvidia.ptxas_blackwell)
    if assembler.is_wrong(good, 90):
        pytest.skip("this Triton has no assembler for Hopper")
    # the first version is taken for a wrong one, as if this were Triton 3.7.1
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: knobs.nvidia.ptxas)
    monkeypatch.setattr(assembler, "WRONG_ON_HOPPER", (assembler._version(knobs.nvidia.ptxas), good))
    monkeypatch.setenv("TRITON_PTXAS_PATH", knobs.nvidia.ptxas.path)
    if not user:
        monkeypatch.delenv("TRITON_PTXAS_PATH")
    assembler.select.cache_clear()
    assert assembler.is_wrong(assembler.select(90)[0], 90) == user
    assert (assembler.refusal(90) is not None) == user
    assert (knobs.nvidia.ptxas.path == knobs.nvidia.ptxas_blackwell.path) != user
    assembler.select.cache_clear()


def test_auto_on_a_gpu_takes_chunked_for_a_shape_without_a_kernel_and_one_line_says_so(caplog, monkeypatch):
    monkeypatch.setattr(native, "library", lambda dtype: None)  # which a GPU's tensors never meet
    call = single(Case((16, 16), 40, 24))
    expected = call.results("chunked")
    with caplog.at_level(logging.WARNING, "titans_kernels"), monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        actual = [call.results("auto") for _ in range(2)]
    lines = [r.getMessage() for r in caplog.records if r.name == "titans_kernels"]
    (line,) = lines  # once, and again when a call is traced
    assert line.startswith("neural_memory: chunked in place of triton: chunk_size: 24 is not one of")
    assert all(map(torch.equal, actual[0], expected))
    caplog.clear()


def test_without_a_gradient_a_long_row_goes_through_in_parts(monkeypatch):
    call, calls = single(Case((16, 32, 16), 100, 16, B=2)), []
    monkeypatch.setattr(triton_op, "KEEP_BYTES", 2 * 2 * triton_op._chunk_bytes([16, 32, 16], 16, 4))
    whole = triton_op.forward
    monkeypatch.setattr(triton_op, "forward", lambda s, *a, **k: calls.append(s) or whole(s, *a, **k))
    with torch.no_grad():
        actual = call.whole(chunk_size=16, backend="triton")
        assert [shape.tokens for shape in calls] == [64, 64, 64, 8]
        torch.testing.assert_close(actual, call.whole(chunk_size=16, backend="chunked"))


@pytest.mark.slow
def test_borders_that_a_compiler_lets_pass_are_looked_at_when_it_runs():
    call = partial(single(Case((16, 16), 20, 16)).whole, chunk_size=16, backend="triton")
    compiled = torch.compile(lambda borders: call(cu_seqlens=borders), backend="aot_eager")
    assert compiled(torch.tensor([0, 20], dtype=torch.int32))[0].isfinite().all()
    with pytest.raises(ValueError, match="cu_seqlens: must rise from 0 to T = 20"):
        compiled(torch.tensor([0, 40], dtype=torch.int32))


def test_packed_documents_in_inference_mode():
    call = single(Case(SHORT, 20, 16, borders=(0, 5, 20)))
    with torch.inference_mode():
        options = {"chunk_size": 16, "cu_seqlens": torch.tensor(call.case.borders)}
        actual, expected = (call.whole(backend=name, **options) for name in ("triton", "chunked"))
    torch.testing.assert_close(actual, expected)


def test_tables_of_packed_documents_are_worked_out_once():
    """Rows of equal length need none."""
    result = tables.tables(1, 50, torch.tensor([0, 1, 18, 50]), 16, torch.device("cpu"))
    assert (result.longest, result.documents.tolist()) == (2, [[0, 1, 0], [1, 18, 1], [18, 50, 3]])
    assert result.chunks.tolist()[:5] == [[0, 1], [1, 16], [17, 1], [18, 16], [34, 16]]
    assert all(count == 0 for _, count in result.chunks.tolist()[5:])
    assert tables.tables(3, 50, None, 16, torch.device("cpu")) == (12, 4, 50, None, None)
    # on the host; what a call's stream has of them is sent along with the call
    borders = torch.tensor([0, 20, 50])
    first = tables.tables(1, 50, borders, 16, torch.device("cpu"))
    assert tables.tables(1, 50, borders, 16, torch.device("cpu")).chunks is first.chunks
    assert tables.tables(1, 50, borders, 16, torch.device("meta")).chunks.is_meta
    borders[1] = 10
    assert tables.tables(1, 50, borders, 16, torch.device("cpu")).documents.tolist()[1][0] == 10


@pytest.mark.slow
def test_the_operators_pass_torch_s_own_checks():
    call = single(Case(DEEP, 10, 16))
    start = torch.cat([x.detach().flatten(2) for part in call.state for x in part], -1).requires_grad_()
    base = start[0, :, : start.shape[-1] // 2].detach().clone().requires_grad_()
    arguments = (*call.tokens, start, base, None, [16, 32, 16], 16, "silu", 0.5, True, True)
    torch.library.opcheck(torch.ops.titans.memory_triton, arguments)


@pytest.mark.slow
def test_changing_numbers_of_documents_take_two_graphs_that_give_the_same():
    """The first static, the second for any number of documents: a GPU would recompile at every step."""
    given = single(Case(DEEP, 40, 16))
    tokens, weights = given.tokens, tuple(x[0].detach() for x in given.state.weights)
    torch._dynamo.reset()

    def call(cu_seqlens: Tensor) -> Tensor:
        options = {"chunk_size": 16, "cu_seqlens": cu_seqlens, "backend": "triton"}
        return neural_memory(*tokens, weights, **options)[0].square().sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for borders in ([0, 7, 40], [0, 7, 9, 40], [0, 1, 20, 30, 40], [0, 5, 6, 20, 30, 40]):
        results = []
        for form in (call, compiled):
            forms_used(forget=True)
            loss = form(torch.tensor(borders))
            assert forms_used() == ["neural_memory: triton"]
            results.append([loss, *torch.autograd.grad(loss, tokens)])
        torch.testing.assert_close(*results)
    assert counter.frame_count == 2


def test_autocast_gives_the_operands_their_type(monkeypatch):
    seen, run = [], triton_op.write_and_read
    monkeypatch.setattr(triton_op, "write_and_read", lambda *a: seen.append(a[3].operands) or run(*a))
    with torch.autocast("cpu", torch.bfloat16):
        results = single(Case(DEEP, 20, 16)).whole(chunk_size=16, backend="triton")
    assert (seen, {x.dtype for x in results}) == ([torch.bfloat16], {torch.float32})
