"""The checks, and what an audit found: a result for each check, with the smallest failing example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["pass", "fail", "not applicable"]


class NotApplicable(Exception):
    """A check does not apply to a layer; the message says why."""


class AuditError(ValueError):
    """The layer cannot be audited at all: it cannot be built or called. One line."""


@dataclass(frozen=True)
class Example:
    """The smallest input at which a check fails."""

    length: int
    """Tokens of the input."""
    difference: float
    """Size of the difference, on the scale of the check's tolerance."""
    position: int | None = None
    """Token of the output at which it shows, from 0."""
    source: int | None = None
    """Token of the input that reaches it, or at which the input is cut."""
    note: str = ""

    def __str__(self) -> str:
        parts = [f"{self.length} tokens"]
        if self.position is not None:
            parts.append(f"output {self.position}")
        if self.source is not None:
            parts.append(f"input {self.source}")
        return ", ".join([*parts, f"difference {self.difference:.2g}", *([self.note] if self.note else [])])


@dataclass(frozen=True)
class Outcome:
    """Result of a check function; it passes if ``example`` is None."""

    value: float
    """The measured number: the largest difference, unless the check says otherwise."""
    tolerance: float
    example: Example | None = None
    note: str = ""


@dataclass(frozen=True)
class Check:
    """One check: a function of a `Subject`, and what a pass of it means."""

    name: str
    proves: str
    how: str
    function: Callable[[Any], Outcome]


@dataclass(frozen=True)
class CheckResult:
    """One check's verdict on one layer."""

    check: str
    proves: str
    how: str
    verdict: Verdict
    value: float | None = None
    tolerance: float | None = None
    example: Example | None = None
    note: str = ""
    seconds: float = 0.0

    @property
    def finding(self) -> str:
        """One line: the failing example, the reason why the check does not apply, or the measured number."""
        if self.example is not None:
            return str(self.example)
        if self.value is None:
            return self.note
        measured = f"{self.value:.2g} of {self.tolerance:.2g}"
        return f"{measured}; {self.note}" if self.note else measured


@dataclass(frozen=True)
class Report:
    """The results of an audit, one for each check that ran."""

    layer: str
    results: tuple[CheckResult, ...]
    length: int
    precision: str
    """Precision of the exact checks: float64, or what the layer allows."""
    versions: dict[str, str]
    seconds: float = 0.0

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)

    def __getitem__(self, check: str) -> CheckResult:
        return next(result for result in self.results if result.check == check)

    def of(self, verdict: Verdict) -> list[CheckResult]:
        """Return the results with this verdict."""
        return [result for result in self.results if result.verdict == verdict]

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.of("fail")

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values, for JSON."""
        return {**asdict(self), "passed": self.passed}


CHECKS: list[Check] = []
"""All checks, in the order in which they run."""


def check(how: str) -> Callable[[Callable[[Any], Outcome]], Callable[[Any], Outcome]]:
    """Register a function as a check of its name; its docstring is "Check that" and what a pass proves.

    It returns an `Outcome`, or raises `NotApplicable`; any other exception is a failure of the layer.
    """

    def register(function: Callable[[Any], Outcome]) -> Callable[[Any], Outcome]:
        proves = (function.__doc__ or "").partition("\n")[0].removeprefix("Check that ").rstrip(".")
        CHECKS.append(Check(getattr(function, "__name__", ""), proves, how, function))
        return function

    return register
