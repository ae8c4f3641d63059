"""Studies whose rows are a product of axes, and the files the project ships."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.core.test_footprint import BUDGETS, WIDTH
from titans_core.config import ModelConfig
from titans_core.footprint import saved_bytes_per_token, trace
from titans_platform.data.tokenizer import BUILT_IN, load_tokenizer
from titans_platform.errors import UsageError
from titans_platform.objectives import next_token
from titans_platform.objectives.classification import Classification
from titans_platform.objectives.regression import Regression
from titans_platform.runs import check
from titans_platform.runs.spec import Machine
from titans_platform.study.grid import chosen_rows, expand, load_study
from titans_platform.study.plan import check_space, check_without_data, open_study, place
from titans_platform.study.spec import Row

SWEEPS = Path(__file__).resolve().parents[2] / "sweeps"
STUDIES = sorted(path.stem for path in SWEEPS.glob("*.yaml"))
GRID = {
    "name": "tiny", "columns": {"lm_ppl": {"title": "Perplexity", "higher_is_better": False}},
    "base": {"model": {"d_model": 32, "vocab_size": 260}},
    "scales": {
        "small": {"seeds": [0]},
        "long": {"axes": {"length": {"points": {"128": {"data.sequence_length": 128}}}}},
    },
    "axes": {
        "variant": {"points": {"LMM": {"model.variant": "lmm"}, "MAG": {"model": {"variant": "mag"}}}},
        "depth": {"field": "model.memory.depth", "values": [1, 3], "label": "depth {}"},
        "length": {"label": "T={}", "points": {str(T): {"data.sequence_length": T} for T in (32, 64)}},
    },
}  # fmt: skip


def write(folder: Path, **changes) -> str:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**GRID, **changes}, sort_keys=False))
    return str(path)


def test_rows_are_the_product_of_the_axes_and_selected_by_pattern(tmp_path):
    study = load_study(write(tmp_path))
    cells = expand(study, "small")
    assert [cell.row for cell in cells][:3] == ["LMM depth 1 T=32", "LMM depth 1 T=64", "LMM depth 3 T=32"]
    assert len(cells) == 8
    row, last = study.rows_at("small")[-1], cells[-1].config
    assert row.axes == {"variant": "MAG", "depth": 3, "length": 64}
    assert (last.model.variant, last.model.memory.depth, last.data.sequence_length) == ("mag", 3, 64)
    for pattern, count in (("MAG*", 4), ("*depth 3*", 4), ("lmm DEPTH 1 t=32", 1), ("*T=6?", 4)):
        assert len(expand(study, "small", rows=[pattern])) == count, pattern
    assert load_study(write(tmp_path, scales={"small": {"seeds": [0]}})).scale_name() == "small"
    # an axis of a scale replaces the study's
    names = [f"{variant} depth {depth} 128" for variant in ("LMM", "MAG") for depth in (1, 3)]
    assert [row.name for row in study.rows_at("long")] == names


@pytest.mark.parametrize(("asked", "chosen"), [
    (["LMM"], {"LMM on a", "LMM on b"}), (["LMM on a, MAC"], {"LMM on a", "MAC on a", "MAC on b"}),
    (["lmm, twice"], {"LMM, twice on a", "LMM, twice on b"}),
    (["LMM, LMM, twice on b"], {"LMM on a", "LMM on b", "LMM, twice on b"}),
    (["MAC", "LMM* on a"], {"MAC on a", "MAC on b", "LMM on a", "LMM, twice on a"}),
])  # fmt: skip
def test_a_name_may_contain_commas_and_a_line_selects_all_of_its_rows(asked, chosen):
    lines = ("LMM", "MAC", "LMM, twice")
    rows = [Row(name=f"{line} on {point}", line=line) for line in lines for point in ("a", "b")]
    assert chosen_rows(asked, rows, "tiny") == chosen


@pytest.mark.parametrize(("axes", "message"), [
    ({"depth": {"field": "model.memory.depth"}}, "give either a field with values"),
    ({"depth": {"field": "model.memory.depth", "values": [0]}}, "model.memory.depth"),
    ({"depth": {"field": "model.memory.dept", "values": [1]}}, "did you mean depth"),
    ({"a": {"field": "seed", "values": [1], "label": "a"}}, "needs {}"),
    ({"lenght": GRID["axes"]["length"]}, "axis (scale long) 'length'"), ({}, "rows: a study needs rows"),
])  # fmt: skip
def test_an_invalid_axis_is_a_one_line_error(tmp_path, axes, message):
    scales = GRID["scales"] if "long" in message else {"small": {}}
    with pytest.raises(UsageError) as error:
        expand(load_study(write(tmp_path, axes=axes, scales=scales)), "small")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def saved_at_most(config: ModelConfig, rows: int, length: int, recompute, precision: str) -> float:
    """Stands in for a trace: what tests/core/test_footprint.py allows, and what smaller calls keep."""
    selective = BUDGETS.get(config.variant, max(BUDGETS.values())) / WIDTH * config.d_model
    selective += 21 * config.d_model * (config.variant != "transformer")
    return {True: 4 * config.d_model, "selective": selective}.get(recompute, 3 * selective)


PAIRS = [(name, scale) for name in STUDIES for scale in load_study(str(SWEEPS / f"{name}.yaml")).scales]


@pytest.mark.parametrize(("name", "scale"), PAIRS)
def test_every_shipped_scale_starts_on_the_machine_that_it_is_meant_for(name, scale, tmp_path, monkeypatch):
    """Without Ray, a GPU, the network (tokenizers are replaced) or the files that a user must fetch."""
    here = lambda name: load_tokenizer(name if name in BUILT_IN else "byte")  # noqa: E731
    monkeypatch.setattr(next_token, "load_tokenizer", here)
    for objective in (Classification, Regression):
        monkeypatch.setattr(objective, "check_sources", lambda self: None)
    monkeypatch.setattr(check, "saved_bytes_per_token", saved_at_most)
    study = open_study(str(SWEEPS / f"{name}.yaml"), scale, tmp_path)
    machine = study.study.scales[scale].machine
    assert bool(machine) == bool(study.scale.resources.gpus_per_worker), "a scale on GPUs names them"
    placed, warning = place(replace(study, machine=machine or Machine(cpus=2)))
    check_without_data(placed)
    assert (placed.concurrency, warning) == (1 if machine else 2, "")
    configs = {json.dumps(cell.config.model_dump(mode="json"), sort_keys=True) for cell in study.cells}
    assert len(configs) == len(study.cells), "two cells are one"
    if study.search:
        assert len(check_space(study)) > 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_planned_activations_are_within_a_tenth_of_a_packed_trace():
    study = load_study("ablation")
    config = expand(study, "340M", rows=["LMM"])[0].config
    rows, length = config.optim.micro_batch_size, config.data.sequence_length
    traced = 2 * int(trace(config.model, rows // 2, length, "selective", documents=2 * rows).saved_bytes)
    planned = check.needed_memory(config, study.scales["340M"].resources)["optim.micro_batch_size"]
    assert planned == pytest.approx(traced * config.model.n_layers, rel=0.1)
    most = saved_at_most(config.model, rows, length, "selective", "bf16") * rows * length
    assert 0.8 * most <= traced <= most
    # the second size has numbers, no symbols
    block = config.model.model_copy(update={"n_layers": 1})
    assert type(saved_bytes_per_token(block, rows, length, "selective")) is float
    assert 0.9 <= (max(BUDGETS.values()) / WIDTH + 21) / check.USUALLY_SAVED <= 1


def test_grid_is_48_cells_a_seed_that_differ_in_the_axes_alone():
    grid = load_study(str(SWEEPS / "grid.yaml"))
    for scale in grid.scales:
        configs = [cell.config for cell in expand(grid, scale, seeds=[0])]
        models = [config.model for config in configs]
        assert len(models) == 48
        assert len({(m.variant, m.memory.depth, m.memory.chunk_size) for m in models}) == 48
        same = {(m.memory.max_theta, m.attention.window, m.attention.segment_size, m.d_model) for m in models}
        assert len(same) == 1
        # a row holds several of the largest chunk
        assert all(c.data.sequence_length >= 2 * c.model.memory.chunk_size for c in configs)


def test_the_lengths_of_memory_depth_cost_the_same_tokens():
    study = load_study(str(SWEEPS / "memory_depth.yaml"))
    for scale in study.scales:
        assert len({cell.config.tokens for cell in expand(study, scale)}) == 1
    lengths = {cell.config.data.sequence_length for cell in expand(study, "340M")}
    assert lengths == {2048, 4096, 8192, 16384, 32768}
