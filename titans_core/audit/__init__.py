"""Hold any sequence layer to what it says: causal, trained, the same in pieces, stable, and no leaks.

`audit` runs the checks and returns a report; `checks` makes them tests of any repository; an `Adapter` says
how a layer's state and documents are passed. docs/audit.md has what each check proves, and a gallery.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from titans_core.audit import continuation, control, dependence, gradients, numerics
from titans_core.audit.adapter import Adapter
from titans_core.audit.report import (
    CHECKS,
    AuditError,
    Check,
    CheckResult,
    Example,
    NotApplicable,
    Outcome,
    Report,
    Verdict,
    check,
)
from titans_core.audit.subject import Subject
from titans_core.audit.variants import layer_factory, variant_factory

__all__ = [
    "CHECKS",
    "Adapter",
    "AuditError",
    "Check",
    "CheckResult",
    "Example",
    "NotApplicable",
    "Outcome",
    "Report",
    "Subject",
    "audit",
    "check",
    "checks",
    "layer_factory",
    "variant_factory",
]

CHECK_MODULES = (dependence, gradients, continuation, numerics, control)
"""The modules whose checks are registered, in the order in which they run."""


def select(only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[Check]:
    """Return the checks of these names, all if none are given, without those in ``skip``.

    Raises:
        AuditError: there is no such check, or none is left.
    """
    ranks = {module.__name__: i for i, module in enumerate(CHECK_MODULES)}
    ordered = sorted(CHECKS, key=lambda check: ranks.get(check.function.__module__, len(ranks)))
    names = [check.name for check in ordered]
    for name in (*only, *skip):
        if name not in names:
            raise AuditError(f"check: {name!r} is not one of {', '.join(names)}")
    chosen = [check for check in ordered if (not only or check.name in only) and check.name not in skip]
    if not chosen:
        raise AuditError("check: no check is left; skip fewer")
    return chosen


def audit(
    factory: Callable[[], nn.Module | Adapter],
    *,
    name: str = "",
    length: int = 144,
    batch: int = 3,
    width: int | None = None,
    seed: int = 0,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    on_check: Callable[[Check, CheckResult | None], None] = lambda check, result: None,
) -> Report:
    """Hold a sequence layer to every check.

    Args:
        factory: makes the layer: an `nn.Module` that maps [B, T, D] to [B, T, E] or tokens [B, T] to logits
            [B, T, V], or an `Adapter` of one, which also says how its state and documents are passed.
        name: of the layer in the report.
        length: tokens of the inputs; more than two chunks of the layer.
        batch: rows of the inputs, at least 2.
        width: D of the inputs, if the layer does not tell.
        seed: of the parameters and inputs.
        only: names of the checks to run; all by default.
        skip: names of checks to leave out.
        on_check: called with each check before it runs, and again with its result.

    Raises:
        AuditError: the layer cannot be built or called, or there is no such check; one line.
    """
    if length < 8 or batch < 2:
        raise AuditError(f"length: {length} tokens of {batch} rows; the audit needs at least 8 of 2")
    began, chosen = time.perf_counter(), select(only, skip)
    subject = Subject(factory, length, batch, width, seed)
    results = []
    for each in chosen:
        on_check(each, None)
        results.append(result := _run(each, subject))
        on_check(each, result)
    layer = name or type(subject.build().module).__name__
    precision = str(subject.precision).removeprefix("torch.")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return Report(layer, tuple(results), length, precision, versions, time.perf_counter() - began)


def _run(check: Check, subject: Subject) -> CheckResult:
    began = time.perf_counter()

    def result(verdict: Verdict, **fields: Any) -> CheckResult:
        seconds = time.perf_counter() - began
        return CheckResult(check.name, check.proves, check.how, verdict, **fields, seconds=seconds)

    try:
        outcome = check.function(subject)
    except NotApplicable as reason:
        return result("not applicable", note=str(reason))
    except Exception as error:
        note = " ".join(f"raised {type(error).__name__}: {error}".split())[:300]
        return result("fail", example=Example(subject.length, torch.inf, note=note))
    verdict = "pass" if outcome.example is None else "fail"
    measured = {"value": outcome.value, "tolerance": outcome.tolerance}
    return result(verdict, **measured, example=outcome.example, note=outcome.note)


def checks(
    factory: Callable[[], nn.Module | Adapter],
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    known: Sequence[str] = (),
    **options: Any,
) -> Callable[..., None]:
    """Build a pytest test of a layer, parametrised over the checks: ``test_my_layer = checks(MyLayer)``.

    Args:
        factory: as of `audit`.
        only: names of the checks to run; all by default.
        skip: names of checks to leave out.
        known: names of checks that are expected to fail; such a test fails when they pass.
        options: further arguments of `audit`.
    """
    import pytest

    marks = {name: [pytest.mark.xfail(strict=True, reason="a known finding")] for name in known}
    names = [check.name for check in select(only, skip)]

    @pytest.mark.parametrize("check", [pytest.param(name, marks=marks.get(name, ())) for name in names])
    def test(check: str) -> None:
        result = audit(factory, only=[check], **options)[check]
        if result.verdict == "not applicable":
            pytest.skip(f"{check}: {result.note}")
        assert result.verdict == "pass", f"{check}: {result.finding}; expected: {result.proves}"

    return test
