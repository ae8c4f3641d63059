"""The `titans` command; `python -m titans_platform` where its script is not on the PATH, as in a Ray job."""

from __future__ import annotations

import sys

from titans_platform.errors import missing_extra


def main() -> None:
    """Run the command line, which needs the extra `train`."""
    try:
        from titans_platform.cli import main
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        print(f"error: {missing}", file=sys.stderr)
        sys.exit(2)
    main()


if __name__ == "__main__":
    main()
