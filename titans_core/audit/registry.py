"""The list of checks. A new check is one function of a `Subject` under `check`."""

from __future__ import annotations

from collections.abc import Callable

from titans_core.audit.report import Check, Outcome
from titans_core.audit.subject import Subject

CHECKS: list[Check] = []
"""All checks, in the order in which they run."""


def check(how: str) -> Callable[[Callable[[Subject], Outcome]], Callable[[Subject], Outcome]]:
    """Register a function as a check of its name; the first line of its docstring is what a pass proves.

    It returns an `Outcome`, or raises `NotApplicable`; any other exception is a failure of the layer.
    """

    def register(function: Callable[[Subject], Outcome]) -> Callable[[Subject], Outcome]:
        proves = (function.__doc__ or "").partition("\n")[0].rstrip(".")
        CHECKS.append(Check(getattr(function, "__name__", ""), proves, how, function))
        return function

    return register
