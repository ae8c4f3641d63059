"""Training objectives.

To add one, write a module with a class decorated with `@register` and import that module below.
"""

from titans_platform.objectives import classification, drift, next_token, regression
from titans_platform.objectives.base import OBJECTIVES, Data, Input, Objective, build_objective, register

OBJECTIVE_MODULES = (classification, drift, next_token, regression)

__all__ = ["OBJECTIVES", "Data", "Input", "Objective", "build_objective", "register"]
