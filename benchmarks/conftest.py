"""The fixtures of tests/, for the tests of the benchmarks."""

from tests.conftest import answer, own_modules, refused, torch_threads

__all__ = ["answer", "own_modules", "refused", "torch_threads"]
