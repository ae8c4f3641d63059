"""Which form of each operator has run, for whoever keeps a record of a computation."""

from __future__ import annotations

import logging
from functools import cache

from torch import Tensor

log = logging.getLogger("titans_kernels")
_RAN: set[str] = set()


def note(operator: str, form: str, given: Tensor | None = None) -> None:
    """Write down that a call took this form; not one that was ``given`` a shape alone (the meta device)."""
    if given is None or not given.is_meta:
        _RAN.add(f"{operator}: {form}")


def forms_used(*, forget: bool = False) -> list[str]:
    """``operator: form`` of the calls of this process so far, sorted; ``forget`` begins a new list.

    Of a compiled model only kernels that the compiler leaves alone are among them: it makes its own of the
    chunked forms.
    """
    used = sorted(_RAN)
    if forget:
        _RAN.clear()
    return used


@cache
def warn_once(operator: str, form: str, reason: str) -> None:
    """Say once that a slower form serves, and why."""
    log.warning("%s: %s: %s", operator, form, reason)
