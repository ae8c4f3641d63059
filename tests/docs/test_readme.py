"""README and the other documents: snippets run, commands parse, links exist."""

import re
import shlex
from pathlib import Path

import click
import pytest
import torch

from titans_platform import cli

TOP = Path(__file__).parents[2]
README = TOP / "README.md"
PAGES = (README, *(TOP / name for name in ("CONTRIBUTING.md", "kernels/README.md", "clusters/README.md")))
PAGES += tuple(sorted((*(TOP / "docs").glob("*.md"), *(TOP / "experiments").glob("**/README.md"))))
LOG = tuple(sorted((TOP / "experiments/log").glob("2*.md")))


def joined(text: str) -> str:
    return text.replace("\\\n", " ")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def parse(line: str, whole: bool) -> None:
    """Parse a `titans` line as the command line does; without ``whole`` arguments may be missing."""
    words = [word for word in shlex.split(line.partition(" > ")[0], comments=True)[1:] if word != "..."]
    command: click.Command = cli.cli
    ctx = click.Context(command, info_name="titans")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        _, inner, words = command.resolve_command(ctx, words)
        command, ctx = inner, click.Context(inner, ctx, info_name=inner.name)
    if isinstance(command, click.Group):
        assert not whole or not words, f"{line}: no command"
        return
    if "--" in words:
        # what follows is a line of its own, for a job
        parse(" ".join(["titans", *words[words.index("--") + 1 :]]), whole)
    try:
        command.make_context(command.name, list(words), ctx.parent)
    except click.MissingParameter:
        if whole:
            raise


def test_commands_of_the_documents_parse():
    lines = []  # page, line, whether it stands in a block of its own
    for page in PAGES:
        text, name = joined(page.read_text("utf-8")), str(page.relative_to(TOP))
        lines += [(name, line, True) for line in re.findall(r"^(?:    )?(titans .*)$", text, re.MULTILINE)]
        lines += [(name, line, False) for line in re.findall(r"`(titans [^`]+)`", text)]
    assert len(lines) > 100
    for page, line, whole in lines:
        try:
            parse(line, whole)
        except click.UsageError as error:
            pytest.fail(f"{page}: {line}: {error.format_message()}")


def test_other_lines_of_the_shell_are_known():
    lines = [line for block in blocks("sh") for line in joined(block).splitlines() if line]
    targets = set(re.findall(r"^(\w[\w-]*):", (TOP / "Makefile").read_text(), re.MULTILINE))
    for line in lines:
        command, *words = shlex.split(line, comments=True)
        if command == "make":
            assert words[0] in targets, line
        else:
            assert command == "titans" or words == [".venv/bin/activate"], line
    assert sum(line.startswith("titans") for line in lines) > 10
    text = "".join(page.read_text("utf-8") for page in PAGES)
    extras = set(",".join(re.findall(r"pip install (?:-e )?'\.\[([\w,-]+)\]'", text)).split(","))
    project = (TOP / "pyproject.toml").read_text()
    assert {"lm-eval", "hf"} <= extras
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)


def test_python_snippet_is_complete():
    (snippet,) = blocks("python")
    with torch.random.fork_rng():
        exec(snippet, {})


@pytest.mark.slow
@pytest.mark.usefixtures("book")
def test_own_text_is_trained_and_measured_as_the_readme_says(tmp_path, monkeypatch, capsys):
    """Line by line, but for a smaller model and fewer steps."""
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks("sh") if "titans init" in block]
    small = {"model.preset": "smoke", "data.sequence_length": "64", "optim.steps": "2", "eval.items": "4"}
    small |= {"eval.perplexity_tokens": "256"}
    sets = [word for field, value in small.items() for word in ("--set", f"{field}={value}")]
    seen = []
    for line in block.splitlines()[1:]:
        words = shlex.split(line, comments=True)[1:]
        words = [seen[-1] if word == "RUN" else word for word in words]
        assert cli.run(words + (sets if words[0] == "train" else [])) == 0, line
        seen += re.findall(r"^run (\w{12})", capsys.readouterr().out, re.MULTILINE)
    assert (len(seen), len(set(seen))) == (2, 1)
    assert Path("titans-runs/cells", seen[0], "result.json").is_file()


def test_links_between_pages_exist():
    for page in (*PAGES, *LOG, TOP / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            if target.startswith(("https://", "http://")):
                continue
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), f"{page}: {target}"
            headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE) if anchor else []
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert not anchor or anchor in slugs, f"{page}: {target}"


def test_table_of_folders_names_what_is_there():
    tables = {README: "Where things live", TOP / "docs/architecture.md": "Files of each package"}
    pages = [page.read_text("utf-8").partition(f"\n## {heading}\n")[2] for page, heading in tables.items()]
    sections = "".join(page.partition("\n## ")[0] for page in pages)
    named = re.findall(r"^\| (`.*?`) \|", sections, re.MULTILINE)
    paths = [path for cell in named for path in re.findall(r"`([^`]+)`", cell)]
    assert len(paths) > 10
    assert [path for path in paths if not (TOP / path).exists()] == []
