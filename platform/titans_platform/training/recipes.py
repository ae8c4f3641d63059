"""Training recipes for hybrids of attention and memory: the window of a step, and of its auxiliary pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from titans_core.interventions import Intervention, intervene, longest_window
from titans_platform.config import OptimConfig
from titans_platform.data.stream import uniform
from titans_platform.errors import UsageError


def drawn_window(cfg: OptimConfig, seed: int, step: int) -> int | None:
    """Attention's window at optimiser step ``step`` (0 is the first); None: the model's own.

    One of ``cfg.windows``, all equally likely; in the last tenth of the steps the longest (SWAX, arXiv
    2509.24552). A function of the seed and the step only.
    """
    if not cfg.windows:
        return None
    if step >= 0.9 * cfg.steps:
        return max(cfg.windows)
    return cfg.windows[int(uniform(1, f"{seed}/window/{step}")[0] * len(cfg.windows))]


def passes(
    model: nn.Module, cfg: OptimConfig, window: int | None
) -> list[tuple[float, AbstractContextManager[None]]]:
    """The forward and backward passes of a step: the weight of each one's loss, and its window as a context.

    With ``cfg.auxiliary_window`` there is a second pass with that window, where it is shorter than the
    first's (arXiv 2610.06750).
    """
    main = intervene(model, Intervention(window=window)) if window else nullcontext()
    short = cfg.auxiliary_window
    if not short or (window and window <= short):
        return [(1.0, main)]
    return [(1.0, main), (cfg.auxiliary_weight, intervene(model, Intervention(window=short)))]


def check_windows(model: nn.Module, cfg: OptimConfig) -> None:
    """Reject windows that the model cannot take. Raises UsageError."""
    asked = [("windows", window) for window in cfg.windows]
    asked += [("auxiliary_window", cfg.auxiliary_window)] if cfg.auxiliary_window else []
    own = longest_window(model)
    for key, window in asked:
        if own is None:
            raise UsageError(f"optim.{key}: the model has no attention window; set model.attention.window")
        try:
            with intervene(model, Intervention(window=window)):
                pass
        except ValueError as error:
            raise UsageError(f"optim.{key}: {error}") from None
    if cfg.windows and max(cfg.windows) != own:
        raise UsageError(
            f"optim.windows: the longest is {max(cfg.windows)}, but the model is evaluated with {own}; "
            "add it to the list"
        )
