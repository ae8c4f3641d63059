"""The fixtures of tests/, for the experiments' own tests."""

from tests.conftest import answer, own_modules, ray_cluster, refused, tiny_run, tiny_yaml, torch_threads

__all__ = ["answer", "own_modules", "ray_cluster", "refused", "tiny_run", "tiny_yaml", "torch_threads"]
