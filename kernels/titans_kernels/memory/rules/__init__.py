"""Update rules of the memory, one file each; `base.Rule` is the paper's.

A subclass of `Rule` may override the loss and its target, the gradient point, the update, the end of a chunk
and the weights that are read. The reference and `decode_step` support every rule, the generic chunked form
(`autograd`) every rule but `DeltaTTT`, `factored` every rule whose update is the paper's or has a `step` of
its own; `op.FORMS` says which others support which.
"""

from __future__ import annotations

from dataclasses import fields

from titans_kernels.memory.rules.base import PAPER, ChunkEnd, Rule
from titans_kernels.registry import Registry

__all__ = ["PAPER", "RULES", "ChunkEnd", "Rule", "find_rule"]

RULES = Registry(
    "rule",
    Rule,
    {
        "paper": "titans_kernels.memory.rules.base:Rule",
        "gated_delta": "titans_kernels.memory.rules.gated_delta:GatedDelta",
        "mdn": "titans_kernels.memory.rules.momentum_delta:MomentumDelta",
        "delta_ttt": "titans_kernels.memory.rules.delta_ttt:DeltaTTT",
        "e2_ttt": "titans_kernels.memory.rules.e2_ttt:E2TTT",
        "moneta": "titans_kernels.memory.rules.miras:Moneta",
        "yaad_gated": "titans_kernels.memory.rules.miras:YaadGated",
        "memora": "titans_kernels.memory.rules.miras:Memora",
        "lact": "titans_kernels.memory.rules.lact:LaCT",
        "omega": "titans_kernels.memory.rules.omega:Omega",
        "atlas": "titans_kernels.memory.rules.omega:Atlas",
        "huber": "titans_kernels.memory.rules.robust:Huber",
        "yaad": "titans_kernels.memory.rules.robust:Yaad",
    },
)
"""Rules by name; ``RULES["mine"] = MyRule`` adds one in this process."""


def find_rule(name: str, **parameters: float) -> Rule:
    """Instantiate a rule.

    Args:
        name: a key of `RULES`, or an import path ``package.module:Class`` of a subclass of `Rule`.
        **parameters: fields of the rule.

    Raises:
        ValueError: there is no such rule, or a parameter is unknown or invalid; a one-line message.
    """
    kind = RULES.find(name)
    for parameter in parameters:
        known = [field.name for field in fields(kind)]
        if parameter not in known:
            has = ", ".join(known) or "no parameters"
            raise ValueError(f"rule_options.{parameter}: the rule {name} has {has}")
    try:
        return kind(**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rule_options.{error}") from None
