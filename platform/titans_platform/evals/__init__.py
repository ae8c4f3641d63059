"""Evaluation: a registry of tasks, each with its chance level, and `evaluate`, which measures columns."""

from __future__ import annotations

from titans_platform.evals.items import Item, encode_item
from titans_platform.evals.registry import (
    TASKS,
    GeneratedTask,
    Measurement,
    Task,
    build_generated,
    build_task,
    eval_version,
    register,
)
from titans_platform.evals.runner import evaluate, row_length
from titans_platform.evals.scoring import Request, Score, Scorer

__all__ = [
    "TASKS",
    "GeneratedTask",
    "Item",
    "Measurement",
    "Request",
    "Score",
    "Scorer",
    "Task",
    "build_generated",
    "build_task",
    "encode_item",
    "eval_version",
    "evaluate",
    "register",
    "row_length",
]
