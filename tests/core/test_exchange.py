"""`accelerate`: an exchanged model equals the plain one, and leaves what users change in it in force."""

import copy
import pickle
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.core.small import SWITCHES, perturbed, tokens
from tests.kernels.cases import needs_compiler
from titans_core import LanguageModel, telemetry
from titans_core.attention import Attention
from titans_core.config import AttentionConfig
from titans_core.documents import Documents
from titans_core.interventions import Intervention, intervene
from titans_kernels import accelerate, exchange
from titans_kernels.attention import MAX_SPAN
from titans_kernels.native import library

pytestmark = needs_compiler
METHODS = [f"{cls}.{name}" for cls, methods in exchange.METHODS.items() for name in methods]
MAC = "titans_core.blocks.mac.MAC.segments"
ATTEND = "titans_core.attention.Attention.attend"


@pytest.fixture
def served(monkeypatch) -> Iterator[list[str]]:
    """The exchanged methods that ran, in order."""
    ran: list[str] = []

    def recorded(key: str, method: Callable) -> Callable:
        def call(*args):
            y = method(*args)
            if y is not NotImplemented:
                ran.append(key)
            return y

        return call

    table = {
        cls: {name: recorded(f"{cls}.{name}", method) for name, method in methods.items()}
        for cls, methods in exchange.METHODS.items()
    }
    monkeypatch.setattr(exchange, "METHODS", table)
    exchange._exchanged.cache_clear()
    yield ran
    exchange._exchanged.cache_clear()


def model(variant: str, dtype: torch.dtype = torch.float64, **options) -> LanguageModel:
    return perturbed(variant, **options).to(dtype)


def exchanged(net: nn.Module) -> nn.Module:
    return accelerate(copy.deepcopy(net))


def results(net: LanguageModel, rows: int, cuts: list[int], starts: Tensor | None = None) -> list[Tensor]:
    """Losses of rows in pieces of ``cuts`` tokens, and the gradient of every parameter."""
    x, losses, state, first = tokens(rows, sum(cuts) + 1), [], None, 0
    for cut in cuts:
        part, targets = (x[:, i : i + cut] for i in (first, first + 1))
        out = net(part, targets_BT=targets, state=state, document_starts=starts)
        losses.append(out.losses)
        state, first = out.state, first + cut
    y = torch.cat(losses, 1)
    return [y, *torch.autograd.grad(y.sin().sum(), list(net.parameters()), materialize_grads=True)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    eps = 1e-9 if expected[0].dtype == torch.float64 else 1e-3
    for x, y in zip(actual, expected, strict=True):
        assert (x - y).norm() <= eps * y.norm() + 1e-3 * eps


# whole models

MAC_OPTIONS: dict[str, dict] = {
    name: SWITCHES[name]
    for name in (
        "default", "linear", "deep", "online", "no_conv", "no_momentum", "no_decay", "unbounded", "wide_gelu",
        "write_budget", "forget_to_initial", "linear_to_initial",
    )
} | {
    "no_output_gate": {"output": ("norm",)},
    "plain_values": {"value_norm": False, "qk_norm": False, "max_theta": 0.05},
    "bounded_decay": {"max_alpha": 0.25}, "no_persistent": {"persistent": 0},
    "no_positions": {"attention": {"positions": "none"}},
    "plain_attention": {"attention": {"conv": False, "qk_norm": False}},
    "short_convolution": {"conv": 2, "attention": {"conv_kernel": 6}},
    "section_4_4": SWITCHES["section_4_4"], "normalised_attention": {"attention": {"output": ["norm"]}},
}  # fmt: skip
CASES = [("mac", name, options) for name, options in MAC_OPTIONS.items()]
CASES += [
    (variant, name, SWITCHES[name])
    for variant, name in [
        ("lmm", "default"), ("lmm", "plain_output"), ("lmm", "no_conv"),
        ("mag", "default"), ("mag", "product"), ("mag", "section_4_4"), ("mal", "default"),
        ("transformer", "default"), ("lmm", "section_4_4"), ("lmm", "budget_per_chunk"),
        ("transformer", "titans_projections"), ("retnet", "default"),
    ]
]  # fmt: skip
CUTS = {"row": [52], "carried": [16, 32, 4], "inside a segment": [5, 47], "packed": [47]}
STARTS = torch.zeros(2, 47, dtype=torch.bool)
STARTS[0, [0, 1, 2, 19]] = STARTS[1, [0, 16, 33]] = True


@pytest.mark.parametrize(("variant", "name", "options"), CASES, ids=[f"{v} {n}" for v, n, _ in CASES])
@pytest.mark.parametrize("kind", ["row", "packed"])
def test_losses_and_gradients_equal_the_plain_model(served, variant, name, options, kind):
    net, starts = model(variant, **options), STARTS if kind == "packed" else None
    assert_same(results(exchanged(net), 2, CUTS[kind], starts), results(net, 2, CUTS[kind], starts))
    assert served
    if variant == "mac":
        calls = served.count(MAC if kind == "row" else MAC.replace("segments", "packed"))
        assert calls == (0 if options.get("attention", {}).get("output") else 2)  # one a block


@pytest.mark.parametrize("kind", ["carried", "inside a segment"])
@pytest.mark.parametrize("variant", ["mac", "mag", "lmm"])
def test_state_carries_over_and_its_gradient_comes_back(served, variant, kind):
    net = model(variant)
    assert_same(results(exchanged(net), 2, CUTS[kind]), results(net, 2, [52]))
    assert served


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "transformer"])
def test_float32_equals_float64_up_to_rounding(served, variant):
    net = model(variant, torch.float32)
    assert_same(results(exchanged(net), 2, [52]), [x.float() for x in results(net.double(), 2, [52])])
    assert served


