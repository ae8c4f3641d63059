"""The kernels on a GPU: at real sizes, on poisoned memory, under a memory checker, in DDP and FSDP2.

`make test-gpu` runs the tests marked gpu, those of up to 72 GB last. The unmarked ones show on a CPU that
these tests can fail.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from titans_kernels import forms_used, linear_attention, neural_memory
from titans_kernels.bench.check import judges
from titans_kernels.bench.inputs import BenchInputs, make
from titans_kernels.bench.shapes import SHAPES, BenchShape
from titans_kernels.bench.subjects import OURS
from titans_kernels.memory.forms.triton.refusal import too_large

TRITON, ONLINE = (next(s for s in OURS if s.name == name) for name in ("triton", "online"))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNKED = {name: shape for name, shape in SHAPES.items() if shape.chunk_size > 1}
FITTING = [(name, x) for name, shape in CHUNKED.items() for x in DTYPES if not too_large(x, shape.chunk_size)]
"""Shapes of the registry with chunks of several tokens, and the types that their kernels are for."""
ON_GPU = (
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    # such a machine has the torch, Triton and driver it has: what they warn of is shown
    pytest.mark.filterwarnings("default"),
)  # fmt: skip
# where it runs, and what runs there
PLACES = [("cpu", "chunked"), pytest.param("cuda", "triton", marks=ON_GPU)]


def on_gpu(test):
    """Marked gpu, and skipped without one."""
    for mark in ON_GPU:
        test = mark(test)
    return test


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory nothing has written yet holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(2).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(False)


def served(shape: BenchShape, dtype: torch.dtype) -> None:
    """Require that a shape is served by the kernels, not by another form."""
    assert TRITON.refuse(make(shape.short(), dtype, torch.device("cuda"), seed=0)) is None


def test_every_shape_but_one_has_kernels_for_every_type():
    """One, in float32, takes more shared memory than there is."""
    left = {(name, dtype) for name in CHUNKED for dtype in DTYPES} - set(FITTING)
    assert left == {("l2-d64-h256-c128", torch.float32)}


@pytest.mark.usefixtures("poisoned")
def test_poison_shows_what_was_not_written():
    judge = judges(SHAPES["l2-d64-h64"].reduced(), torch.float32, torch.device("cpu"))[0]

    def forgets_one(inputs: BenchInputs) -> list[Tensor]:
        y, *state = inputs.call("chunked")
        keep = torch.ones_like(y, dtype=torch.bool)
        keep[-1, -1, -1, -1] = False
        return [torch.where(keep, y, torch.empty_like(y)), *state]

    assert judge.verdict(lambda inputs: inputs.call("chunked")).green
    verdict = judge.verdict(forgets_one)
    assert (verdict.worst, verdict.green) == ("y", False)


def bench(*line: str, under: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*under, sys.executable, "-m", "titans_kernels.bench", *line]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@on_gpu
def test_benchmark_times_them(tmp_path):
    path = tmp_path / "out.json"
    line = "--small --shape l1-d128 --shape l2-d64-h64 --repeats 3 --json"
    done = bench(*line.split(), str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(path.read_text())
    assert written["machine"]["multiprocessors"] > 0
    for shape in written["runs"][0]["shapes"]:
        rows = {row["name"]: row for row in shape["rows"]}
        assert {rows[name]["state"] for name in ("triton", "chunked")} == {"timed"}
        assert rows["triton"]["graph"], rows["triton"].get("graph_why")


class Memory(nn.Module):
    """A small layer whose initial memory is a parameter."""

    def __init__(self, backend: str, depth: int):
        super().__init__()
        self.backend = backend
        self.tokens = nn.Linear(64, 3 * 64 + 3 * 2)
        self.out = nn.Linear(64, 64)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(2, 32, 32) / 6) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        qkv, gates = self.tokens(x).split([3 * 64, 3 * 2], -1)
        q, k, v = (F.normalize(part, dim=-1) for part in qkv.unflatten(-1, (3, 2, 32)).unbind(-3))
        alpha, eta, theta = gates.sigmoid().unflatten(-1, (3, 2)).unbind(-2)
        tokens, weights = (q, k, v, 0.1 * alpha, eta, 0.1 * theta), tuple(self.weights)
        y, _ = neural_memory(*tokens, weights, chunk_size=16, backend=self.backend)
        return x + self.out(y.flatten(2))


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Of a loss, for every parameter, each from zero."""
    layer.zero_grad()
    layer(x).float().square().sum().backward()
    collected = [p.grad for p in layer.parameters()]
    assert all(g is not None and g.isfinite().all() and g.norm() > 0 for g in collected)
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in collected]


def layer_and_input(device: str, backend: str, depth: int) -> tuple[Memory, Tensor]:
    torch.manual_seed(depth)
    return Memory(backend, depth).to(device), torch.randn(2, 50, 64, device=device)


