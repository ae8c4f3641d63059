"""Which commit this code is of: baked into a wheel, asked of git in a source tree."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).parent
BAKED = "_commit.txt"


@functools.cache
def commit() -> str:
    """The last commit that changed code: 40 hex digits, `-dirty` after them where it was changed since.

    Not the newest commit: a word in the README does not make a number stale. `unknown` outside git.
    """
    baked = PACKAGE / BAKED
    if baked.is_file():
        return baked.read_text().strip()
    return commit_of_tree(PACKAGE.parents[1]) if PACKAGE.parent.name == "platform" else "unknown"


def commit_of_tree(tree: Path) -> str:
    """The commit of the repository whose top folder is ``tree``; `unknown` where it is none."""
    try:
        if Path(_git(tree, "rev-parse", "--show-toplevel")).resolve() != tree.resolve():
            return "unknown"
        code = ["kernels", "titans_core", "platform"]
        head = _git(tree, "log", "-1", "--format=%H", "--", *code) or "unknown"
        changed = _git(tree, "status", "--porcelain", "--untracked-files=no", "--", *code)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(tree), *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()
