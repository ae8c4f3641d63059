"""Benchmarks of the neural memory against other implementations, in size-independent units.

Depends only on torch, Triton, numpy and click, since GPU machines often have nothing else. Every op is
checked before it is timed, and an op that fails its check is not timed.
"""
