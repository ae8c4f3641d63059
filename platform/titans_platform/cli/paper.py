"""`titans paper`: a page with all of the paper's tables and figures."""

from __future__ import annotations

from pathlib import Path

import click

from titans_platform.cli import root_option


@click.command()
@root_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Output file  [default: paper.html under --root]",
)
def paper(root: Path, out: Path | None) -> None:
    """Write one HTML page with all of the paper's tables and figures: our results next to the paper's.

    Our results are those under --root. The paper's own scales are always listed; what has not been run is
    marked as missing.

    \b
    Example:
      titans paper
    """
    from titans_platform.files import write_text
    from titans_platform.report.publish import PAPER_PAGE, paper_page
    from titans_platform.study.status import overview, studies_of_the_paper

    root = root.resolve()
    page = paper_page(overview(root, studies_of_the_paper()), root)
    path = out or root / PAPER_PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    click.echo(f"page {path}")
