"""A variant in a user's own file: preset, training, evaluation, errors."""

import json

import pytest

from tests import small
from titans_core.blocks import block_parameters
from titans_core.presets import preset

pytestmark = pytest.mark.slow

OPTIONS = """uses_persistent = False

    class Options(Frozen):
        width: PositiveInt = 4
"""
BLOCK = small.documented("titans_core/blocks/shift.py").replace("uses_persistent = False\n", OPTIONS)
BLOCK = BLOCK.replace("import ModelConfig", "import Frozen, ModelConfig, PositiveInt")
VARIANT = "my_lab.blocks:Shift"
RUN = {part: small.RUN[part] for part in ("data", "optim", "eval")}


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder with ``my_lab/blocks.py`` in it, as the current one."""
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "blocks.py").write_text(BLOCK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_it_is_trained_and_measured(lab, answer):
    model = preset("smoke", VARIANT, vocab_size=260, options={"width": 3}).model_dump(mode="json")
    (lab / "run.yaml").write_text(json.dumps({**RUN, "model": model}))
    result = answer("train", "run.yaml", "--root", "runs")
    assert result["config"]["model"]["variant"] == VARIANT
    assert answer("eval", result["cell"], "--root", "runs")["columns"] == result["columns"]


@pytest.mark.parametrize(("source", "line"), [
    (BLOCK.replace("def state_bytes", "def bytes"), "does not define state_bytes, which a block must"),
    (BLOCK.replace("def mix", "def mixed"), "does not define mix, which a block must"),
    (BLOCK.replace("(Block)", "(nn.Module)"), "is not a subclass of titans_core.blocks.base.Block"),
    ("x = 1 +", "cannot be imported: SyntaxError"),
])  # fmt: skip
def test_class_that_is_not_a_block_is_refused_at_once(lab, refused, source, line):
    (lab / "my_lab" / "blocks.py").write_text(source)
    (lab / "run.yaml").write_text(json.dumps({**RUN, "model": {"variant": VARIANT, "vocab_size": 260}}))
    for arguments in ([], ["--dry-run"]):
        error = refused("train", "run.yaml", "--root", "runs", *arguments)
        assert error.startswith("error: model.variant: my_lab.blocks:Shift")
        assert line in error
    assert not (lab / "runs").exists()


def test_preset_gives_it_the_parameters_of_the_size_unless_its_mixer_is_larger(lab):
    config = preset("laptop", VARIANT, options={"width": 9})
    baseline = block_parameters(preset("laptop", "transformer"))
    assert block_parameters(config) == pytest.approx(baseline, rel=0.02)
    assert config.mlp_expansion > preset("laptop", "transformer").mlp_expansion
    assert config.options == {"width": 9}
    (lab / "my_lab" / "wide.py").write_text(BLOCK.replace("nn.Linear(2 *", "nn.Linear(64 *"))
    with pytest.raises(ValueError, match=r"preset: my_lab.* parameters a block before its feed-forward"):
        preset("smoke", VARIANT.replace("blocks", "wide"))
