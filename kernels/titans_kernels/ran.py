"""Records which form of each operator ran, for run results and logs."""

from __future__ import annotations

import logging
from functools import cache

from torch import Tensor

log = logging.getLogger("titans_kernels")
_RAN: set[str] = set()


def note(operator: str, form: str, given: Tensor | None = None) -> None:
    """Record that a call ran this form, unless its input ``given`` is a meta tensor."""
    if given is None or not given.is_meta:
        _RAN.add(f"{operator}: {form}")


def forms_used(*, forget: bool = False) -> list[str]:
    """Return the forms that ran in this process so far.

    Under torch.compile only kernels that are opaque to the compiler are recorded; it generates its own code
    for the chunked forms.

    Args:
        forget: clear the record after reading it.

    Returns:
        Sorted strings ``operator: form``, such as "neural_memory: triton".
    """
    used = sorted(_RAN)
    if forget:
        _RAN.clear()
    return used


@cache
def warn_once(operator: str, form: str, reason: str) -> None:
    """Log once that a slower form is used, and why."""
    log.warning("%s: %s: %s", operator, form, reason)
