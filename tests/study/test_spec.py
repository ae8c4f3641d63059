from pathlib import Path

import pytest
import torch
import yaml

from titans_core import LanguageModel
from titans_core.presets import preset
from titans_platform.errors import UsageError
from titans_platform.loading import overlay
from titans_platform.study.grid import expand, find_study, known_studies, load_study, place_of
from titans_platform.study.spec import Axis
from titans_platform.text import flatten

REPOSITORY = Path(__file__).resolve().parents[2]
STUDY = {
    "name": "tiny", "columns": {"lm_ppl": {"title": "Perplexity", "higher_is_better": False}},
    "base": {"model": {"d_model": 32, "vocab_size": 260}, "optim": {"steps": 5}},
    "scales": {
        "small": {"seeds": [0, 1], "resources": {"cpus_per_worker": 2}},
        "large": {"seeds": [3], "model": {"d_model": 64}, "optim": {"steps": 9}},
    },
    "rows": [
        {"name": "LMM", "paper": {"lm_ppl": 27.01}},
        {"name": "Linear Memory", "set": {"model.memory.depth": 1}},
        {"name": "w/o Decay", "set": {"model": {"memory": {"decay": False}}}},
    ],
}  # fmt: skip
FIRST, EQUAL = "LMM", "Linear Memory, equal state"
SEARCH = {"metric": "lm_ppl", "space": {"optim.lr": {"choices": [0.1]}}}
EXPECTED = {"better": False, "because": "a derivation\n"}


def write(folder: Path, **changes) -> str:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}))
    return str(path)


def test_layers_override_each_other_and_cells_are_ordered_by_seed(tmp_path):
    study = load_study(write(tmp_path))
    cells = expand(study, "large", overrides=["optim.lr=0.01"])
    assert [cell.row for cell in cells] == ["LMM", "Linear Memory", "w/o Decay"]
    assert {(cell.seed, cell.config.seed) for cell in cells} == {(3, 3)}
    lmm, linear, without = (cell.config for cell in cells)
    assert (lmm.model.d_model, lmm.optim.steps, lmm.optim.lr) == (64, 9, 0.01)
    assert (lmm.model.memory.depth, linear.model.memory.depth) == (2, 1)
    assert (lmm.model.memory.decay, without.model.memory.decay) == (True, False)
    cells = expand(study, "small", rows=["w/o decay", "LMM"], seeds=[4, 2])
    assert [(c.row, c.seed) for c in cells] == [("LMM", 4), ("w/o Decay", 4), ("LMM", 2), ("w/o Decay", 2)]


def test_seed_draws_data_and_items_where_the_scale_says_so(tmp_path):
    study = load_study(write(tmp_path, scales={"same": {}, "drawn": {"draws_data": True}}))
    for scale, drawn in (("same", 0), ("drawn", 4)):
        config = expand(study, scale, seeds=[4])[0].config
        assert (config.seed, config.data.seed, config.eval.seed) == (4, drawn, drawn)


def test_overlay_takes_dotted_keys_and_replaces_lists():
    below = {"a": {"b": [1, 2], "c": 1}, "d": 2}
    laid = {"a": {"b": [3], "c": 1, "e": {"f": 4}}, "d": {"g": 5}}
    assert overlay(below, {"a.b": [3], "a.e.f": 4, "d": {"g": 5}}) == laid
    for key in ("axes", "columns", "points", "rows", "scales", "space"):  # their keys are names
        names = {"a.b": {"c": {"d": 1}}, "e": {"f": 2}}
        assert overlay({}, {key: {"a.b": {"c.d": 1}}, f"{key}.e.f": 2}) == {key: names}
    assert below == {"a": {"b": [1, 2], "c": 1}, "d": 2}
    # a point of an axis named by an integer is a number
    axis = Axis(points={"12": {}, "-3": {}, "--5": {}, "1.5": {}})
    assert [value for value, _ in axis.steps()] == [12, -3, "--5", "1.5"]


@pytest.mark.parametrize(("changes", "words"), [
    ({"rowz": []}, ["rowz", "rows"]),
    ({"base": {"model": {"d_modle": 3}}}, ["small", "LMM", "model.d_modle", "d_model"]),
    ({"base": {"model": {"memory": {"depth": 0}}}}, ["model.memory.depth", "0"]),
    ({"base": {"optim": {"steps": "many"}}}, ["optim.steps", "many"]),
    # also where it is not selected
    ({"rows": [{"name": "LMM"}, {"name": "A", "set": {"model.memory.chunk_size": 0}}]}, ["'A'", "chunk"]),
    ({"rows": [{"name": "LMM"}, {"name": "LMM"}]}, ["'LMM'", "twice"]),
    ({"rows": [{"name": "A", "paper": {"lm_pl": 1.0}}]}, ["lm_pl", "lm_ppl"]),
    ({"rows": [{"name": "A", "paper": {"LM_PPL": 1.0}}]}, ["'LM_PPL'", "lm_ppl"]),
    ({"rows": [{"name": "A", "set": {"model.preset": "34M"}}]}, ["model.preset", "340M"]),
    ({"columns": {"lm_ppl": {"title": "P"}, "acc": {"title": "A"}}}, ["eval.columns.acc"]),
    ({"scales": {"small": {"resources": {"workers": [3, 2]}}}}, ["resources.workers: the least, 3,"]),
])  # fmt: skip
def test_invalid_study_is_a_one_line_error(tmp_path, changes, words):
    with pytest.raises(UsageError) as error:
        expand(load_study(write(tmp_path, **changes)), "small", rows=["LMM"] if "LMM" in str(changes) else [])
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), error.value


