"""The memory as an operator of torch's library, and what a call keeps and reads from the device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from titans_kernels import neural_memory
from titans_kernels.memory.forms import chunked
from titans_kernels.memory.op import memory_chunked, memory_chunked_backward
from titans_kernels.memory.parts import gates, layout

BORDERS = [0, 5, 6, 20]


class Arguments:
    """Random float64 arguments of a memory of three layers; packed documents have states of their own."""

    def __init__(
        self, *, batch: int = 1, documents: list[int] | None = None, grad: bool = True, norm: bool = False,
        base: bool = False, output: str | None = None,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        rand = lambda *s: torch.rand(*s, generator=generator, dtype=torch.float64).requires_grad_(grad)  # noqa: E731
        N = batch if documents is None else len(documents) - 1
        self.tokens = [rand(batch, 20, 2, 3) for _ in range(3)] + [rand(batch, 20, 2) for _ in range(3)]
        self.norm = [rand(2, 3), rand(2, 3)] if norm else []
        self.weights = [rand(N, 2, *s) for s in ((3, 4), (4, 4), (4, 3))]
        self.base = [rand(*W.shape[1:]) for W in self.weights] if base else []
        self.momentum = [rand(*W.shape) for W in self.weights]
        self.cu_seqlens, self.output = None if documents is None else torch.tensor(documents), output

    @property
    def op(self) -> tuple:
        state = self.weights, self.momentum, self.base, self.norm
        return *self.tokens, *state, 7, "silu", 0.5, self.cu_seqlens, self.output

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.tokens, *self.weights, *self.momentum]

    def run(self, **options) -> list[Tensor]:
        y, state = neural_memory(
            *self.tokens, tuple(self.weights), tuple(self.momentum), chunk_size=7, surprise_bound=0.5,
            cu_seqlens=self.cu_seqlens, **options,
        )  # fmt: skip
        return [y, *state.weights, *state.momentum]


CASES = [{"batch": 2}, {"documents": BORDERS}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*CASES, {"documents": BORDERS, "norm": True, "base": True}, {"batch": 2, "output": "silu"}]
)
def test_the_operators_keep_the_rules_of_the_library(case):
    torch.library.opcheck(memory_chunked, Arguments(**case).op)
    arguments = Arguments(**case, grad=False)
    doutputs = [torch.rand_like(x) for x in (arguments.tokens[2], *arguments.weights, *arguments.momentum)]
    torch.library.opcheck(memory_chunked_backward, (doutputs, *arguments.op))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_is_eager_and_so_is_every_gradient(case):
    arguments = Arguments(**case)
    compiled = torch.compile(arguments.run, fullgraph=True, backend="aot_eager")
    expected, found = arguments.run(), compiled()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # of some results only: the others' gradients are then undefined
    for part in (slice(0, 1), slice(1, 3), slice(0, 7)):
        grads = [
            torch.autograd.grad(
                torch.stack([x.square().sum() for x in outputs[part]]).sum(), arguments.leaves,
                retain_graph=True, allow_unused=True, materialize_grads=True,
            )
            for outputs in (expected, found)
        ]  # fmt: skip
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_the_compiler_is_not_imported_before_it_is_used():
    code = "import sys, titans_kernels; assert not {'torch._dynamo', 'torch._inductor'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shapes_without_values():
    with torch.device("meta"):
        rand = lambda *s: torch.empty(*s, requires_grad=True)  # noqa: E731
        tokens = [rand(1, 20, 2, 3) for _ in range(3)] + [rand(1, 20, 2) for _ in range(3)]
        y, state = neural_memory(
            *tokens, (rand(2, 3, 5), rand(2, 5, 3)), cu_seqlens=torch.empty(4, dtype=torch.int32)
        )
    assert (y.shape, y.device.type) == ((1, 20, 2, 3), "meta")
    assert [x.shape for x in state.weights] == [(3, 2, 3, 5), (3, 2, 5, 3)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(monkeypatch, mode):
    saved = []
    inner = chunked.Plan.save
    monkeypatch.setattr(chunked.Plan, "save", lambda *args: saved.append(args) or inner(*args))
    arguments = Arguments()
    with mode():
        arguments.run(backend="chunked")
    assert not saved
    arguments.run(backend="chunked")
    assert saved


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Each time that borders are read from the device, and each layout that is made."""
    seen: list[str] = []
    read, made = Tensor.tolist, layout.Packed.of
    monkeypatch.setattr(Tensor, "tolist", lambda x: (seen.append("read"), read(x))[1])
    monkeypatch.setattr(layout.Packed, "of", lambda *args: (seen.append("made"), made(*args))[1])
    return seen


def test_borders_are_read_once_for_each_tensor(reads):
    arguments = Arguments(documents=BORDERS)
    expected = arguments.run()
    del reads[:]
    torch.testing.assert_close(arguments.run(), expected, rtol=0, atol=0)
    arguments.run(backend="reference")
    assert not reads
    arguments.cu_seqlens[1] = 4  # one and the same tensor, of other borders
    other = Arguments(documents=[0, 4, 6, 20])
    torch.testing.assert_close(arguments.run(), other.run(), rtol=0, atol=0)
    arguments.cu_seqlens[1] = 7
    with pytest.raises(ValueError, match="cu_seqlens: must rise from 0 to T = 20"):
        arguments.run()


def test_a_change_of_the_borders_through_numpy_is_seen():
    """It shares the tensor's memory, and torch counts no change of it."""
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            arguments = Arguments(documents=BORDERS)
            before = arguments.run(), arguments.run(backend="reference")
            arguments.cu_seqlens.numpy()[1] = 4
            other = Arguments(documents=[0, 4, 6, 20])
            for (old, *_), backend in zip(before, ("auto", "reference"), strict=True):
                found, expected = arguments.run(backend=backend), other.run(backend=backend)
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
                assert not torch.equal(found[0], old)


def test_borders_read_in_inference_serve_a_training_step():
    arguments = Arguments(documents=BORDERS)
    with torch.inference_mode():
        expected = arguments.run()[0]
    y = arguments.run()[0]
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    y.sum().backward()


def test_what_inference_keeps_serves_training_too():
    """Masks are made once; one made in inference mode could not be saved for a backward."""
    gates._kept_not_later.cache_clear()
    r = torch.rand(2, 7)
    with torch.inference_mode():
        gates.decay_products(r)
    gates.decay_products(r.requires_grad_()).sum().backward()
    assert r.grad is not None
    assert r.grad.isfinite().all()
