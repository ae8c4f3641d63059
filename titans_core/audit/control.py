"""The retrieval-impossible control: train the layer on answers that it must not see."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.audit.report import Example, NotApplicable, Outcome, check
from titans_core.audit.subject import Subject, cast

SYMBOLS = 4
STEPS = 100
ROWS = 8
MEASURED = 32
"""Batches on which the trained layer is scored."""
LENGTH = 68
"""Tokens of a row: more than a chunk of the usual 64."""
ANSWERS = ("the next token", "the token of the next row", "the token of the call before", "the token itself")


def _answers(tokens_BT: Tensor, earlier_BT: Tensor) -> Tensor:
    """[B, T, 4] the answers of `ANSWERS`; the last one is possible, and shows that the layer can learn."""
    following = torch.cat([tokens_BT[:, 1:], torch.randint_like(tokens_BT[:, :1], SYMBOLS)], 1)
    return torch.stack([following, tokens_BT.roll(1, 0), earlier_BT, tokens_BT], -1)


@check(f"random tokens, {STEPS} steps; the next token, another row's, and an earlier call's stay at chance")
def impossible_retrieval(s: Subject) -> Outcome:
    """Check that a trained layer does not score if the answer is not in what it may see."""
    adapter = s.build(torch.float32, training=True)
    length = min(LENGTH, s.length)
    generator = torch.Generator().manual_seed(11)
    with s.running(torch.float32):
        embed = nn.Embedding(SYMBOLS, adapter.width) if adapter.width else nn.Identity()
        symbols = min(SYMBOLS, adapter.vocab or SYMBOLS)
        draw = partial(torch.randint, 0, symbols, (ROWS, length), generator=generator)
        earlier = draw()
        torch.manual_seed(s.seed)
        with torch.no_grad():
            outputs = adapter.forward(embed(earlier)).shape[-1]
        heads = nn.Linear(outputs, SYMBOLS * len(ANSWERS))
        trained = cast(nn.ModuleList([adapter.module, embed, heads]), torch.float32)
        parameters = [p for p in trained.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=1e-2)
        right = torch.zeros(length, len(ANSWERS))
        for step in range(STEPS + MEASURED):
            tokens = draw()
            answers = _answers(tokens, earlier)
            with torch.set_grad_enabled(step < STEPS):
                y = F.layer_norm(adapter.forward(embed(tokens)), (outputs,))
                logits = heads(y).unflatten(-1, (len(ANSWERS), SYMBOLS))
            earlier = tokens
            if step >= STEPS:
                right += (logits.argmax(-1) == answers).float().sum(0)
                continue
            loss = F.cross_entropy(logits.flatten(0, 2), answers.flatten())
            if not bool(loss.isfinite()):
                raise NotApplicable(f"training diverged at step {step}")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / STEPS) + 1e-4
    return _scores(right / (MEASURED * ROWS), length, symbols)


def _scores(accuracy: Tensor, length: int, symbols: int) -> Outcome:
    """Compare each position's accuracy to chance; six standard errors, since there are many positions."""
    chance = 1 / symbols
    error = math.sqrt(chance * (1 - chance) / (MEASURED * ROWS))
    if float(accuracy[:, -1].mean()) < chance + 6 * error:
        raise NotApplicable("the layer did not learn the token itself, so its scores show nothing")
    if (last := float(accuracy[-1, 0])) > chance + 6 * error:  # its answer is drawn after the call
        raise NotApplicable(f"the control's own error: {last:.2f}")
    best = accuracy[:, :-1].max()
    where = (accuracy[:, :-1] == best).nonzero()[0]
    limit, example = chance + 6 * error, None
    if float(best) > limit:
        note = f"{ANSWERS[int(where[1])]}: {100 * float(best):.0f} % right, chance {100 * chance:.0f} %"
        example = Example(length, float(best) - chance, int(where[0]), note=note)
    return Outcome(float(best), limit, example, f"accuracy at the best position; chance {chance:.2f}")