@pytest.mark.parametrize("threads", [1, 2])
def test_number_of_threads_changes_nothing(threads, torch_threads):
    net = exchanged(model("mac"))
    expected = results(net, 5, [32])
    torch_threads(threads)
    assert_same(results(net, 5, [32]), expected)


@pytest.mark.parametrize("key", METHODS)
@pytest.mark.usefixtures("served")
def test_wrong_exchange_is_noticed(monkeypatch, key):
    """Every method of the table is reached by the comparison above."""
    cls, _, name = key.rpartition(".")
    right = exchange.METHODS[cls][name]

    def wrong(*args):
        y = right(*args)
        if y is not NotImplemented:
            for x in tree_leaves(y[0] if isinstance(y, tuple) else y):
                x.data *= 1.001
        return y

    monkeypatch.setitem(exchange.METHODS, cls, exchange.METHODS[cls] | {name: wrong})
    net, kind = model("mac" if "mac" in key else "mag"), "packed" if name == "packed" else "row"
    runs = [(net, 2, CUTS[kind], STARTS if kind == "packed" else None) for net in (exchanged(net), net)]
    with pytest.raises(AssertionError):
        assert_same(results(*runs[0]), results(*runs[1]))


# attention alone: windows, prefixes, cached keys

D, BATCH = 20, 3
PLAIN = dict.fromkeys(("silu", "conv", "qk_norm"), False)
KINDS = {"default": {}, "plain": PLAIN, "no_positions": {"positions": "none"}}


def attention(window: int | None, **options) -> Attention:
    torch.manual_seed(0)
    layer = Attention(D, AttentionConfig(heads=2, window=window, **options)).double()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.4)
    return layer