def test_line_of_several_runs_measures_each_column_in_one_of_them(tmp_path):
    tasks = {
        "a": {"eval.columns.first": [{"task": "recall"}], "optim.steps": 7},
        "b": {"eval.columns.second": [{"task": "recall"}]},
    }
    changes = {
        "columns": {"first": {"title": "First"}, "second": {"title": "Second"}},
        "rows": [*STUDY["rows"][1:2], {"name": "LMM", "expected": {"first": EXPECTED}}],
        "axes": {"task": {"points": tasks, "label": "on {}", "across": True}},
    }
    study = load_study(write(tmp_path, **changes))
    cells = expand(study, "small", seeds=[0])
    assert [(cell.row, cell.config.optim.steps, *cell.config.eval.columns) for cell in cells] == [
        ("Linear Memory on a", 7, "first"), ("Linear Memory on b", 5, "second"),
        ("LMM on a", 7, "first"), ("LMM on b", 5, "second"),
    ]  # fmt: skip
    lines = [row.as_line() for row in study.rows_at("small")]
    assert [row.name for row in lines] == ["Linear Memory", "Linear Memory", "LMM", "LMM"]
    assert lines[-1].expected["first"].better is False
    # as YAML folds a text, without the end of its last line
    assert lines[-1].expected["first"].because == "a derivation"
    del tasks["b"]
    with pytest.raises(UsageError, match=r"'Linear Memory': eval\.columns\.second"):
        expand(load_study(write(tmp_path, **changes)), "small")


def test_study_like_another_has_only_the_differences(tmp_path):
    write(tmp_path)
    other = tmp_path / "rates.yaml"
    axis = {"field": "optim.lr", "values": [0.1, 0.2], "label": "at {}"}
    laid = {"name": "rates", "like": f"{tmp_path}/tiny.yaml", "axes": {"lr": axis}}
    scales = {"small": {"seeds": [9], "rows": {"LMM": {"optim.steps": 6}}}, "large": None}
    # rows of its own: what the scales of the other study set for rows that are left out goes with them
    other.write_text(yaml.safe_dump({**laid, "rows": [{"name": "New [x]"}]}))
    for asked, rates in (("new [x] at 0.2", [0.2]), ("New [x]", [0.1, 0.2])):
        cells = expand(load_study(str(other)), "small", rows=[asked], seeds=[0])
        assert [cell.row for cell in cells] == [f"New [x] at {rate}" for rate in rates]
    for given in (None, {"small": None}, {"small": {"rows": None}}, {"small": {"rows": ["LMM"]}}):
        write(tmp_path, scales=given)
        with pytest.raises(UsageError, match=r"^rates.yaml.scales(.small.rows)?: "):
            load_study(str(other))
    write(tmp_path)
    other.write_text(yaml.safe_dump({**laid, "scales": scales}))
    study = load_study(str(other))
    assert (study.name, [*study.scales]) == ("rates", ["small"])
    cells = expand(study, "small")
    assert [(cell.row, cell.seed, cell.config.optim.lr, cell.config.optim.steps) for cell in cells][:3] == [
        ("LMM at 0.1", 9, 0.1, 6), ("LMM at 0.2", 9, 0.2, 6), ("Linear Memory at 0.1", 9, 0.1, 5),
    ]  # fmt: skip
    for wrong, message in (
        ({"like": 3}, "like: 3 should be the name of a study"),
        ({"like": str(other)}, "^rates.yaml: like: circular reference .*rates.yaml -> .*rates.yaml$"),
        ({"scales": {"small": {"rows": {"LMN": {}}}}}, "did you mean LMM"),
        ({"search": SEARCH, "scales": {"small": {"draws_data": True}}}, "yaml.scales.small.draws_data: "),
    ):
        other.write_text(yaml.safe_dump({**laid, **wrong}))
        with pytest.raises(UsageError, match=message):
            load_study(str(other))


def test_studies_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps").mkdir()
    write(tmp_path / "sweeps")
    assert find_study("tiny") == tmp_path / "sweeps" / "tiny.yaml"
    assert find_study("ablation") == REPOSITORY / "sweeps" / "ablation.yaml"
    with pytest.raises(UsageError, match="did you mean ablation"):
        find_study("ablatoin")
    with pytest.raises(UsageError, match=r"no file nowhere\.yaml"):
        find_study("nowhere.yaml")


