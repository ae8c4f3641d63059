import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Look for the operators of Triton's language once, not at each call of a function of a kernel.

    Indexes are not checked for an overflow of 32 bits, from which these small shapes are far.
    """
    try:
        from triton.language.core import is_builtin
        from triton.runtime import interpreter
    except ImportError:
        return (yield)
    names = cache(lambda part: [name for name, x in inspect.getmembers(part) if is_builtin(x)])

    def patch(part: Any, builder: Any, scope: Any) -> None:
        for name in names(part):
            if is_builtin(operator := getattr(part, name)):
                interpreter._patch_attr(part, name, operator, builder, scope)

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_builtin", patch)
        patched.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
