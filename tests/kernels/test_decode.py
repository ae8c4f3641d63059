"""The memory continued from any position, by one token, a few, or many, against the recurrence."""

import pytest
import torch

from tests.kernels.cases import Case
from titans_kernels import DecodeState, MemoryState, extend_memory


@pytest.mark.parametrize("compiled", [False, True])
def test_state_can_be_continued_twice(compiled):
    case = Case(12, batch=2)
    if compiled:  # without a gradient
        case.tokens = [x.detach() for x in case.tokens]
        case.state = case.state.detach()
    rule = {"chunk_size": 8, "surprise_bound": 0.3}
    before, after = ([x[:, part] for x in case.tokens] for part in (slice(0, 5), slice(5, 12)))
    _, state = extend_memory(*before, DecodeState.of(case.state), **rule)
    kept = [x.clone() for x in torch.utils._pytree.tree_leaves(state)]
    first, _ = extend_memory(*after, state, **rule)
    extend_memory(*(x[:, :3] for x in after), state, **rule)
    torch.testing.assert_close(extend_memory(*after, state, **rule)[0], first, rtol=0, atol=0)
    torch.testing.assert_close(torch.utils._pytree.tree_leaves(state), kept, rtol=0, atol=0)


def test_bfloat16_tokens_leave_the_state_in_float32():
    case = Case(7, batch=2)
    low = [x.detach().bfloat16() for x in case.tokens]
    state = DecodeState.of(MemoryState(*(tuple(x.detach().float() for x in part) for part in case.state)))
    with torch.autocast("cpu", torch.bfloat16):
        y, mixed = extend_memory(*low, state, chunk_size=8)
    exact, plain = extend_memory(*(x.float() for x in low), state, chunk_size=8)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(mixed, plain, rtol=0, atol=0)
    torch.testing.assert_close(y.float(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("tokens", "change", "message"), [
    (slice(0, 0), {}, "q: no rows, tokens or heads"),
    (slice(0, 1), {"chunk_size": 0}, "chunk_size: 0 must be at least 1"),
    (slice(0, 1), {"activation": "relu"}, "activation: 'relu' is not one of"),
])  # fmt: skip
def test_what_does_not_fit_is_named(tokens, change, message):
    case = Case(9, batch=2)
    rule = {"chunk_size": 8, "surprise_bound": 0.3}
    _, state = extend_memory(*(x[:, :5] for x in case.tokens), DecodeState.of(case.state), **rule)
    with pytest.raises(ValueError, match=message):
        extend_memory(*(x[:, 5:][:, tokens] for x in case.tokens), state, **(rule | change))
