"""The generic form: rules made of hooks against the recurrence, and rules that compute a chunk themselves."""

import re
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.cases import Case, assert_same
from tests.small import documented
from titans_kernels import RULES, DecodeState, Extension, extend_memory, find_rule, neural_memory
from titans_kernels.memory.forms import reference
from titans_kernels.memory.forms.generic import write_chunk
from titans_kernels.memory.options import Options
from titans_kernels.memory.rules import GatedDelta, Rule

# the kernels' tests also run where the models are not installed
titans_core = pytest.importorskip("titans_core")
LanguageModel, MemoryConfig = titans_core.LanguageModel, titans_core.MemoryConfig
ModelConfig = titans_core.ModelConfig


@dataclass(frozen=True)
class Robust(Rule):
    """A loss of its own with a gate of its own, as in MIRAS's Yaad."""

    extra_gates: ClassVar[int] = 1
    delta: float = 1.0

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        return self.delta * ((prediction - v).square() + extra[0][..., None] + 0.1).sqrt().sum(-1)


@dataclass(frozen=True)
class Start(Rule):
    """Reads at the start of a chunk."""

    reads: ClassVar[Literal["token", "chunk"]] = "chunk"


@dataclass(frozen=True)
class Normalised(GatedDelta):
    """An update that is not linear in the gradient: each layer moves by its momentum's direction."""

    extra_gates: ClassVar[int] = 2

    def update(self, weights, momentum, gradient, alpha, eta, theta, *extra):
        momentum = eta * momentum - extra[0] * theta * gradient
        size = momentum.square().sum((-1, -2), keepdim=True).add(1e-3).sqrt()
        return (1 - alpha) * weights + 0.1 * extra[1] * momentum / size, momentum


@dataclass(frozen=True)
class Halved(Normalised):
    """A chunk of its own: a full one halves what it has written."""

    def chunk(self, tokens, state, options):
        y, after = write_chunk(self, tokens, state, options)
        if tokens.q.shape[2] < options.chunk_size:
            return y, after
        pairs = zip(state.weights, after.weights, strict=True)
        return y, after._replace(weights=tuple((a + b) / 2 for a, b in pairs))


HOOKS = {
    "paper": Rule(), "gated_delta": GatedDelta(), "robust": Robust(0.5), "start": Start(),
    "normalised": Normalised(),
}  # fmt: skip
each_rule = pytest.mark.parametrize("rule", HOOKS.values(), ids=HOOKS)
# T, chunk_size, surprise_bound: one token, the online rule, a short last chunk, a whole one, a single chunk
CALLS = [(2, 16, None), (11, 1, 0.5), (37, 16, None), (28, 7, 0.5), (9, 64, 0.5)]


def made(T: int, rule: Rule, depth: int = 2, **given) -> Case:
    return Case(T, depth, extra=rule.extra_gates, **given)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@each_rule
def test_generic_form_equals_recurrence(rule, depth):
    for T, chunk_size, bound in CALLS:
        options = {"chunk_size": chunk_size, "surprise_bound": bound, "rule": rule}
        made(T, rule, depth).check("generic", "auto", **options)


@pytest.mark.parametrize(("kind", "groups", "base"), [
    *(("input", None, False), ("norm", None, False), ("none", 2, False), ("norm", 4, False)),
    *(("none", None, True), ("norm", 2, True)),
])  # fmt: skip
@each_rule
def test_generic_form_with_extensions_equals_recurrence(rule, kind, groups, base):
    # a gradient at weights that have forgotten all has no bound through LN
    for depth, (T, chunk_size) in product((1, 3), ((5, 1), (11, 4))):
        options = {"chunk_size": chunk_size, "surprise_bound": 0.5, "rule": rule}
        case = made(T, rule, depth, kind=kind, groups=groups, base=base)
        case.check("generic", cuts=[[3, T - 3]], decoded=True, **options)


@pytest.mark.parametrize("activation", ["gelu", "identity"])
@each_rule
def test_generic_form_of_other_widths_and_rows_equals_recurrence(rule, activation):
    case = made(21, rule, widths=[3, 6, 2, 3], batch=3)
    options = {"chunk_size": 8, "surprise_bound": 0.5, "activation": activation, "rule": rule}
    case.check("generic", cuts=[[3, 1, 17]], decoded=True, **options)


