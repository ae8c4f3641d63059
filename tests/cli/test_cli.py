"""The command-line interface: options, exit codes, one-line errors, and response time."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from titans_platform import provenance
from titans_platform.cli import COMMANDS, RESUME, cli, run
from titans_platform.errors import ClusterError, TitansError, UsageError


def walk(command: click.Command, ctx: click.Context, path: tuple[str, ...] = ()) -> Iterator[tuple]:
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    for name in command.list_commands(ctx):
        yield from walk(command.get_command(ctx, name), ctx, (*path, name))


LONG = "x" * 300
COMMANDS_BY_NAME = dict(walk(cli, click.Context(cli)))


@pytest.mark.parametrize("name", COMMANDS_BY_NAME)
def test_help_has_an_example_that_parses(name, capsys):
    command = COMMANDS_BY_NAME[name]
    assert run([*name.split(), "--help"]) == 0
    example = capsys.readouterr().out.split("Example:")[1].strip().splitlines()[0].split()
    assert example[: 1 + len(name.split())] == ["titans", *name.split()]
    command.make_context(name, example[1 + len(name.split()) :])
    assert all(isinstance(p, click.Argument) or p.help for p in command.params)
    assert name.startswith("bench") or all(type(p.type) is not click.Path for p in command.params), "OSPath"


@pytest.mark.parametrize("group", [[], ["bench"], ["cluster"], ["data"], ["sweep"]])
def test_group_without_a_command_prints_its_help(group, capsys):
    assert run(group) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: {' '.join(['titans', *group])} ")
    assert "\nCommands:\n" in out
    assert group or all(f"  {name} " in out for name in COMMANDS)
    assert err == ""


@pytest.fixture
def failing(monkeypatch):
    """Lets every command end with an error."""

    def ends_with(error: BaseException) -> None:
        def fails(*arguments, **options):
            raise error

        monkeypatch.setattr(cli, "main", fails)

    return ends_with


@pytest.mark.parametrize(("line", "left"), [
    (["train", "run.yaml"], f"; {RESUME}"), (["--debug", "sweep", "run", "x"], f"; {RESUME}"),
    (["data", "prepare"], "; finished parts are kept; run the same command again for the rest"),
    (["bench", "memory"], ""),
])  # fmt: skip
def test_interrupt_says_how_to_go_on(failing, capsys, line, left):
    failing(KeyboardInterrupt())
    assert run(line) == 130
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"error: interrupted{left}"


@pytest.mark.parametrize(("error", "code"), [
    (TitansError("no"), 1), (ValueError("no"), 1), (UsageError("no"), 2), (click.UsageError("no"), 2),
    (ClusterError("no"), 3), (KeyboardInterrupt(), 130), (click.Abort(), 130),
])  # fmt: skip
@pytest.mark.parametrize("debug", [False, True])
def test_exit_codes_and_one_line(failing, capsys, error, code, debug):
    failing(error)
    assert run(["--debug"] * debug) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    assert ("Traceback" in lines[0]) == debug
    assert debug or len(lines) == 1


@pytest.mark.parametrize(("line", "says"), [
    (["trian"], "trian"), (["train"], "Missing argument 'CONFIG'"),
    (["train", "none.yaml"], "none.yaml: no such file"), (["train", "{yaml}", "--stes", "x"], "--stes"),
    (["train", "{yaml}", "--set", "model.variant=mac"],
     "model.attention.segment_size: variant mac needs one"),
    (["train", "{yaml}", "--workers", "0"], "0: give a number of at least 1"),
    (["train", "{yaml}", "--gpus", "nan"], "nan is not a finite number"),
    (["train", "{yaml}", "--set", "optim=null"], "--set optim: is a section, which cannot be null"),
    (["sweep", "run", "ablation", "--seeds", "0,,1", "--dry-run"], "--seeds 0,,1: should be whole"),
    (["train", "{yaml}", "--root", LONG], LONG + ": has a name of more than 255 bytes; give a shorter one"),
    (["generate", "abc123", "--memory-out", "a/" + LONG], "'--memory-out': a/" + LONG),
    (["train", "{yaml}", "--set", "data.tokenizer=" + LONG], LONG + ": File name too long; give a"),
    (["sweep", "run", LONG], LONG + ": File name too long; give a shorter one"),
])  # fmt: skip
def test_bad_usage_is_one_line_and_nothing_is_written(line, says, tiny_yaml, tmp_path, refused, monkeypatch):
    root = tmp_path / "runs"
    monkeypatch.setenv("TITANS_HOME", str(root))
    assert says in refused(*(part.format(yaml=tiny_yaml) for part in line))
    assert {p.name for p in root.glob("*")} <= {"data"}


def test_train_then_train_then_eval(tiny_yaml, tmp_path, capsys, answer, refused):
    root = ["--root", str(tmp_path)]
    plan = answer("train", tiny_yaml, *root, "--dry-run")
    assert (plan["state"], plan["tokens"]) == ("missing", 20 * 4 * 32)
    result = answer("train", tiny_yaml, *root)
    assert plan["parameters"] == result["parameters"]
    assert run(["train", str(tiny_yaml), *root]) == 0
    table = capsys.readouterr().out
    assert f"run {result['cell']} is finished" in table
    assert "recall@32" in table
    assert "0.062" in table, "chance stands beside the value"
    for name in (result["cell"][:6], str(tmp_path / "cells" / result["cell"]), result["mlflow_run_id"]):
        measured = answer("eval", name, *root)
        assert measured["columns"] == result["columns"]
    assert measured["step"] == 20
    point = str(next((tmp_path / "cells").glob("*/checkpoints/step-00000018")))
    measured = answer("eval", point, *root, "--set", "eval.items=4")
    assert (measured["step"], measured["tasks"]["reasoning/recall@32"]["items"]) == (18, 4)
    assert "only eval.* may be set" in refused("eval", point, *root, "--set", "seed=4")


@pytest.mark.slow
def test_more_steps_resume_and_start_from_gives_another_run(tiny_yaml, tmp_path, capsys):
    line = ["train", str(tiny_yaml), "--root", str(tmp_path), "--set", "optim.schedule=constant"]
    line += ["--set", "optim.warmup_steps=2", "--set"]

    def cell(*more: str) -> tuple[str, str]:
        assert run([*line, *more]) == 0
        shown = capsys.readouterr().out
        return shown, next(row for row in shown.splitlines() if row.startswith("run "))[4:16]

    _, first = cell("optim.steps=4")
    assert run([*line, "optim.steps=60", "--resume-from", first, "--dry-run"]) == 0
    assert f"/{first}/checkpoints/step-00000004\n" in capsys.readouterr().out
    shown, longer = cell("optim.steps=60", "--resume-from", first)
    assert f"/{first}/checkpoints/step-00000004, which trained the same steps" in shown
    _, begun = cell("optim.steps=4", "--set", f"start_from={first}")
    assert len({first, longer, begun}) == 3


def test_commit_of_a_tree_its_changes_and_its_wheel(tmp_path):
    """A repository with this one's packages in it, all of it in its one commit."""
    tree, top = tmp_path / "tree", Path(__file__).parents[2]
    for part in ("kernels", "titans_core", "platform", "sweeps", "clusters"):
        shutil.copytree(top / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "hatch_build.py", "constraints.txt"):
        shutil.copy(top / part, tree)
    (tree / "README.md").write_text("")
    (tree / "LICENSE").write_text("")
    someone = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for line in (["init", "-q"], ["add", "-A"], [*someone, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *line], cwd=tree, check=True)
    head = provenance.commit_of_tree(tree)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=tree, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:  # as an installation unpacks it
        archive.extractall(tmp_path / "site")
    code = "from titans_platform.provenance import commit; print(commit())"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == head
    assert provenance.commit_of_tree(tree) == head, "building leaves the tree as it was"
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tree, text=True).strip()
    assert provenance.commit_of_tree(tree) == head
    (tree / "README.md").write_text("new")
    (tree / "platform" / "untracked.py").write_text("")
    assert provenance.commit_of_tree(tree) == head
    study = tree / "sweeps" / "ablation.yaml"
    text = study.read_text()
    study.write_text(f"{text}\n# another expectation\n")
    assert provenance.commit_of_tree(tree) == f"{head}-dirty"
    study.write_text(text)
    (tree / "titans_core" / "config.py").write_text("")
    assert provenance.commit_of_tree(tree) == f"{head}-dirty"
    assert provenance.commit_of_tree(tree / "platform") == "unknown"
    assert provenance.commit_of_tree(tree / "none") == "unknown"