def test_experiment_is_found_by_name_and_by_folder(tmp_path, monkeypatch):
    """Cells of the working tree's experiments: experiments/test_studies.py."""
    (tmp_path / "experiments/mine").mkdir(parents=True)
    study = tmp_path / "experiments/mine/study.yaml"
    study.write_text("name: mine\nlike: ablation\n")
    monkeypatch.chdir(tmp_path)
    assert find_study("mine") == study
    for given in ("experiments/mine", "experiments/mine/"):
        assert find_study(given) == Path("experiments/mine/study.yaml")
    assert (place_of(study).as_posix(), load_study("mine").name) == ("experiments/mine/study.yaml", "mine")
    with pytest.raises(UsageError, match="no file experiments/yours"):
        find_study("experiments/yours")


def test_study_of_the_paper_hides_an_experiment_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "experiments/ablation").mkdir(parents=True)
    (tmp_path / "experiments/ablation/study.yaml").write_text("name: other\nlike: ablation\n")
    monkeypatch.chdir(tmp_path)
    assert place_of(find_study("ablation")).as_posix() == "sweeps/ablation.yaml"
    assert load_study("experiments/ablation").name == "other"
    names = list(known_studies())
    assert names.index("grid") < names.index("carried")


@pytest.fixture(scope="module")
def ablation():
    return load_study(str(REPOSITORY / "sweeps" / "ablation.yaml"))


class TestAblation:
    def test_each_row_takes_away_the_part_of_its_name(self, ablation):
        cells = expand(ablation, "workstation", seeds=[0])
        models = {cell.row: flatten(cell.config.model.model_dump()) for cell in cells}
        lmm = models["LMM"]
        assert (lmm["variant"], lmm["memory.depth"] > 1) == ("lmm", True)
        assert all(lmm[f"memory.{part}"] for part in ("conv", "momentum", "decay"))
        assert lmm["persistent_tokens"] > 0
        differs = lambda model: {key: value for key, value in model.items() if lmm.get(key) != value}  # noqa: E731
        hybrid = {"mlp_expansion": 4 / 3}
        plain = {"variant": "transformer", "attention.window": None, "mlp_expansion": 3.5}
        assert {row: differs(model) for row, model in models.items()} == {
            **{f"+ Attn ({name.upper()})": hybrid | {"variant": name} for name in ("mac", "mag", "mal")},
            "LMM": {}, "Linear Memory": {"memory.depth": 1},
            "w/o Convolution": {"memory.conv": False, "attention.conv": False},
            "w/o Momentum": {"memory.momentum": False}, "w/o Weight Decay": {"memory.decay": False},
            "w/o Persistent Memory": {"persistent_tokens": 0}, "Transformer++": plain,
            "Transformer++ with convolution": plain | {"options.projections": "titans"},
            "w/o Momentum, doubled step": {"memory.momentum": False, "memory.max_theta": 1.0},
            "Linear Memory, equal state": {"memory.depth": 1, "memory.heads": 1},
            "LMM, hybrids' feed-forward": hybrid,
        }  # fmt: skip

    @pytest.mark.parametrize("scale", ["smoke", "workstation", "overnight", "170M", "340M", "400M", "760M"])
    def test_linear_control_has_the_deep_memorys_state_and_parameters(self, ablation, scale):
        configs = {cell.row: cell.config for cell in expand(ablation, scale)}
        rows = [configs[name].model.model_copy(update={"n_layers": 1}) for name in (FIRST, EQUAL)]
        with torch.device("meta"):
            deep, linear = map(LanguageModel, rows)
        length = configs[FIRST].data.sequence_length
        assert linear.state_bytes(length) == pytest.approx(deep.state_bytes(length), rel=0.01)
        assert linear.num_parameters() == pytest.approx(deep.num_parameters(), rel=0.01)

    def test_row_of_a_paper_scale_is_the_preset_of_its_variant(self, ablation):
        models = {cell.row: cell.config.model for cell in expand(ablation, "340M")}
        assert (models["LMM"], models["+ Attn (MAG)"]) == (preset("340M"), preset("340M", "mag"))
        assert models["Transformer++"] == preset("340M", "transformer")
        assert models["Linear Memory"].memory.depth == 1

    def test_paper_scales_train_on_the_papers_tokens(self, ablation):
        for scale, tokens in {"170M": 15e9, "340M": 15e9, "400M": 15e9, "760M": 30e9}.items():
            config = expand(ablation, scale)[0].config
            assert (config.tokens, config.data.sequence_length) == (pytest.approx(tokens, rel=0.06), 4096)
            assert (config.optim.lr, config.optim.weight_decay) == (4e-4, 0.1)
