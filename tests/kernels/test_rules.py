"""Rules of the memory: each against the recurrence and against its published equations, in every form."""

import re
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.cases import Call, assert_same
from titans_kernels import RULES, DecodeState, MemoryState, Rule, extend_memory, find_rule, neural_memory
from titans_kernels.memory.activations import ACTIVATIONS, layer_shapes
from titans_kernels.memory.forms import reference
from titans_kernels.memory.rules import PAPER
from titans_kernels.memory.rules.e2_ttt import E2TTT
from titans_kernels.memory.rules.gated_delta import GatedDelta
from titans_kernels.memory.rules.lact import LaCT
from titans_kernels.memory.rules.miras import Moneta, YaadGated
from titans_kernels.memory.rules.momentum_delta import MomentumDelta
from titans_kernels.memory.rules.omega import Atlas
from titans_kernels.memory.rules.robust import Huber, Yaad

# the kernels' tests also run where the models are not installed
titans_core = pytest.importorskip("titans_core")
LanguageModel, MemoryConfig = titans_core.LanguageModel, titans_core.MemoryConfig
ModelConfig = titans_core.ModelConfig


@dataclass(frozen=True)
class Normalised(Rule):
    """A rule whose update is not linear in the gradient: each layer moves by its momentum's direction."""

    step: float = 0.1

    def update(self, weights, momentum, gradient, alpha, eta, theta):
        momentum = eta * momentum - theta * gradient
        size = momentum.square().sum((-1, -2), keepdim=True).add(1e-3).sqrt()
        return (1 - alpha) * weights + self.step * momentum / size, momentum


@dataclass(frozen=True)
class Ended(Normalised):
    """The same with an end of the chunk that needs all that `end_chunk` gets."""

    def end_chunk(self, end):
        moved = end.weights - end.kept + 0.1 * (end.start_momentum - end.kept_momentum)
        eta = end.eta.mean(-1)[..., None, None]
        return end.start + 0.5 * moved.tanh(), eta * end.momentum


EVERY_RULE = {
    "paper": Rule(),
    "gated_delta": GatedDelta(),
    "mdn": MomentumDelta(),
    "mdn_tied": MomentumDelta(tied=True),
    "mdn_angle": MomentumDelta(angle=3.0),
    "e2_ttt": E2TTT(clip=0.05),
    "moneta": Moneta(q=2.5),
    "yaad_gated": YaadGated(delta=3.0),
    "lact": LaCT(muon=0.0),  # Newton-Schulz of a rank-one step multiplies rounding errors
    "atlas": Atlas(c=1),
    "huber": Huber(delta=0.3),
    "yaad": Yaad(delta=1.3),
    "normalised": Normalised(),
    "ended": Ended(),
}
each_rule = pytest.mark.parametrize("rule", EVERY_RULE.values(), ids=EVERY_RULE)


