"""Adapter to lm-evaluation-harness (the extra `lm-eval`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from titans_core.config import Frozen
from titans_platform.errors import UsageError, nearest
from titans_platform.evals.scoring import Request, Scorer, encode_pair
from titans_platform.tasks import Context, Measurement, Task
from titans_platform.text import plain

MISSING = "task: lm_eval needs lm-evaluation-harness: pip install 'lm-eval>=0.4.9'"
# bootstrap samples for standard errors without a closed form; the harness's default of 100,000 is slow
BOOTSTRAPS = 1000
CHANCES = {
    **dict.fromkeys(("piqa", "winogrande"), 1 / 2),
    **dict.fromkeys(("hellaswag", "arc_easy", "arc_challenge"), 1 / 4),
    **dict.fromkeys(("lambada_openai", "lambada_standard"), 0.0),
    "social_iqa": 1 / 3,
    # the share of yes in the validation set
    "boolq": 0.6217,
}


class LmEvalOptions(Frozen):
    """Tasks of the harness, and the metric."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    metric: str = "acc"
    """A metric that all of them have, e.g. acc, acc_norm, perplexity, word_perplexity."""
    chance: float | None = None
    """Value of guessing; None: known for accuracies of the paper's Table 1. Other metrics have none."""
    num_fewshot: Annotated[int, Field(ge=0)] = 0
    include_path: str | None = None
    """A folder of additional task files (YAML), e.g. ones that read local data."""


class HarnessModel:
    """The three methods that the harness calls on a model, each with a list of requests with `.args`.

    It does not import the harness, so it can be tested without it. Its rolling windows differ from the
    harness's, whose last window repeats the text before it as context, and whose rows have no document start.
    """

    def __init__(self, scorer: Scorer, max_length: int) -> None:
        super().__init__()
        self.scorer, self.max_length = scorer, max_length

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, greedy decoding gives it) of each `(context, continuation)`."""
        texts = ((plain(context), plain(more)) for context, more in (r.args[:2] for r in requests))
        pairs = [encode_pair(context, more, self.scorer.tokenizer) for context, more in texts]
        return [(score.logprob, score.greedy) for score in self.scorer.score(pairs, self.max_length)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of each whole `(text,)`, in windows that do not overlap."""
        texts = (self.scorer.tokenizer.encode(plain(request.args[0])) for request in requests)
        scored = (self.scorer.score(self._windows(tokens), self.max_length) for tokens in texts)
        return [math.fsum(score.logprob for score in scores) for scores in scored]

    def _windows(self, tokens: list[int]) -> list[Request]:
        """Windows that score every token once; the context of each is the last token of the window before."""
        if not tokens:
            return []
        width = self.max_length - 1
        later = range(width, len(tokens), width - 1)
        windows = [Request(tokens[start - 1 : start], tokens[start : start + width - 1]) for start in later]
        return [Request([], tokens[:width]), *windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Raise UsageError: tasks that generate text are for an exported model."""
        fix = "titans export RUN, then lm-eval's own --model hf on the folder"
        raise UsageError(f"task: lm_eval scores continuations here, and this task generates text; {fix}")


class LmEval(Task):
    """Mean of one metric over tasks of lm-evaluation-harness."""

    name = "lm_eval"
    version = 3
    Options = LmEvalOptions

    @property
    def label(self) -> str:
        """The tasks' names."""
        return "+".join(self.options.names)

    @property
    def chance(self) -> float:
        """`options.chance`, or the mean of the tasks' chance levels; NaN for a metric that is no accuracy.

        Raises:
            UsageError: an accuracy of a task whose chance is not known, and none given.
        """
        if self.options.chance is not None:
            return self.options.chance
        if not self.options.metric.startswith("acc"):
            return math.nan
        if unknown := [name for name in self.options.names if name not in CHANCES]:
            raise UsageError(f"options.chance: give it for {', '.join(unknown)}")
        return fmean(CHANCES[name] for name in self.options.names)

    def check(self, objective: Any, length: int, data: Any) -> None:
        """Reject a task whose chance is unknown; where data are prepared, also a missing harness."""
        _ = self.chance  # raises if it is unknown
        if data is not None and not find_spec("lm_eval"):
            raise UsageError(MISSING)

    def measure(self, context: Context) -> Measurement:
        """Measure `config.items` documents of each task; stderr is 0 if the harness reports none."""
        try:
            import lm_eval  # pyright: ignore[reportMissingImports]
            from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
            from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise UsageError(MISSING) from None
        model: Any = type("TitansLM", (HarnessModel, LM), {})(context.scorer, context.length)

        chance, metric = self.chance, self.options.metric
        manager = TaskManager(include_path=self.options.include_path)
        for name in self.options.names:
            if name not in manager.all_tasks:
                hint = nearest(name, manager.all_tasks, otherwise="list them with `lm-eval ls tasks`")
                raise UsageError(f"options.names: lm_eval has no task {name!r}; {hint}")
        output = lm_eval.simple_evaluate(
            model=model, tasks=list(self.options.names), task_manager=manager,
            num_fewshot=self.options.num_fewshot, limit=context.config.items, bootstrap_iters=BOOTSTRAPS,
            random_seed=context.config.seed,
        )  # fmt: skip
        if output is None:
            raise UsageError("task: lm_eval returns results on rank 0 only; evaluate in one process")
        values, errors = [], []
        for name in self.options.names:
            # the harness names a result `metric,filter`; a standard error may be N/A
            named = ((key.partition(",")[0], x) for key, x in reversed(output["results"][name].items()))
            numbers = {key: float(x) for key, x in named if isinstance(x, int | float)}
            if metric not in numbers:
                known = ", ".join(sorted(numbers))
                raise UsageError(f"options.metric: {name} has no {metric}; it has {known}")
            values.append(numbers[metric])
            errors.append(numbers.get(f"{metric}_stderr", 0.0))
        documents = sum(count["effective"] for count in output["n-samples"].values())
        return Measurement(fmean(values), math.hypot(*errors) / len(errors), chance, documents)
