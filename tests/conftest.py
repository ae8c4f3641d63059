"""Fixtures several test files share."""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from titans_platform.config import RunConfig

# before torch is imported: the tests' tensors are too small to share out
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.small import RUN, documented

# before a kernel is defined: without a GPU they run in Triton's interpreter
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first-cases", action="store_true", help="Of each test only the first selected case.")


# after -m has deselected
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with the longest tests first, so that no process is left alone with one at the end."""
    if config.getoption("--first-cases"):
        first: dict[str, pytest.Item] = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        kept = set(first.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = first.values()
    weight = {item.path: 0 for item in items}
    for item in items:
        cluster, slow = item.get_closest_marker("cluster"), item.get_closest_marker("slow")
        weight[item.path] = max(weight[item.path], 2 if cluster else 1 if slow else 0)
    items.sort(key=lambda item: -weight[item.path])
    gc.freeze()  # a run collects garbage first: half a second with all that is imported


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report as leaked what is left at the end


@pytest.fixture(autouse=True)
def own_modules() -> Iterator[None]:
    """Unload what a test imported from its temporary folder: the next may have a module of the same name.

    The repository and its virtual environment may lie below the temporary directory too; they stay loaded.
    """
    path, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    temporary, kept = Path(tempfile.gettempdir()), (Path(__file__).parents[1], Path(sys.prefix))
    if len(added := set(sys.modules) - before) > 100:
        gc.collect()
        gc.freeze()
    for name in added:
        module = sys.modules[name]
        places = [Path(p) for p in (getattr(module, "__file__", None), *getattr(module, "__path__", [])) if p]
        if any(p.is_relative_to(temporary) and not any(map(p.is_relative_to, kept)) for p in places):
            del sys.modules[name]
    # inspect remembers the file of a module, and refuses a package of its name that has none
    inspect._filesbymodname.clear()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads; the number before is restored after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def tiny_run() -> RunConfig:
    """A real run of a second: recall in 32 tokens by a memory of one layer."""
    # here, because the kernels' tests also run where the platform's packages are not installed
    from titans_platform.config import RunConfig

    return RunConfig.model_validate_json(json.dumps(RUN))


@pytest.fixture
def tiny_yaml(tmp_path: Path) -> Path:
    """The same run as a config file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(RUN))
    return path


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The import path of the task that docs/extending.md shows, in a package of its own."""
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "tasks.py").write_text(documented("platform/titans_platform/tasks/sums.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_lab.tasks:Sums"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text of 12 KB."""
    path = tmp_path / "book.txt"
    path.write_text("a line of a book, not a long one; and then the next of them\n" * 200)
    return path


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 30 pieces with a start, an end and an unknown piece but no pad."""
    from sentencepiece import SentencePieceTrainer

    text = "the memory learns to memorize at test time, token after token, chunk after chunk. "
    with (path := tmp_path_factory.mktemp("spm") / "small.model").open("wb") as file:
        options = {"model_writer": file, "vocab_size": 30, "minloglevel": 2}
        SentencePieceTrainer.train(sentence_iterator=iter([text] * 50), **options)
    return path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a line of the command line that must be refused, and returns what it says: one line."""

    def run(*words: object, code: int = 2) -> str:
        from titans_platform import cli

        capsys.readouterr()
        assert cli.run([*map(str, words)]) == code
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ")
        return line

    return run


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a line of the command line that must succeed, and returns the JSON it prints."""

    def run(*words: object) -> Any:
        from titans_platform import cli

        capsys.readouterr()
        assert cli.run([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray cluster for all tests that need one; it takes seconds to start."""
    from titans_platform.runs.ray_session import ray_session

    with ray_session(cpus=3):
        yield
