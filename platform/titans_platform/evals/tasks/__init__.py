"""The tasks, a file for each task or family; `TASKS` in `evals/registry.py` has a line for each.

A task outside this package is named by its import path, `task: my_lab.tasks:MyTask`, and needs no line.
"""