@pytest.mark.parametrize("rule", [*HOOKS.values(), Halved()], ids=[*HOOKS, "halved"])
def test_any_cut_equals_whole(rule):
    options = {"chunk_size": 8, "surprise_bound": 0.3, "rule": rule}
    cuts = [33], [11, 22], [8, 16, 9], [5, 1, 1, 1, 17, 1, 7], [31, 1, 1]
    made(33, rule, 3).check(cuts=cuts, decoded=True, form="generic", **options)


def test_rule_with_its_own_chunk_replaces_the_computation():
    case, rule = made(20, Halved()), Halved()
    options = {"chunk_size": 8, "backend": "generic"}
    parts, state = [], case.state
    for start in (0, 8, 16):
        tokens = [x[:, start : start + 8] for x in case.tokens]
        extension = Extension(rule=Normalised(), gates=tokens[6])
        y, after = neural_memory(*tokens[:6], *state, extension=extension, **options)
        weights = tuple((a + b) / 2 if start < 16 else b for a, b in zip(state[0], after[0], strict=True))
        state = after._replace(weights=weights)
        parts.append(y)
    expected = [torch.cat(parts, 1), *state.weights, *state.momentum]
    assert_same(expected, case.whole(rule=rule, **options), case.leaves)
    with pytest.raises(ValueError, match=r"^backend: reference .* Halved\(\) computes chunks as a whole"):
        case.whole(rule=rule, chunk_size=8, backend="reference")


@each_rule
def test_gradient_of_reference_is_that_of_the_inner_loss(rule):
    case = made(2, rule, 3)
    k, v = (x[:, 0].detach() for x in case.tokens[1:3])
    extra = case.tokens[6][:, 0].detach() if rule.extra_gates else k[..., :0]
    options, weights = Options(1, "silu", None, None, rule), case.state.weights
    prediction = reference.apply_memory(weights, k[:, :, None], options)
    loss = rule.loss(prediction, v[:, :, None], *extra[:, :, None].unbind(-1)).sum()
    expected = torch.autograd.grad(loss, weights)
    actual = reference.inner_gradient(weights, k, v, options, extra)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 8])
def test_gated_delta_is_gated_deltanet(chunk_size):
    """With several tokens a chunk, the gradient is at its decayed start, without what the chunk writes."""
    case = Case(30, 1)
    with torch.no_grad():
        case.tokens[4].zero_()
        case.state.momentum[0].zero_()
    q, k, v, alpha, _, theta = (x[0, :, 0].detach() for x in case.tokens)
    S, reads = case.state.weights[0][0, 0].detach().mT, []  # published for column vectors, S [D_v, D_k]
    for t in range(len(q)):
        if t % chunk_size == 0:
            kept = S
        kept, S, beta = (1 - alpha[t]) * kept, (1 - alpha[t]) * S, 2 * theta[t]
        S = S - beta * torch.outer(kept @ k[t], k[t]) + beta * torch.outer(v[t], k[t])
        reads.append(S @ q[t])
    for backend in ("reference", "generic", "auto"):
        y, *_ = case.whole(backend=backend, rule="gated_delta", chunk_size=chunk_size)
        torch.testing.assert_close(y[0, :, 0], torch.stack(reads), rtol=1e-12, atol=1e-12)


def test_gates_of_a_rule_are_required_and_not_accepted_without_need():
    case, gates = Case(4, 1), torch.rand(1, 4, 2, 1)
    for rule, given in ((Robust(), None), (Robust(), gates[..., :0]), (Rule(), gates)):
        message = r"^extension.gates: shape .* is not \[B, T, H, E\] = \(1, 4, 2, [01]\)"
        with pytest.raises(ValueError, match=message):
            neural_memory(*case.tokens, *case.state, extension=Extension(rule=rule, gates=given))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [GatedDelta(), Start()], ids=str)
def test_compiled_rule_equals_eager(rule):
    case, options = Case(6, 2), {"chunk_size": 4, "surprise_bound": 0.5, "rule": rule}
    compiled = torch.compile(case.whole, fullgraph=True, backend="aot_eager")
    assert_same(case.whole(**options), compiled(**options), case.leaves)