class Case(Call):
    """Random float64 inputs of two heads, whose gates are 0 and 1 at some tokens, and a state of each row."""

    def __init__(self, T: int, depth: int = 2, *, batch: int = 1, documents: int | None = None,
                 widths: list[int] | None = None, rule: Rule = PAPER,
                 activation: str = "silu", thetas: int | None = None):  # fmt: skip
        generator = torch.Generator().manual_seed(100 * T + depth)
        rand = lambda *s: torch.rand(*s, generator=generator, dtype=torch.float64)  # noqa: E731
        widths = widths or [3, *[4] * (depth - 1), 3]
        tokens = [F.normalize(rand(batch, T, 2, n) - 0.5, dim=-1) for n in (widths[0], widths[0], widths[-1])]
        alpha, eta, theta = 0.05 * rand(batch, T, 2), 0.9 * rand(batch, T, 2), 0.1 * rand(batch, T, 2)
        chance = rand(batch, T, 2)
        alpha[chance < 0.1], eta[chance > 0.9] = 0, 0
        alpha[0, T // 2, 0], eta[0, T // 3, 1] = 1, 1
        rows = documents or batch
        shapes = [(rows, 2, *pair) for pair in layer_shapes(widths, activation)]
        extra = [rand(batch, T, 2, rule.extra_gates)] if rule.extra_gates else []
        if thetas:
            theta = 0.1 * rand(batch, T, 2, thetas)
        self.tokens = [x.requires_grad_() for x in (*tokens, alpha, eta, theta, *extra)]
        self.state = MemoryState(
            tuple(((rand(*s) - 0.5) * 2 / s[-2] ** 0.5).requires_grad_() for s in shapes),
            tuple((0.1 * rand(*s)).requires_grad_() for s in shapes),
        )


# T, chunk_size, surprise_bound: one token, the online rule, a short last chunk, a whole one, a single chunk
CALLS = [(2, 16, None), (19, 1, 0.5), (37, 16, None), (28, 7, 0.5), (9, 64, 0.5)]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@each_rule
def test_every_form_is_the_recurrence(rule, depth):
    for T, chunk_size, bound in CALLS:
        options = {"chunk_size": chunk_size, "surprise_bound": bound, "rule": rule}
        Case(T, depth, rule=rule).check("autograd", "chunked" if rule == Rule() else "auto", **options)


@pytest.mark.parametrize("activation", ["gelu", "identity", "swiglu", "geglu"])
@each_rule
def test_activations_widths_and_rows(rule, activation):
    case = Case(21, widths=[3, 6, 2, 5], batch=3, rule=rule, activation=activation)
    options = {"chunk_size": 8, "surprise_bound": 0.5, "activation": activation, "rule": rule}
    case.check("autograd", "auto", cuts=[[3, 1, 17]], decoded=True, **options)


@pytest.mark.parametrize(("given", "options", "message"), [
    ({"thetas": 2}, {"backend": "native"},
     "backend: native does not support this call: it does not support theta per matrix"),
    ({"thetas": 2}, {"write_budget": 1.0},
     "theta: one for each matrix is not supported by a write_budget; use one per head"),
    ({"thetas": 3}, {}, "theta: 3 per token and head, but the memory has 2 matrices"),
    ({"activation": "swiglu"}, {"activation": "swiglu", "backend": "native"},
     "backend: native .* does not support the activation swiglu; use"),
    ({"activation": "swiglu"}, {"activation": "silu"},
     r"weights\[1\]: shape \(1, 2, 4, 3\) is not \(2, 8, 3\)"),
    ({"widths": [3, 5, 3]}, {"activation": "geglu"},
     r"weights\[1\]: 5 inputs, not half of the 5 outputs before it"),
])  # fmt: skip
def test_what_does_not_go_together_is_named(given, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Case(4, **given).whole(**options)


@pytest.mark.parametrize("activation", ["silu", "swiglu"])
@each_rule
def test_a_theta_for_each_matrix(rule, activation):
    """In every form, cut and decoded, in packed documents, and where all are equal that of the head."""
    thetas = 5 if activation == "swiglu" else 3
    given = {"widths": [3, 6, 5, 4], "rule": rule, "activation": activation, "thetas": thetas}
    options = {"chunk_size": 8, "surprise_bound": 0.5, "activation": activation, "rule": rule}
    refused = pytest.raises(ValueError, match=r"^theta: one for each matrix is not supported by the rule M")
    with refused if rule.one_theta else nullcontext():
        case = Case(21, batch=2, **given)
        case.check("autograd", "auto", cuts=[[3, 1, 17]], decoded=True, **options)
        Case(21, documents=2, **given).check("auto", cu_seqlens=torch.tensor([0, 9, 21]), **options)
        one = case.tokens[5].detach()[..., :1]
        case.tokens[5] = one.expand(-1, -1, -1, thetas)
        several = case.whole(**options)
        case.tokens[5] = one[..., 0]
        torch.testing.assert_close(several, case.whole(**options), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "autograd"])
@each_rule
def test_packed_documents_are_separate_calls(rule, backend):
    borders = [0, 5, 18, 19, 33]
    case = Case(borders[-1], 2, documents=len(borders) - 1, rule=rule)
    options = {"chunk_size": 7, "surprise_bound": 0.5, "backend": backend, "rule": rule}
    packed = case.whole(cu_seqlens=torch.tensor(borders), **options)
    assert_same(case.apart(borders, **options), packed, case.leaves)


@pytest.mark.parametrize("chunk_size", [1, 5, 16])
@each_rule
def test_token_by_token_is_the_recurrence(rule, chunk_size):
    options = {"chunk_size": chunk_size, "surprise_bound": 0.3, "rule": rule}
    Case(23, 2, batch=2, rule=rule).check(decoded=True, **options)


@each_rule
def test_any_cut_is_the_recurrence(rule):
    cuts = [33], [11, 22], [8, 16, 9], [5, 1, 1, 1, 17, 1, 7], [31, 1, 1]
    Case(33, 3, rule=rule).check(cuts=cuts, chunk_size=8, surprise_bound=0.3, rule=rule)


@each_rule
def test_the_gradient_of_the_reference_is_that_of_the_inner_loss(rule):
    case, f = Case(2, 3, rule=rule), ACTIVATIONS["silu"]
    k, v = (x[:, 0].detach() for x in case.tokens[1:3])
    extra = case.tokens[6][:, 0].detach() if rule.extra_gates else k[..., :0]
    weights = case.state.weights
    prediction = reference.apply_memory(weights, k[:, :, None], f)
    loss = rule.loss(prediction, v[:, :, None], *extra[:, :, None].unbind(-1)).sum()
    expected = torch.autograd.grad(loss, weights)
    found = reference.inner_gradient(weights, k, v, f, None, rule, extra_BHE=extra)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def linear_case() -> tuple[Case, list[Tensor], Tensor]:
    """A linear memory without momentum: q, k, v [T, D] and alpha, theta [T] of one head, and W [D, D]."""
    case = Case(30, 1)
    with torch.no_grad():
        case.tokens[4].zero_()
        case.state.momentum[0].zero_()
    q, k, v, alpha, _, theta = (x[0, :, 0].detach() for x in case.tokens)
    return case, [q, k, v, alpha, theta], case.state.weights[0][0, 0].detach()


def assert_head_reads(case: Case, expected: list[Tensor], **options) -> None:
    for backend in ("reference", "autograd"):
        y, _ = neural_memory(*case.tokens, *case.state, backend=backend, **options)
        torch.testing.assert_close(y[0, :, 0], torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_the_gradient_at_the_decayed_state_is_gated_deltanet():
    case, (q, k, v, alpha, theta), W = linear_case()
    S, reads = W.mT, []  # the published recurrence has column vectors, S [D_v, D_k]
    for t in range(len(q)):
        keep, beta = 1 - alpha[t], 2 * theta[t]
        erase = torch.eye(3, dtype=S.dtype) - beta * torch.outer(k[t], k[t])
        S = S @ (keep * erase) + beta * torch.outer(v[t], k[t])
        reads.append(S @ q[t])
    assert_head_reads(case, reads, chunk_size=1, rule="gated_delta")


@pytest.mark.parametrize("angle", [0.0, 3.0])
def test_momentum_with_a_write_gate_is_momentum_deltanet(angle):
    """Also with decay and write gate tied by ``w = arctan(step * angle)``, as in the authors' code."""
    case = Case(30, 1, rule=MomentumDelta())
    q, k, v, alpha, mu, theta, beta = (x[0, :, 0].detach() for x in case.tokens)
    W, S, reads = case.state.weights[0][0, 0].detach(), case.state.momentum[0][0, 0].detach(), []
    momentum = -S  # the published one adds gradients of half the squared error, and is subtracted
    w = torch.arctan(2 * theta * angle)
    keep, beta = (w.cos() ** 2 * (1 - alpha), w.sin() ** 2 * beta[:, 0]) if angle else (1 - alpha, beta[:, 0])
    for t in range(len(q)):
        kept = keep[t] * W
        momentum = mu[t] * momentum + 2 * theta[t] * torch.outer(k[t], k[t] @ kept - v[t])
        W = kept - beta[t] * momentum
        reads.append(q[t] @ W)
    *tokens, extra = case.tokens
    for backend in ("reference", "autograd", "online"):
        options = {"chunk_size": 1, "rule": MomentumDelta(angle=angle), "backend": backend}
        y, _ = neural_memory(*tokens, *case.state, extra=extra, **options)
        torch.testing.assert_close(y[0, :, 0], torch.stack(reads), rtol=1e-12, atol=1e-12)


def test_gates_of_a_rule_s_own_are_asked_for_and_not_taken_without_need():
    case = Case(4, 1, rule=MomentumDelta())
    *tokens, extra = case.tokens
    for rule, given in (("mdn", None), ("mdn", extra[..., :0]), ("paper", extra)):
        with pytest.raises(ValueError, match=r"^extra: shape .* is not \[B, T, H, E\] = \(1, 4, 2, [01]\)"):
            neural_memory(*tokens, *case.state, extra=given, rule=rule, chunk_size=1)


def test_the_decayed_state_of_a_chunk_is_its_start_without_what_it_writes():
    case, (q, k, v, alpha, theta), W = linear_case()
    start, decay, reads = W, torch.ones(()), []
    for t in range(len(q)):
        if t % 8 == 0:
            start, decay = W, torch.ones(())
        decay = decay * (1 - alpha[t])
        W = (1 - alpha[t]) * W - theta[t] * 2 * torch.outer(k[t], k[t] @ (decay * start) - v[t])
        reads.append(q[t] @ W)
    assert_head_reads(case, reads, chunk_size=8, rule="gated_delta")


@pytest.mark.parametrize("rule", [Huber(delta=0.3), Yaad(delta=0.8)], ids=["huber", "yaad"])
def test_a_huber_loss_is_the_update_of_miras(rule):
    case, (q, k, v, alpha, theta), W = linear_case()
    reads, sides = [], []
    for t in range(len(q)):
        e = k[t] @ W - v[t]
        near = (e.norm() if isinstance(rule, Yaad) else e.abs()) <= rule.delta
        force = torch.where(near, e, rule.delta * e.sign())
        W = (1 - alpha[t]) * W - theta[t] * 2 * torch.outer(k[t], force)
        reads.append(q[t] @ W)
        sides.append(near.flatten())
    assert torch.cat(sides).any(), "no error is within the threshold"
    assert not torch.cat(sides).all(), "no error is beyond the threshold"
    assert_head_reads(case, reads, chunk_size=1, rule=rule)


@pytest.mark.parametrize("name", ["huber", "yaad"])
def test_a_large_threshold_is_the_paper_s_rule(name):
    case, options = Case(20, 2), {"chunk_size": 8, "backend": "autograd"}
    found = case.whole(rule=find_rule(name, delta=100.0), **options)
    assert_same(case.whole(rule="paper", **options), found, case.leaves)


def test_inference_and_autocast_give_the_same_and_leave_the_state_in_float32():
    case, options = Case(20, 2), {"chunk_size": 8, "rule": "huber"}
    tokens = [x.detach().float() for x in case.tokens]
    state = MemoryState(*(tuple(x.detach().float() for x in part) for part in case.state))
    expected, _ = neural_memory(*tokens, *state, **options)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        y, after = neural_memory(*(x.clone() for x in tokens), *state, **options)
        _, cut = extend_memory(*(x[:, :13] for x in tokens), DecodeState.of(state), **options)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    kept = (*after.weights, *after.momentum, *cut)[:-1]
    assert {x.dtype for x in kept if isinstance(x, Tensor)} == {torch.float32}
    low, _ = neural_memory(*(x.bfloat16() for x in tokens), *state, **options)
    assert low.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_a_compiled_rule_is_the_eager_one(activation):
    case = Case(9, 2, activation=activation)
    options = {"chunk_size": 4, "surprise_bound": 0.5, "rule": Huber(delta=0.3), "activation": activation}
    compiled = torch.compile(case.whole, fullgraph=True, backend="aot_eager")
    assert_same(case.whole(**options), compiled(**options), case.leaves)


def test_what_needs_no_gradient_gets_none():
    case, options = Case(9, 2), {"chunk_size": 4, "rule": "huber"}
    tokens = [x.detach() for x in case.tokens]
    state = MemoryState(*(tuple(x.detach() for x in part) for part in case.state))
    y, after = neural_memory(*tokens, *state, **options)
    assert not any(x.requires_grad for x in (y, *after.weights, *after.momentum))
    expected = torch.autograd.grad(case.whole(**options)[0].sum(), case.tokens[1])
    tokens[1] = case.tokens[1]
    found = torch.autograd.grad(neural_memory(*tokens, *state, **options)[0].sum(), tokens[1])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_form_that_does_not_take_a_rule_says_so():
    case, rule = Case(4), Normalised()
    for backend in ("chunked", "triton"):
        said = f"^backend: {backend} does not support this call: it does not support the rule Normalised"
        with pytest.raises(ValueError, match=said):
            case.whole(backend=backend, rule=rule)
    _, opened = extend_memory(*case.tokens, DecodeState.of(case.state), chunk_size=8)
    with pytest.raises(ValueError, match=r"^state: inside a chunk of a linear rule"):
        extend_memory(*case.tokens, opened, chunk_size=8, rule=rule)
    _, opened = extend_memory(*case.tokens, DecodeState.of(case.state), chunk_size=8, rule=rule)
    with pytest.raises(ValueError, match=r"^state: inside a chunk of another rule"):
        extend_memory(*case.tokens, opened, chunk_size=8)


@pytest.mark.parametrize(("name", "parameters", "message"), [
    ("hubr", {}, f"rule: 'hubr' is not one of {', '.join(RULES)}; did you mean huber?"),
    ("xyzzy", {}, f"rule: 'xyzzy' is not one of {', '.join(RULES)}; or name a class of your own"),
    ("huber", {"detla": 1.0}, "rule_options.detla: the rule huber has delta"),
    ("paper", {"delta": 1.0}, "rule_options.delta: the rule paper has no parameters"),
    ("mdn", {"angle": -1.0}, "rule_options.angle: -1.0 must be finite, and 0 or more"),
    ("mdn", {"angle": 1.0, "tied": 1.0}, "rule_options.tied: 1.0 and angle 1.0 both limit the write gate"),
    ("huber", {"delta": 0.0}, "rule_options.delta: 0.0 must be above 0 and finite"),
    ("no_such_module:Rule", {}, "rule: no_such_module:Rule: 'no_such_module' cannot be imported: ModuleNot"),
    ("titans_kernels:Rul", {}, "rule: titans_kernels:Rul: titans_kernels has no 'Rul'; did you mean Rule?"),
    ("math:pi", {}, "rule: math:pi is not a subclass of titans_kernels.memory.rules.base.Rule"),
])  # fmt: skip
def test_a_rule_that_does_not_exist_is_named(name, parameters, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}[^\n]*$"):
        find_rule(name, **parameters)
    with pytest.raises(ValueError, match=f"^memory.{re.escape(message)}[^\n]*$"):
        LanguageModel(ModelConfig(memory=MemoryConfig(rule=name, rule_options=parameters)))


# the walk of docs/extending.md: one file, and a line where it shall have a name
LP = '''
from dataclasses import dataclass
from titans_kernels import Rule

@dataclass(frozen=True)
class Lp(Rule):
    """The l_p inner loss of MIRAS's Moneta."""
    p: float = 3.0

    def loss(self, prediction, v):
        return (prediction - v).abs().pow(self.p).sum(-1)
'''


@pytest.fixture
def lp_rule(tmp_path, monkeypatch) -> str:
    (tmp_path / "my_rules.py").write_text(LP)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rules:Lp"


def test_a_rule_from_outside_goes_by_its_import_path(lp_rule):
    options = {"chunk_size": 8, "surprise_bound": 0.5, "rule": find_rule(lp_rule, p=2.5)}
    Case(20, 2).check("auto", cuts=[[3, 6, 11]], **options)


def test_a_rule_from_outside_trains_a_model_and_may_be_registered(lp_rule, monkeypatch):
    losses = {}
    monkeypatch.setitem(RULES, "lp", type(find_rule(lp_rule)))
    for name in (lp_rule, "lp", "paper"):
        torch.manual_seed(0)
        given = {} if name == "paper" else {"p": 4.0}
        memory = MemoryConfig(heads=2, chunk_size=8, rule=name, rule_options=given)
        m = LanguageModel(ModelConfig(vocab_size=20, d_model=16, n_layers=1, memory=memory))
        x = torch.randint(0, 20, (2, 21), generator=torch.Generator().manual_seed(1))
        loss = F.cross_entropy(m(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in m.parameters())
        losses[name] = loss.item()
    assert losses["lp"] == losses[lp_rule] != losses["paper"]
