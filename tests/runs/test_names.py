"""Cell names, pinned so that no change silently renames finished cells."""

import hashlib
import json
from typing import Any

import pytest

from titans_core.presets import preset
from titans_platform.config import DEFAULTS_VERSION, RunConfig
from titans_platform.errors import UsageError
from titans_platform.objectives import build_objective
from titans_platform.runs.spec import Resources

DEFAULTS = "cd4212059707"
"""Of the defaults, which docs/config.md prints: its diff shows which one has changed."""
NAMES = {
    "{}": "5d1485aa7993", '{"seed": 3, "threads": 2}': "cad533aa9450",
    '{"model": {"variant": "mac", "attention": {"window": 64}}, "optim": {"lr": 0.001}}': "62c503617480",
    '{"eval": {"columns": {"recall": [{"task": "recall", "options": {"pairs": 4}}]}}}': "59cf0d135740",
}  # fmt: skip


def run(text: str = "{}") -> RunConfig:
    return RunConfig.model_validate_json(text)


def name(config: RunConfig, **options) -> str:
    return config.fingerprint("data", "eval", **options)


def defaults() -> dict[str, Any]:
    """The defaults of all fields that a name is of."""
    return run().model_dump(mode="json", exclude={"data", "checkpoint", "log", "start_from"})


def test_defaults_belong_to_their_version():
    """A new field changes DEFAULTS alone. If a default changes, bump DEFAULTS_VERSION and update NAMES."""
    digest = hashlib.sha256(json.dumps(defaults(), sort_keys=True).encode()).hexdigest()
    assert (digest[:12], DEFAULTS_VERSION) == (DEFAULTS, 4)


def test_configs_keep_their_names_and_each_field_that_differs_gives_another():
    assert {text: name(run(text)) for text in NAMES} == NAMES
    assert name(RunConfig(model=preset("340M", "mag"))) == "6d64e3f84815"
    # a default written out is a default left out
    assert name(run(json.dumps(defaults()))) == name(run())
    fields = {"alpha_bias": -5.0, "depth": 3, "conv": False, "surprise_bound": None}
    configs = [run(json.dumps({"model": {"memory": {key: value}}})) for key, value in fields.items()]
    assert len({name(config) for config in [run(), *configs]}) == len(fields) + 1
    assert len({run().fingerprint(d, e) for d, e in (("a", "b"), ("a", "c"), ("b", "b"))}) == 3


def test_name_depends_on_several_workers_but_not_on_checkpoints_or_elastic_counts():
    every = [name(run(f'{{"checkpoint": {{"every": {n}}}}}')) for n in (5, 7)]
    assert every[0] == every[1] == name(run())
    # workers sum in another order, which changes the last digits; one worker equals none
    assert name(run(), workers=0) == name(run(), workers=1) == name(run())
    assert len({name(run(), workers=n) for n in (1, 2, 4)}) == 3
    names = {name(run(), workers=Resources(workers=w).hashed_workers) for w in ((1, 4), (2, 8))}
    assert len(names) == 1
    assert names.isdisjoint(name(run(), workers=Resources(workers=w).hashed_workers) for w in (1, 2, (4, 4)))


def test_variant_from_outside_is_named_by_its_source_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "named_blocks.py"
    text = "from titans_core.blocks import LMM\n\nclass Mine(LMM):\n    pass\n"
    source.write_text(text)
    config = run('{"model": {"variant": "named_blocks:Mine"}}')
    before = name(config)
    assert name(config) == before
    source.write_text(text + "    uses_persistent = False\n")
    assert name(config) != before


@pytest.mark.parametrize(("model", "line"), [
    ({"variant": "mak"}, "model.variant: 'mak' is not one of lmm, mac, mag, mal, transformer, "),
    ({"variant": "no_such_lab:B"}, "model.variant: no_such_lab:B: 'no_such_lab' cannot be imported"),
    ({"options": {"width": 2}}, "model.options.width: unknown option; LMM takes none"),
    ({"variant": "gla", "options": {"haeds": 2}}, "model.options.haeds: unknown option; did you mean heads?"),
    ({"variant": "gla", "options": {"heads": 0}}, "model.options.heads: should be greater than 0"),
])  # fmt: skip
def test_models_and_numbers_that_cannot_be_are_one_line(model, line):
    with pytest.raises(UsageError) as error:
        build_objective(run(json.dumps({"model": model}))).check()
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
    for number in ("NaN", "Infinity"):
        with pytest.raises(ValueError, match=r"optim\.lr\n  Input should be a finite number"):
            run(f'{{"optim": {{"lr": {number}}}}}')