def test_form_that_does_not_support_a_rule_is_refused():
    case, rule = Case(4), GatedDelta()
    for backend in ("chunked", "native", "online", "triton"):
        with pytest.raises(ValueError, match=f"^backend: {backend} does not support this call: (it|rule:) "):
            case.whole(backend=backend, rule=rule)
    with pytest.raises(ValueError, match=r"^backend: 'autograd' is now called 'generic'"):
        case.whole(backend="autograd")
    start, gated = DecodeState.of(case.state), Extension(rule=rule)
    _, opened = extend_memory(*case.tokens, start, chunk_size=8)
    with pytest.raises(ValueError, match=r"^state: inside a chunk of a linear rule"):
        extend_memory(*case.tokens, opened, chunk_size=8, extension=gated)
    _, opened = extend_memory(*case.tokens, start, chunk_size=8, extension=gated)
    with pytest.raises(ValueError, match=r"^state: inside a chunk of another rule"):
        extend_memory(*case.tokens, opened, chunk_size=8)


@pytest.fixture
def lp(tmp_path, monkeypatch) -> str:
    """The rule of docs/extending.md, with a check of its parameter."""
    check = "\n    def __post_init__(self):\n        if self.p < 1:\n            raise ValueError("
    source = documented("kernels/titans_kernels/memory/lp.py")
    (tmp_path / "my_rules.py").write_text(source + check + 'f"p: {self.p} must be 1 or more")\n')
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rules:Lp"


@pytest.mark.parametrize(("name", "message"), [
    ("gated", f"rule: 'gated' is not one of {', '.join(RULES)}; did you mean gated_delta?"),
    ("xyzzy", f"rule: 'xyzzy' is not one of {', '.join(RULES)}; or name a class of your own"),
    ("paper(delta=1)", "rule: paper has no parameter 'delta'; it has none"),
    ("my_rules:Lp(q=1)", "rule: my_rules:Lp has no parameter 'q'; give one of p"),
    ("my_rules:Lp(p=two)", "rule: p of my_rules:Lp is 'two', not a number"),
    ("my_rules:Lp(p=0.5)", "rule: my_rules:Lp: p: 0.5 must be 1 or more"),
    ("my_rules:Lp(p=2.5", "rule: 'my_rules:Lp(p=2.5' should be package.module:Class"),
    ("no_such_module:Rule", "rule: no_such_module:Rule: 'no_such_module' cannot be imported: ModuleNot"),
    ("titans_kernels:Rul", "rule: titans_kernels:Rul: titans_kernels has no 'Rul'; did you mean Rule?"),
    ("math:pi", "rule: math:pi is not a subclass of titans_kernels.memory.rules.Rule"),
])  # fmt: skip
def test_rule_that_does_not_exist_is_named(lp, name, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}[^\n]*$"):
        find_rule(name)
    with pytest.raises(ValueError, match=f"^memory.{re.escape(message)}[^\n]*$"):
        LanguageModel(ModelConfig(memory=MemoryConfig(rule=name)))


def test_rule_from_outside_is_found_trains_a_model_and_may_be_registered(lp, monkeypatch):
    rule = find_rule(f"{lp}(p=2.5)")
    Case(20, 2).check("auto", cuts=[[3, 6, 11]], chunk_size=8, surprise_bound=0.5, rule=rule)
    losses = {}
    monkeypatch.setitem(RULES, "lp", type(find_rule(lp)))
    for name in (f"{lp}(p=4)", "lp(p=4)", "paper"):
        torch.manual_seed(0)
        memory = MemoryConfig(heads=2, chunk_size=8, rule=name)
        m = LanguageModel(ModelConfig(vocab_size=20, d_model=16, n_layers=1, memory=memory))
        x = torch.randint(0, 20, (2, 21), generator=torch.Generator().manual_seed(1))
        loss = F.cross_entropy(m(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in m.parameters())
        losses[name] = loss.item()
    assert losses["lp(p=4)"] == losses[f"{lp}(p=4)"] != losses["paper"]
