"""The checks as parametrised tests in a repository of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from titans_core.audit.adapter import Adapter
from titans_core.audit.run import audit, select


def checks(
    factory: Callable[[], nn.Module | Adapter],
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    known: Sequence[str] = (),
    **options: Any,
) -> Callable[..., None]:
    """A pytest test of a layer, parametrised over the checks: ``test_my_layer = checks(MyLayer)``.

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