def assert_close(actual: list[Tensor], expected: list[Tensor], relative: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() <= relative * b.norm()


@pytest.fixture
def alone(tmp_path) -> Iterator[None]:
    """A process group of one."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("device", "backend"), PLACES)
def test_ddp_fsdp_and_autocast_pass_over_it(device, backend, depth):
    from torch.distributed.fsdp import fully_shard

    layer, x = layer_and_input(device, backend, depth)
    expected = gradients(layer, x)
    with torch.autocast(device, torch.bfloat16):
        assert_close(gradients(layer, x), expected, 0.1)
    assert_close(gradients(nn.parallel.DistributedDataParallel(layer), x), expected, 1e-5)
    assert_close(gradients(fully_shard(layer, mesh=dist.init_device_mesh(device, (1,))), x), expected, 1e-5)


@on_gpu
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_it_compiles_without_a_break(depth):
    layer, x = layer_and_input("cuda", "triton", depth)
    expected = gradients(layer, x)
    layer.compile(fullgraph=True)
    assert_close(gradients(layer, x), expected, 1e-4)


class Packed:
    """A call on packed documents, one of them empty, and what it gives."""

    def __init__(self):
        torch.manual_seed(0)
        q, k, v = (F.normalize(torch.randn(1, 200, 2, 32, device="cuda"), dim=-1) for _ in range(3))
        self.tokens = [q, k, v, *(0.1 * torch.rand(1, 200, 2, device="cuda") for _ in range(3))]
        self.weights = (torch.randn(2, 32, 32, device="cuda") / 6,)
        self.expected = self(self.borders())

    @staticmethod
    def borders() -> Tensor:
        return torch.tensor([0, 20, 20, 129, 200], device="cuda")

    def __call__(self, borders: Tensor) -> Tensor:
        return neural_memory(*self.tokens, self.weights, cu_seqlens=borders, backend="triton")[0]


@on_gpu
def test_stream_does_not_wait_for_the_tables_of_another():
    call = Packed()
    borders, streams = call.borders(), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    collected = []
    for stream, cycles in zip(streams, (10**8, 0), strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            collected.append(call(borders))
    torch.cuda.synchronize()
    assert all(torch.equal(y, call.expected) for y in collected)
    assert torch.equal(call(borders.cpu()), call.expected), "borders may stay on the CPU"


@on_gpu
@pytest.mark.parametrize("channels", [1, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_baselines_take_flash_linear_attentions_kernels(channels, packed):
    pytest.importorskip("fla")
    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    q, k, v = draw(2, 1000, 4, 128), draw(2, 1000, 4, 128) / 128**0.5, draw(2, 1000, 4, 256)
    state, log_decay = draw(2, 4, 128, 256), F.logsigmoid(draw(2, 1000, 4, channels)) / 16
    index = torch.arange(2000, device="cuda").view(2, 1000) // 300 if packed else None
    tokens = [x.to(torch.bfloat16) for x in (q, k, v)]
    exact = [x.double() for x in (*tokens, log_decay, state)]
    actual, expected = [], []
    for given, results in (([*tokens, log_decay, state], actual), (exact, expected)):
        given = [x.detach().requires_grad_() for x in given]
        forms_used(forget=True)
        outputs = linear_attention(*given, index)
        results += [*outputs, *torch.autograd.grad(sum(y.square().mean() for y in outputs), given)]
        assert ("flash-linear-attention's" if results is actual else "chunked") in str(forms_used())
    for ours, reference in zip(actual, expected, strict=True):
        assert (ours - reference).norm() < 0.02 * reference.norm()


@on_gpu
def test_in_a_graph_it_gives_the_same_again_and_again():
    call = Packed()
    borders, graphed = call.borders(), torch.compile(call, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(graphed(borders), call.expected)
    assert torch.equal(call(borders), call.expected)


@on_gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not on the PATH")
@pytest.mark.parametrize("name", SHAPES)
def test_no_access_is_out_of_bounds(name):
    backend = "triton" if name in CHUNKED else "online"
    if name in CHUNKED:
        served(SHAPES[name], torch.bfloat16)
    checker = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    line = ("--check", "--small", "--backend", backend, "--shape", name)
    # each tensor an allocation of its own, or what lies behind one is memory of PyTorch's cache
    done = bench(*line, under=checker, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    # the checker's own message, before it runs anything
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not take this device")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@on_gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("name", "dtype"), FITTING, ids=str)
def test_kernels_are_right_at_real_sizes(name, dtype):
    served(SHAPES[name], dtype)
    for judge in judges(SHAPES[name], dtype, torch.device("cuda")):
        assert judge.inputs.tokens[0].isfinite().all()
        (verdict,) = TRITON.verify([judge])
        assert verdict.green, f"{judge.inputs.shape}: {verdict}"


@on_gpu
@pytest.mark.usefixtures("poisoned")
def test_states_of_single_tokens_are_right_at_real_sizes():
    forms_used(forget=True)
    for judge in judges(SHAPES["l1-d128-online"], torch.float32, torch.device("cuda")):
        (verdict,) = ONLINE.verify([judge])
        assert verdict.green, f"{judge.inputs.shape}: {verdict}"
    assert "delta_states: triton" in forms_used()


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["l1-d128", "l2-d64-h64", "l2-d64-h256"])
def test_result_does_not_move(name, dtype):
    served(SHAPES[name], dtype)
    judge = judges(SHAPES[name], dtype, torch.device("cuda"))[0]
    first, *more = (TRITON.verify([judge])[0] for _ in range(5))
    for again in more:
        assert again.errors == pytest.approx(first.errors, rel=0.1), "the error changes: a race?"


@pytest.mark.slow
def test_marked_tests_are_collected_with_torch_alone(tmp_path):
    blocked = ["titans_core", "titans_platform", "pydantic", "rich", "ray", "yaml", "mlflow", "pyarrow"]
    files = sorted(map(str, Path(__file__).parent.glob("test_*.py")))
    code = (
        f"import sys, pytest; sys.modules.update(dict.fromkeys({blocked})); "
        f"sys.exit(pytest.main(['-m', 'gpu', '--collect-only', '-p', 'no:cacheprovider', *{files}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "test_kernels_are_right_at_real_sizes" in done.stdout
