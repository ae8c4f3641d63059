"""The fixtures of tests/, for the harness's own tests."""

from tests.conftest import own_modules, tiny_run

__all__ = ["own_modules", "tiny_run"]
