"""Update rules of the memory, one file each; `base.Rule` is the paper's.

A subclass of `Rule` may override the loss and its target, the gradient point, the update, the end of a chunk
and the weights that are read. The reference and `decode_step` support every rule, the generic chunked form
(`autograd`) every rule but `DeltaTTT`, `factored` every rule whose update is the paper's or has a `step` of
its own; `op.FORMS` says which others support which.
"""

from __future__ import annotations

from dataclasses import fields

from titans_kernels.memory.rules.base import PAPER, ChunkEnd, Rule
from titans_kernels.memory.rules.delta_ttt import DeltaTTT
from titans_kernels.memory.rules.e2_ttt import E2TTT
from titans_kernels.memory.rules.gated_delta import GatedDelta
from titans_kernels.memory.rules.lact import LaCT
from titans_kernels.memory.rules.miras import Memora, Moneta, YaadGated
from titans_kernels.memory.rules.momentum_delta import MomentumDelta
from titans_kernels.memory.rules.omega import Atlas, Omega
from titans_kernels.memory.rules.robust import Huber, Yaad
from titans_kernels.registry import find_class

__all__ = [
    "E2TTT", "PAPER", "RULES", "Atlas", "ChunkEnd", "DeltaTTT", "GatedDelta", "Huber", "LaCT", "Memora",
    "MomentumDelta", "Moneta", "Omega", "Rule", "Yaad", "YaadGated",
    "find_rule",
]  # fmt: skip

RULES: dict[str, type[Rule]] = {
    "paper": Rule,
    "gated_delta": GatedDelta,
    "mdn": MomentumDelta,
    "delta_ttt": DeltaTTT,
    "e2_ttt": E2TTT,
    "moneta": Moneta,
    "yaad_gated": YaadGated,
    "memora": Memora,
    "lact": LaCT,
    "omega": Omega,
    "atlas": Atlas,
    "huber": Huber,
    "yaad": Yaad,
}
"""Built-in rules by name; ``RULES["mine"] = MyRule`` registers another one in this process."""


def find_rule(name: str, **parameters: float) -> Rule:
    """Instantiate a rule.

    Args:
        name: a key of `RULES`, or an import path ``package.module:Class`` of a subclass of `Rule`.
        **parameters: fields of the rule.

    Raises:
        ValueError: there is no such rule, or a parameter is unknown or invalid; a one-line message.
    """
    kind = find_class("rule", name, RULES, Rule)
    for parameter in parameters:
        known = [field.name for field in fields(kind)]
        if parameter not in known:
            has = ", ".join(known) or "no parameters"
            raise ValueError(f"rule_options.{parameter}: the rule {name} has {has}")
    try:
        return kind(**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rule_options.{error}") from None
