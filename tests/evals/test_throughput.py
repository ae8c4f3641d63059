"""Throughput and the held-out loss, measured on a real model."""

import json
import math

import pytest
import torch

from titans_core import LanguageModel
from titans_platform.config import DataConfig, EvalConfig, RunConfig, TaskConfig
from titans_platform.data import prepare
from titans_platform.evals import evaluate


@pytest.fixture
def measured(tiny_run: RunConfig, tmp_path):
    (tmp_path / "texts").mkdir()
    for part in range(20):
        (tmp_path / "texts" / f"{part}.txt").write_text(f"text number {part}; " * 40)
    source = {"kind": "files", "path": str(tmp_path / "texts"), "validation_fraction": 0.3}
    fields = tiny_run.data.model_dump(mode="json") | {"sources": [source]}
    data = prepare(DataConfig.model_validate_json(json.dumps(fields)), tmp_path)
    torch.manual_seed(0)
    model = LanguageModel(tiny_run.model)
    speed = TaskConfig(task="throughput", options={"rows": 2, "repeats": 2}, lengths=(1.0, 2.0))
    columns = {"speed": (speed,), "ppl": (TaskConfig(task="perplexity"),), "loss": (TaskConfig(task="loss"),)}
    return model, evaluate(model, data, EvalConfig(columns=columns, perplexity_tokens=512), 32)


def test_throughput_is_a_rate_without_gradients_and_loss_the_logarithm_of_perplexity(measured):
    model, result = measured
    assert result["columns"]["speed"] > 10
    assert result["chance"]["speed"] is None
    speeds = {key for key in result["tasks"] if key.startswith("speed")}
    assert speeds == {"speed/throughput@32", "speed/throughput@64"}
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    _, result = measured
    for part in ("columns", "chance"):
        assert result[part]["loss"] == pytest.approx(math.log(result[part]["ppl"]))
    assert 0 < result["tasks"]["loss/loss@32"]["stderr"] < 1
