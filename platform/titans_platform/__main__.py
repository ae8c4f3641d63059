"""`python -m titans_platform`: the `titans` command where its script is not on the PATH, as in a Ray job."""

from __future__ import annotations

from titans_platform.cli import main

if __name__ == "__main__":
    main()
