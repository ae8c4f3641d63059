"""Evaluation: a registry of tasks, each with its chance level, and `evaluate`, which measures columns.

A new task is one file with a class under `@register`, and its line in the imports below.
"""

from __future__ import annotations

from titans_platform.evals import (
    babi,
    choice,
    lambada,
    lm_harness,
    needle,
    perplexity,
    reasoning,
    recall,
    throughput,
)
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

TASK_MODULES = (babi, choice, lambada, lm_harness, needle, perplexity, reasoning, recall, throughput)

EVAL_VERSION = eval_version()
"""Digest of the versions of all tasks; `eval_version(config)` is that of the tasks a run uses."""

__all__ = [
    "EVAL_VERSION",
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
