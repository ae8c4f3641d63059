"""`python -m titans_kernels.bench`, the same as `titans bench kernels`."""

import sys

import click

from titans_kernels.bench.command import kernels


def main() -> int:
    """Exit code: 0 success, 1 a check or an op failed, 2 bad usage, 130 interrupted."""
    try:
        return kernels.main(prog_name="python -m titans_kernels.bench", standalone_mode=False) or 0
    except click.Abort:
        click.echo("error: interrupted; finished shapes are in the --json file", err=True)
        return 130
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
