"""Records which form of each operator ran, for run results and logs."""

from __future__ import annotations

import logging
import sys
from functools import cache

from torch import Tensor

log = logging.getLogger("titans_kernels")
_RAN: set[str] = set()
_DYNAMO = "torch._dynamo.utils"
"""The first compilation imports it, which takes seconds."""


def note(operator: str, form: str, like: Tensor | None = None) -> None:
    """Record that a call ran this form, unless ``like`` is a meta tensor."""
    if like is None or not like.is_meta:
        _RAN.add(f"{operator}: {form}")


def forms_used(*, forget: bool = False) -> list[str]:
    """Return the forms that ran in this process so far.

    Under torch.compile a form of the memory is recorded when a call is traced, and again whenever a kernel
    runs; other operators are not recorded, since the compiler generates its own code for them.

    Args:
        forget: clear the record after reading it.

    Returns:
        Sorted strings ``operator: form``, such as "neural_memory: triton", and the `graph_breaks`.
    """
    used = sorted(_RAN) + [f"graph break: {reason}" for reason in graph_breaks()]
    if forget:
        _RAN.clear()
        if dynamo := sys.modules.get(_DYNAMO):
            dynamo.counters["graph_break"].clear()
    return used


def graph_breaks() -> list[str]:
    """Return the reasons of Dynamo's graph breaks in this process, sorted, the first line of each.

    Functions under `torch.compiler.disable`, such as flash-linear-attention's kernels, are left out.
    """
    dynamo = sys.modules.get(_DYNAMO)
    reasons = dynamo.counters["graph_break"] if dynamo else ()
    return sorted({reason.splitlines()[0] for reason in reasons if "compiler.disable" not in reason})


def select(operator: str, form: str, slower: str = "") -> None:
    """Record the form selected for a call, also while torch.compile traces it.

    ``slower``: the reason why it is not the fastest one, which is logged once.
    """
    note(operator, form)
    if slower:
        warn_once(operator, f"{form} in place of triton", slower)


# as by `torch.compiler.assume_constant_result`, which imports the compiler: run while a call is traced
select._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@cache
def warn_once(operator: str, form: str, reason: str) -> None:
    """Log once that a slower form is used, and why."""
    log.warning("%s: %s: %s", operator, form, reason)
