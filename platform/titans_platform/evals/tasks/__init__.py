"""The tasks, a file for each task or family; importing this package registers them.

A task of this package is a file with a class under `@register`, and the file's name in the import below. One
outside it is named by its import path, `task: my_lab.tasks:MyTask`, and needs neither.
"""

from titans_platform.evals.tasks import (  # noqa: F401
    babi,
    by_position,
    functions,
    mad,
    needle,
    perplexity,
    reasoning,
    recall,
    throughput,
    words,
)
