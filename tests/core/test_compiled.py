"""Models under torch.compile and on the meta device: no graph breaks, and the same result as eager."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.core.small import BASELINE_OPTIONS, MEMORY_VARIANTS, VARIANTS, config, tokens
from titans_core import Documents, LanguageModel, MemoryConfig, ModelConfig, NeuralMemory, record
from titans_core.layers import RotaryEmbedding
from titans_kernels.memory.parts import layout

QUIET = "ignore:(The .grad attribute of a Tensor|.*Function'> should not be)"  # Dynamo does so itself
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(QUIET)]

MEMORIES = [*MEMORY_VARIANTS, "deltanet", "gated_deltanet", "gated_deltanet_h2", "ttt_linear", "ttt_mlp"]


def model(variant: str, layers: int = 1, window: int | None = 12, **memory) -> LanguageModel:
    torch.manual_seed(0)
    c = config(variant, persistent=ModelConfig().persistent_tokens, window=window, options={}, **memory)
    return LanguageModel(c.model_copy(update={"n_layers": layers}))


def result(m: LanguageModel, x: torch.Tensor, **given: object) -> list[torch.Tensor]:
    logits = m(x, **given).logits
    grads = torch.autograd.grad(logits.square().mean(), list(m.parameters()), materialize_grads=True)
    return [logits.detach(), *grads]


# MAC is compiled by the segment, below; MAG has what is in LMM and MAL, GLA's decays are HGRN2's, and
# Mamba-2's are RetNet's; a setting or a stack of blocks that compile adds a nightly case
NIGHTLY = {
    *("lmm", "mac", "mal", "hgrn2", "retnet", "deltanet", "gated_deltanet", "ttt_mlp"),
    *("based", "gated_deltanet_h2", "samba"),
}
nightly = lambda variants, some=VARIANTS: [  # noqa: E731
    pytest.param(v, marks=pytest.mark.nightly if v in some else ()) for v in variants
]


@pytest.mark.parametrize("variant", nightly(VARIANTS, NIGHTLY))
def test_whole_model_compiles_and_gives_the_eager_result(variant):
    m, x = model(variant), tokens(2, 21)
    if variant in BASELINE_OPTIONS:  # normalising the reads of a small head amplifies float32 rounding
        m = m.double()
    torch._dynamo.reset()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(result(compiled, x), result(m, x), rtol=1e-5, atol=5e-6)


# MAC behind the compiler's front end alone: its back end takes four times as long
@pytest.mark.parametrize(("variant", "backend"), [
    ("mac", "eager"), ("mag", "aot_eager"),
    *(pytest.param(v, "aot_eager", marks=pytest.mark.nightly) for v in ("lmm", "mac", "mal", "transformer")),
])  # fmt: skip
def test_packed_documents_compile_too(variant, backend):
    made = partial(model, variant, window=12 if variant in ("lmm", "mal") else None)
    if variant == "mac":  # a chunk a segment: half the graph
        made = partial(made, chunk_size=16)
    m, x = made(), tokens(2, 21)
    compiled = torch.compile(m, fullgraph=True, backend=backend)
    torch._dynamo.reset()
    if variant == "mac":  # by the segment
        (block,) = (compiled := made()).blocks
        block.recompute = "selective"
        block.compile(fullgraph=True, backend=backend)
    starts = torch.zeros(2, 21, dtype=torch.bool)
    for row, t in ((0, [9]), (1, [13, 14])):  # more each time
        starts[row, t] = True
        forms = (compiled, Documents.from_starts(starts)), (m, starts)
        results = [result(form, x, document_starts=given) for form, given in forms]
        torch.testing.assert_close(*results, rtol=1e-5, atol=5e-6)


def test_parts_of_a_row_and_a_recorded_pass_compile_too():
    torch.manual_seed(0)
    layer, x = NeuralMemory(8, MemoryConfig(heads=1, depth=1, chunk_size=3, conv=False)), torch.randn(1, 8, 8)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        cache, outputs = None, []
        for part in x.split([4, 1, 1, 1, 1], 1):  # across a chunk boundary
            y, cache = compiled(part, cache)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x)[0], rtol=1e-5, atol=1e-5)
    m, x = model("lmm"), tokens(2, 32)
    torch._dynamo.reset()
    compiled, summaries = torch.compile(m, fullgraph=True, backend="eager"), []
    for form in (m, compiled):
        with record(m) as seen:
            form(x)
        summaries.append(seen.summary())
    assert summaries[1] == pytest.approx(summaries[0])


def test_rotary_angles_are_one_operator_of_a_graph():
    """Fused into the kernels that rotate, they are computed again for every head, in float64."""
    graphs, position = [], torch.arange(5)[None]
    angles = partial(RotaryEmbedding.at, width=8, base=1e4, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(angles, fullgraph=True, backend=lambda g, _: (graphs.append(g), g.forward)[1])
    torch.testing.assert_close(compiled(position), angles(position), rtol=0, atol=0)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [name for name in called if "getitem" not in name] == ["titans.rotary.default"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_without_values(variant):
    with torch.device("meta"):
        out = model(variant)(torch.zeros(2, 21, dtype=torch.long))
    assert (out.logits.shape, out.logits.device.type) == ((2, 21, 40), "meta")


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_are_laid_out_once_for_all_layers(monkeypatch, variant, mode):
    known, made = [], []
    know, make = layout._Known, layout.Packed.of
    monkeypatch.setattr(layout, "_Known", lambda *args: (known.append(args), know(*args))[1])
    monkeypatch.setattr(layout.Packed, "of", lambda *args: (made.append(args[1]), make(*args))[1])
    m, starts = model(variant, layers=3), torch.zeros(2, 21, dtype=torch.bool)
    starts[0, 5] = True
    with mode():
        m(tokens(2, 21), document_starts=starts)
    # Based's window of 64 is longer than the row; attention needs boundaries
    # where it is compiled, and the others none. MAC has the documents, and those in each of its segments
    needed = variant in [*MEMORIES, "based"]
    segments = -(-21 // m.config.attention.segment_size) if variant == "mac" else 0
    assert len(known) - segments in ({1} if needed else {0, 1})
    assert len(known) == len({borders for _, borders in known})
    assert len(made) == len(set(made))


@pytest.mark.parametrize("variant", ["mac", "transformer", *nightly(["lmm", "mag", "mal"])])
def test_batches_of_changing_documents_take_two_graphs_at_most(variant):
    m, counter = model(variant, window=16), CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    for block in m.blocks:
        block.recompute = "selective"  # as on a GPU
        block.compile(backend=counter, fullgraph=True)
    torch.manual_seed(1)
    for step in range(14):
        with record(m) if step == 7 else nullcontext() as seen:
            m(tokens(4, 64), document_starts=torch.rand(4, 64) < 1 / 14).logits.square().mean().backward()
        assert seen is None or bool(seen.summary()) == (variant != "transformer")
    assert 1 <= counter.frame_count <= 2
