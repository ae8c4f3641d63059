"""`load_run`: load a trained model by any name of its run."""

import pytest
import torch

from tests.objectives.test_objectives import RUN as SERIES
from tests.small import trained
from titans_platform import load_run
from titans_platform.cli import run
from titans_platform.data import load_tokenizer
from titans_platform.errors import UsageError


def test_model_its_tokenizer_and_its_config_by_name_folder_or_checkpoint(tiny_run, tmp_path):
    folder = trained(tmp_path)
    model, tokenizer, config = load_run(folder.name[:6], tmp_path)
    assert config == tiny_run
    assert tokenizer.fingerprint == load_tokenizer("byte").fingerprint
    tokens = torch.tensor([tokenizer.encode("what was learnt")])
    with torch.no_grad():
        logits = model(tokens).logits
        again, _, _ = load_run(folder)
        assert torch.equal(again(tokens).logits, logits)
        before, _, _ = load_run(folder / "checkpoints" / "step-00000018", root=tmp_path / "elsewhere")
        assert not torch.equal(before(tokens).logits, logits)
    assert not model.training


def test_series_has_no_tokenizer_and_the_root_is_that_of_the_command_line(tmp_path, tiny_run, monkeypatch):
    model, tokenizer, config = load_run(trained(tmp_path, **SERIES))
    assert tokenizer is None
    assert config.objective.kind == "regression"
    assert model(torch.zeros(1, 16, 2)).prediction.shape == (1, 3, 2)
    folder = trained(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no such run under titans-runs/cells"):
        load_run(folder.name)
    monkeypatch.setenv("TITANS_HOME", str(tmp_path / "elsewhere"))
    assert load_run(folder.name)[2] == tiny_run


def test_damaged_newest_checkpoint_is_refused_and_the_one_before_named(tmp_path, capsys, refused):
    folder = trained(tmp_path)
    older, newest = sorted((folder / "checkpoints").glob("step-*"))[-2:]
    damaged = next(path for path in sorted(newest.rglob("*.distcp")) if path.stat().st_size > 100)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    for command in (["eval"], ["generate"], ["export"]):
        further = [str(tmp_path / "out")] if command == ["export"] else []
        line = refused(*command, folder.name, *further, "--root", tmp_path)
        assert f"checkpoint {newest} is damaged: " in line
        assert line.endswith(f"to use an older checkpoint, give {older}")
    assert run(["eval", str(older), "--json", "--root", str(tmp_path)]) == 0
    assert '"step": 18' in capsys.readouterr().out
