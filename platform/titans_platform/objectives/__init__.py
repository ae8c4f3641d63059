"""Training objectives. To add one, write a file and its line in `OBJECTIVES` of `objectives.base`."""

from titans_platform.objectives.base import (
    OBJECTIVES,
    Data,
    Objective,
    build_objective,
    build_small,
    check_vocabulary,
    reject_data,
    run_name,
)
from titans_platform.tasks import TASKS

__all__ = [
    "OBJECTIVES", "Data", "Objective", "build_objective", "build_small", "check_vocabulary", "reject_data",
    "run_name",
]  # fmt: skip

TASKS["accuracy"] = "titans_platform.objectives.classification:Accuracy"
TASKS["class_loss"] = "titans_platform.objectives.classification:ClassLoss"
TASKS["mse"] = "titans_platform.objectives.regression:MeanSquaredError"
TASKS["mae"] = "titans_platform.objectives.regression:MeanAbsoluteError"
TASKS["context_share"] = "titans_platform.objectives.adapt:ContextShare"
