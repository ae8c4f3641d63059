"""`titans init`: its run file is valid, explains every field, and the reference page is up to date."""

from pathlib import Path

import pytest
import yaml

from titans_core.config import MemoryConfig
from titans_platform.cli import run
from titans_platform.cli.init import fields_of, run_file
from titans_platform.config import EvalConfig, OptimConfig, SourceConfig
from titans_platform.loading import load_config
from titans_platform.tasks import TASKS
from tools.config_reference import reference_page

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_file_is_a_run_that_train_accepts_also_without_a_text(book, tmp_path, capsys, answer):
    path = tmp_path / "run.yaml"
    assert run(["init", str(path), "--data", str(book), "--preset", "smoke"]) == 0
    capsys.readouterr()
    cfg = load_config(path)
    assert cfg.data.sources[0].path == str(book)
    assert (cfg.model.variant, cfg.model.vocab_size, cfg.model.d_model) == ("mac", 260, 32)
    (source,) = answer("data", "prepare", path, "--root", str(tmp_path / "root"))["sources"].values()
    assert source["validation_rows"] > 0
    assert answer("train", path, "--root", str(tmp_path / "root"), "--dry-run")["parameters"] < 100_000
    # without a text it trains on the corpus
    path = tmp_path / "corpus.yaml"
    assert run(["init", str(path)]) == 0
    assert load_config(path).data.sources[0].kind == "corpus"


def test_every_field_stands_in_it_with_its_default(book, tmp_path):
    lines = [line.strip() for line in run_file(str(book), "laptop").splitlines()]
    for model in (MemoryConfig, SourceConfig, OptimConfig, EvalConfig):
        for field in fields_of(model):
            assert any(line.lstrip("#- {").startswith(f"{field.name}:") for line in lines), field.name
    path = tmp_path / "run.yaml"
    path.write_text(run_file(str(book), "laptop"))
    before = load_config(path)
    # with all fields of the memory switched on it is the same run
    text = path.read_text()
    start, end = text.index("  memory:"), text.index("  attention:")
    on = "".join(
        line.replace("# ", "", 1) if line.strip()[2:].partition(":")[0] in MemoryConfig.model_fields else line
        for line in text[start:end].splitlines(keepends=True)
    )
    path.write_text(text[:start] + on + text[end:])
    assert len(yaml.safe_load(path.read_text())["model"]["memory"]) == len(MemoryConfig.model_fields)
    assert load_config(path) == before


@pytest.mark.parametrize(("arguments", "says"), [
    (["{there}"], "exists already; --force overwrites it"),
    (["new.yaml", "--data", "nowhere.txt"], "--data: no file, folder or match for"),
    (["new.yaml", "--data", "short.txt"], "--data: 5 training tokens are too few for a row of"),
    (["new.yaml", "--preset", "labtop"], "model.preset: no preset 'labtop'; did you mean laptop?"),
    (["no/such/run.yaml"], "no/such/run.yaml: cannot be written: No such file or directory"),
])  # fmt: skip
def test_what_cannot_be_written_is_one_line(arguments, says, book, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    assert says in refused("init", *(argument.format(there=book) for argument in arguments))
    assert not (tmp_path / "new.yaml").exists()


def test_reference_page_is_current_names_everything_and_holds_no_docstring_marks(book):
    assert PAGE.read_text() == reference_page(), "run: python -m tools.config_reference > docs/config.md"
    page = reference_page()
    for section in ("model.memory", "model.attention", "data.sources.0", "optim", "eval"):
        assert f"## {section}\n" in page
    for name, task in TASKS.items():
        assert f"## task: {name}\n" in page
        assert all(f"| `{option}` |" in page for option in task.Options.model_fields)
    assert "`" not in "".join(run_file(str(book), "laptop").splitlines(keepends=True)[3:])
    assert "``" not in reference_page()
