"""Machines as they are: odd roots, no home, no passwd entry, a terminal that is not UTF-8, odd names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titans_kernels import native
from titans_platform.runs import ray_session
from titans_platform.tracking import CELL_TAG, name_of, open_store


@pytest.mark.parametrize("name", ["a b", "a%20b", "a?b", "a#b", "ä 字", "50%", "a?b=c&d#e%2Ff", "[a]", "a'b"])
def test_store_lies_in_its_root_whatever_its_name(name, tmp_path):
    (tmp_path / "a b").mkdir()
    store = open_store(tmp_path / name / "r")
    run = store.cell_run("cell", "title", config={"a": 1})
    store.run(run).close()
    assert open_store(tmp_path / name / "r").find(CELL_TAG, "cell") == run
    assert open_store(store.uri).find(CELL_TAG, "cell") == run
    (config,) = tmp_path.rglob("config.json")
    assert config.is_relative_to(tmp_path / name / "r" / "artifacts")
    assert {path.name for path in tmp_path.iterdir()} == {"a b", name}


NAMES = [
    "ppl (held out)", "ppl%", "a,b", "/ppl", "a//b", "../ppl", ".", "a\\b", "größe", "perplexity@32",
    "x" * 300, "", "a/", "?",
]  # fmt: skip


def test_metric_of_any_name_is_logged(tmp_path):
    store = open_store(tmp_path)
    run = store.cell_run("cell", "title", params=dict.fromkeys(NAMES, 1))
    log = store.run(run)
    log.send([(1, 0, dict.fromkeys(NAMES, 1.0))])
    log.summary(dict.fromkeys(NAMES, 2.0), 2)
    log.close()
    ended = store.client.get_run(run)
    assert ended.info.status == "FINISHED"
    assert ended.data.metrics.keys() == set(map(name_of, NAMES)) == ended.data.params.keys()
    assert len({*map(name_of, NAMES)}) == len(NAMES)
    assert name_of("largest (x)@1/stderr") != name_of("largest _x_@1/stderr")
    assert name_of("column/needle@64/stderr") == "column/needle/64/stderr"


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """The options of each start of Ray, which another test may have started."""
    given: list[dict] = []
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray.init", lambda **options: given.append(options))
    return given


@pytest.mark.parametrize("value", ["/tmp", "{long}", "{wide}", "/proc/none", "."])
@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_ray_gets_a_short_temporary_directory(name, value, tmp_path, monkeypatch, started):
    (wide := Path("/tmp/字")).mkdir(exist_ok=True)
    monkeypatch.setattr(ray_session.tempfile, "tempdir", None)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value.format(long=tmp_path, wide=wide))
    with ray_session.ray_session(1):
        assert started[0]["_temp_dir"] == "/tmp/ray"
    wide.rmdir()


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("home", ["/proc/none", "/proc", "{here}", "{here}/other"])
def test_home_that_cannot_be_written_gets_no_token(home, monkeypatch, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".ray").symlink_to("/proc")  # nobody may write there
    monkeypatch.setenv("HOME", home.format(here=tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    with ray_session.ray_session(1):
        assert ("RAY_AUTH_TOKEN" in os.environ) is (home != "{here}")


def test_user_id_without_passwd_entry_and_home_has_no_caches(monkeypatch, tmp_path):
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # raises KeyError
    monkeypatch.setattr("os.environ", {})
    assert open_store(tmp_path).cell_run("cell", "title")
    assert native.library.__wrapped__(torch.float32) is None


@pytest.mark.slow
@pytest.mark.parametrize("environment", [
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
], ids=str)  # fmt: skip
def test_terminal_that_is_not_utf8_gets_the_text(environment, tmp_path):
    code = "import click, sys; from titans_platform import cli; cli.cli.add_command(click.Command('a', "
    code += "callback=lambda: click.echo('4.15 \\xb1 0.09 \\u221e'))); cli.main(sys.argv[1:])"
    for word, code_of in (("a", 0), ("gr\xf6\u221e", 2)):
        command = [sys.executable, "-X", "utf8=0", "-c", code, word]
        done = subprocess.run(command, env=os.environ | environment, cwd=tmp_path, capture_output=True)
        assert done.returncode == code_of, done.stderr
        assert b"Unicode" not in done.stderr
    assert b"No such command" in done.stderr
