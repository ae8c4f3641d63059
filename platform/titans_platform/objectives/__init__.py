"""Objectives: what a run trains on.

A new one is one file with a class under `@register`, and its name in the imports below.
"""

from titans_platform.objectives import classification, next_token, regression
from titans_platform.objectives.base import OBJECTIVES, Data, Input, Objective, build_objective, register

OBJECTIVE_MODULES = (classification, next_token, regression)

__all__ = ["OBJECTIVES", "Data", "Input", "Objective", "build_objective", "register"]
