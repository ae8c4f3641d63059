"""Benchmarks on a CPU, behind `titans bench`; in the source tree only, not in the wheel."""
