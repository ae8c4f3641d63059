"""A config's mistakes, each one line that names the field and the fix."""

import pytest

from titans_core.config import ModelConfig
from titans_core.presets import preset
from titans_platform.config import RunConfig
from titans_platform.data import load_tokenizer
from titans_platform.errors import UsageError
from titans_platform.loading import apply_override, load_config, parse_yaml, read_yaml

CORPUS = "data: {sources: [{kind: corpus, weight: 2}]}"


def load(tmp_path, text: str = "seed: 0", *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_file_overrides_and_presets_precede_defaults(tmp_path):
    cfg = load(
        tmp_path, "model: {memory: {depth: 3}}\noptim: {lr: 4e-4}\n" + CORPUS, "model.memory.depth=1",
        "model.memory.momentum=false", "data.sources.0.weight=0.5", "data.sources.0.max_tokens=7",
        "optim.grad_clip=null", "eval.columns={x: [{task: recall, lengths: [1, 2]}]}",
        "optim.weight_decay=1e-2",
    )  # fmt: skip
    assert (cfg.model.memory.depth, cfg.model.memory.momentum) == (1, False)
    assert (cfg.optim.lr, cfg.optim.weight_decay, cfg.optim.grad_clip) == (4e-4, 1e-2, None)
    assert (cfg.data.sources[0].weight, cfg.data.sources[0].max_tokens) == (0.5, 7)
    assert cfg.eval.columns["x"][0].lengths == (1, 2)
    assert cfg.optim.steps == RunConfig().optim.steps
    text = "model: {preset: laptop, variant: mac, memory: {depth: 3}}"
    expected = preset("laptop", variant="mac").model_dump()
    expected["memory"]["depth"] = 3
    assert load(tmp_path, text).model == ModelConfig(**expected)
    assert load(tmp_path, text, "model.preset=smoke").model.d_model == preset("smoke").d_model
    with pytest.raises(UsageError, match=r"^model\.preset: no preset 'labtop'; did you mean laptop\?$"):
        load(tmp_path, "model: {preset: labtop}")


def test_missing_fields_sections_and_vocabularies_are_defaults(tmp_path):
    defaults = RunConfig()
    model = defaults.model.model_copy(update={"vocab_size": load_tokenizer("byte").vocab_size})
    assert load(tmp_path) == defaults.model_copy(update={"model": model})
    assert load(tmp_path, "model:\n  memory:\n  attention:\noptim:\n") == load(tmp_path)
    with pytest.raises(UsageError, match=r"^data\.sources: should be"):
        load(tmp_path, "data:\n  sources:\n")
    assert load(tmp_path, "model: {vocab_size: 512}").model.vocab_size == 512
    assert load(tmp_path, "data: {tokenizer: some.model}").model == RunConfig().model
    assert load(tmp_path, "model: {preset: 170M}\ndata: {tokenizer: a.json}").model.vocab_size == 32_000


@pytest.mark.parametrize(("text", "line"), [
    ("model: {memory: {dept: 2}}", "model.memory.dept: unknown key; did you mean depth?"),
    ("modle: {}", "modle: unknown key; did you mean model?"),
    ("eval: {columns: {a: [{task: x, lenghts: [1]}]}}",
     "eval.columns.a.0.lenghts: unknown key; did you mean lengths?"),
    ("model: {memory: {depth: 0}}", "model.memory.depth: should be greater than or equal to 1, got 0"),
    ("model: {memory: {depth: '2'}}", 'model.memory.depth: should be a valid integer, got "2"'),
    ("model: {memory: {conv: maybe}}",
     'model.memory.conv: should be a width in tokens, or false for no convolution, got "maybe"'),
    ("model: 3", "model: should be an object, got 3"), ("model: [1]", "model: should be an object, got [1]"),
    ("data: 3\nmodel: {preset: smoke}", "data: should be an object, got 3"),
    ("data: {sources: []}", "data.sources: should have at least 1 item, got []"),
    ("seed: 1.5\nthreads: 0", "seed: should be a valid integer, got 1.5 (and 1 more)"),
    ("data: {sources: [{kind: files}]}", "data.sources.0.path: missing; a source of kind files needs it"),
    ("data: {sources: [{kind: corpus, path: book.txt}]}",
     "data.sources.0.path: a source of kind corpus has none; leave it out"),
    ("data: {sources: [{kind: web}]}",
     "data.sources.0.kind: should be 'corpus', 'files', 'hub' or 'task', got \"web\""),
    ("data: {sources: [{weight: 1}]}", "data.sources.0.kind: missing; the config must set it"),
    ("data: {sources: [{knd: corpus}]}", "data.sources.0.knd: unknown key; did you mean kind?"),
    ("optim: {lr: .nan}", "optim.lr: .nan and .inf are not allowed; give a finite number"),
    ("a: [", "{path}: line 1 not valid YAML: did not find expected node content"),
    ("seed: 1\nseed: 2", "{path}: line 2 not valid YAML: key 'seed' is written twice"),
    ("- 1", "{path}: should hold a mapping of keys to values, found a list"),
])  # fmt: skip
def test_mistake_is_one_line(tmp_path, text, line):
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert str(caught.value) == line.replace("{path}", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(("override", "line"), [
    ("model.memory.dept=2", "model.memory.dept: unknown key; did you mean depth?"),
    ("model", "--set model: should be key=value"),
    ("model..d_model=2", "--set model..d_model=2: should be key=value"),
    ("seed.x=1", "--set seed.x: seed is a value, not a section"),
    ("data.sources.1.rows=3",
     "--set data.sources.1.rows: data.sources is a list of length 1; give an index from 0"),
    ("data.sources.first=3", "data.sources is a list of length 1"),
    ("eval.columns.0.task=x", "--set eval.columns.0.task: the config file has no list at eval.columns"),
    ("seed=[1", "--set seed: line 1 not valid YAML"),
])  # fmt: skip
def test_wrong_override_is_one_line(tmp_path, override, line):
    with pytest.raises(UsageError) as caught:
        load(tmp_path, "seed: 1\n" + CORPUS, override)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_empty_file_folder_or_binary_is_refused(tmp_path):
    """Its defaults are a model of the paper's vocabulary, not what somebody who writes nothing wants."""
    (tmp_path / "x.yaml").write_text("# nothing\n")
    with pytest.raises(UsageError, match=r"x\.yaml: is empty; `titans init .*` writes a run file$"):
        load_config(tmp_path / "x.yaml")
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "x.yaml"):
        with pytest.raises(UsageError, match="cannot be read"):
            load_config(path)


def test_overrides_make_mappings_keys_are_text_and_missing_files_are_guessed(tmp_path):
    mapping: dict = {"a": None, "items": [{"b": 1}]}
    for override in ("a.b.c=1", "items.0.b=2", "x=a=b"):
        apply_override(mapping, override)
    assert mapping == {"a": {"b": {"c": 1}}, "items": [{"b": 2}], "x": "a=b"}
    assert parse_yaml("{8: 1, 6e-3: 2, 0.5: 3}", "here") == {"8": 1, "6e-3": 2, "0.5": 3}
    (tmp_path / "origin.json").write_text("{}")
    with pytest.raises(UsageError, match=r"config\.json: no such file$"):
        read_yaml(tmp_path / "config.json")
    (tmp_path / "run.yaml").write_text("seed: 1")
    with pytest.raises(UsageError, match=r"did you mean .*run\.yaml\?"):
        read_yaml(tmp_path / "runn.yml")