def inputs(T: int, persistent: int) -> list[Tensor]:
    shapes = (BATCH, T, D), *([(persistent, D)] if persistent else [])
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients(parts: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    sums = [(x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in parts]
    return [*parts, *torch.autograd.grad(torch.stack(sums).sum(), leaves, materialize_grads=True)]


def compare(layer: Attention, run: Callable, served: list[str], calls: int) -> None:
    torch.testing.assert_close(run(exchanged(layer)), run(layer), rtol=1e-9, atol=1e-10)
    assert served.count(ATTEND) == calls


@pytest.mark.parametrize(("T", "packed"), [(2, False), (33, False), (40, True)])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("window", "persistent"), list(product([1, 5, 32, None], [0, 4])))
def test_attention_over_any_window_in_rows_and_packed(served, name, window, persistent, T, packed):
    x, *prefix = leaves = inputs(T, persistent)
    documents = Documents.from_starts(torch.rand(BATCH, T) < 0.1) if packed else None
    positions = documents.position_BT if documents else torch.arange(T)[None]

    def run(m: Attention) -> list[Tensor]:
        y, after = m(x, positions, None, prefix[0] if prefix else None, documents)
        assert (after is None) == packed
        return gradients([y, *(after.keys if after else ())], [*leaves, *m.parameters()])

    compare(attention(window, **KINDS[name]), run, served, calls=1)


@pytest.mark.parametrize(("window", "persistent"), list(product([6, None], [0, 4])))
@pytest.mark.parametrize("cuts", [[17, 3, 20], [2, 2, 1, 35]])
def test_attention_carries_and_resets_its_keys(served, window, persistent, cuts):
    x, *prefix = leaves = inputs(sum(cuts), persistent)
    prefix = prefix[0] if prefix else None

    def run(m: Attention) -> list[Tensor]:
        state, parts, first = None, [], 0
        for i, cut in enumerate(cuts):
            if i == 2:
                state = m.reset(state, torch.tensor([False, True, False]), prefix)
            y, state = m(x[:, first : first + cut], torch.arange(first, first + cut)[None], state, prefix)
            parts.append(y)
            first += cut
        return gradients([*parts, *state.keys], [*leaves, *m.parameters()])

    # single tokens are left to PyTorch
    compare(attention(window), run, served, calls=sum(cut > 1 for cut in cuts))


def test_attention_leaves_unsupported_calls_and_takes_held_counts_of_any_strides(served):
    m, (x,) = accelerate(attention(8)), inputs(20, 0)
    m(x, torch.arange(20).expand(BATCH, -1))  # positions of each row
    m(x[:, :1], torch.zeros(1, 1, dtype=torch.long))
    m.cut = True
    m(x, torch.arange(20)[None])
    long = torch.randn(1, MAX_SPAN + 1, D, dtype=torch.float64)
    accelerate(attention(None))(long, torch.arange(long.shape[1])[None])
    assert ATTEND not in served
    layer, (x,) = attention(8), inputs(12, 0)
    with torch.no_grad():
        _, state = layer(x, torch.arange(12)[None])
        at = torch.arange(12, 24)[None]
        for held_B in (torch.tensor([0, 7, 3, 7, 7, 7])[::2], torch.tensor([2])):
            served.clear()
            compare(layer, lambda m, h=held_B: [m(x, at, state._replace(held_B=h))[0]], served, calls=1)
        m = accelerate(layer)
        with pytest.raises(RuntimeError, match="Sizes of tensors"):
            m(x, at, m(x[:1], torch.arange(12)[None])[1])


# what stays in force


class Scaled(nn.Linear):
    """A linear layer of a class of its own, in the manner of adapters."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, input: Tensor) -> Tensor:
        return 1.5 * super().forward(input)


class Doubled(nn.Module):
    def forward(self, X: Tensor) -> Tensor:
        return 2 * X


def changed(layer: nn.Linear, change: str) -> nn.Module:
    match change:
        case "hook":
            layer.register_forward_hook(lambda module, given, y: 1.5 * y)
        case "parametrization":
            nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
        case "forward":
            layer.forward = lambda input, forward=layer.forward: 1.5 * forward(input)
    return Scaled(layer) if change == "subclass" else layer


def layers(net: LanguageModel) -> list[str]:
    """The linear layers of a block and the head."""
    names = [name for name, m in net.named_modules() if isinstance(m, nn.Linear)]
    return [name for name in names if name == "head" or name.startswith("blocks.0.")]


@pytest.mark.parametrize("change", ["hook", "subclass", "parametrization", "forward"])
@pytest.mark.parametrize(("variant", "last"), [("mac", True), ("mag", False)])
def test_changed_layer_is_called(variant, change, last):
    """Before the exchange and after it, each changes the losses as in a plain model."""
    x = tokens(2, 41)
    losses_of = lambda net: net(x[:, :-1], targets_BT=x[:, 1:]).losses  # noqa: E731
    untouched = losses_of(model(variant))
    for name in layers(model(variant)):
        losses = []
        for fast in (True, False):
            net = model(variant)
            if fast and last:
                accelerate(net)
            parent, _, child = name.rpartition(".")
            torch.manual_seed(1)
            setattr(net.get_submodule(parent), child, changed(net.get_submodule(name), change))
            if fast and not last:
                accelerate(net)
            losses.append(losses_of(net))
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-10)
        assert (losses[0] - untouched).abs().max() > 1e-9, f"{name} was not called"


def test_hooks_of_any_module_in_mac_and_methods_of_a_subclass_run():
    for name in ("memory", "memory.output_norm", "attention.conv_k", "memory_norm", "gate"):
        net, calls = accelerate(model("mac")), []
        net.blocks[0].get_submodule(name).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        results(net, 2, [40])
        assert calls, name

    class Silent(Attention):
        def attend(self, *args):
            y, keys, held_B = super().attend(*args)
            return 0 * y, keys, held_B

    net = model("mag")
    net.blocks[0].attention.__class__ = Silent
    assert_same(results(exchanged(net), 2, [40]), results(net, 2, [40]))


def test_interventions_and_telemetry_see_the_same_model(served):
    net, summaries = model("mac"), []
    fast = exchanged(net)
    for change in (Intervention(memory=False), Intervention(attention="off"), Intervention(window=8)):
        with intervene(net, change), intervene(fast, change):
            assert_same(results(fast, 2, [40]), results(net, 2, [40]))
    served.clear()
    for m in (fast, net):
        with telemetry.record(m) as seen:
            results(m, 2, [40])
        summaries.append(seen.summary())
    assert summaries[0] == pytest.approx(summaries[1])
    assert MAC not in served


def test_copies_and_pickles_are_exchanged_and_parameters_keep_their_names(served):
    net = model("mac")
    fast = exchanged(net)
    assert (list(fast.state_dict()), repr(fast)) == (list(net.state_dict()), repr(net))
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        served.clear()
        assert_same(results(copied, 2, [40]), results(net, 2, [40]))
        assert served.count(MAC) == 2
        assert accelerate(copied) is copied


def test_without_a_compiler_nothing_is_exchanged_and_large_projections_are_left(monkeypatch, served):
    with monkeypatch.context() as patched:
        patched.setattr("titans_kernels.attention.MAX_BYTES", 0)
        results(accelerate(model("mac")), 2, [40])
        assert MAC not in served
    served.clear()
    monkeypatch.setenv("TITANS_NATIVE", "0")
    library.cache_clear()
    try:
        results(accelerate(model("mac")), 2, [40])
    finally:
        monkeypatch.undo()
        library.cache_clear()
    assert not served


@pytest.mark.slow
def test_compiled_model_runs_the_plain_methods(served):
    net, x = model("transformer", torch.float32), tokens(2, 24)
    torch.testing.assert_close(torch.compile(exchanged(net), backend="eager")(x).logits, net(x).logits)
    assert not served


@pytest.mark.parametrize("then", [torch.float32, torch.float64])
def test_state_of_another_precision_is_continued(then):
    """A state from autocast, or from before the model was converted, is not read as the model's dtype."""
    net, x = accelerate(model("mac", torch.float32)), tokens(2, 80)
    with torch.no_grad():
        exact = net.double()(x[:, :64]).logits[:, 32:]
        net = net.float()
        with torch.autocast("cpu", torch.bfloat16, enabled=then is torch.float32):
            state = net(x[:, :32]).state
        logits = net.to(then)(x[:, 32:64], state).logits
    torch.testing.assert_close(logits, exact.to(then), rtol=0, atol=0.03 if then is torch.float32 else 1e-5)
