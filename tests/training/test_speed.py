"""Step speed: FLOP counts, model FLOPs utilisation, profiler traces."""

import gzip
import json

import pytest
import torch

from tests.training.small import trainer
from titans_core import LanguageModel
from titans_core.presets import preset
from titans_kernels import forms_used
from titans_kernels.bench.shapes import flops
from titans_platform.config import OptimConfig, RunConfig
from titans_platform.objectives import build_objective
from titans_platform.runs.check import training_flops
from titans_platform.training import parallel
from titans_platform.training.loop import Hooks


@pytest.mark.parametrize(("variant", "keys", "twice"), [
    ("lmm", 0, 0), ("mac", 2 * 32, 5), ("mag", 32, 0), ("mal", 32, 0), ("transformer", 256, 0),
])  # fmt: skip
def test_operations_are_six_a_weight_attention_to_its_window_and_the_memory(variant, keys, twice):
    """MAC's segments of 32 see tokens and reads, which pass through five matrices again."""
    model = preset("smoke", variant, vocab_size=260).model_dump(mode="json") | {"n_layers": 2}
    cfg = RunConfig.model_validate_json(json.dumps({"model": model, "data": {"sequence_length": 256}}))
    model = build_objective(cfg).build_model()
    width, heads = cfg.model.d_model, cfg.model.memory.heads
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2) + twice * width**2 * 2
    memory = 2 * [(width // heads, width // heads)] if variant != "transformer" else []
    forms_used(forget=True)
    each = 2 * (4 * keys * width + heads * flops(memory, cfg.model.memory.chunk_size)["forward"])
    assert training_flops(cfg) == pytest.approx(256 * 3 * (2 * weights + each), rel=0.03)
    # counted from shapes: no operator has run
    assert forms_used() == []


def test_use_of_a_gpu_is_its_share_of_the_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    for name, share in (("NVIDIA H100 80GB HBM3", {"mfu": 0.4}), ("a card of tomorrow", {})):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        metrics = parallel.device_metrics(torch.device("cuda"), 0.4 * 989e12)
        assert metrics == pytest.approx({"memory_gib": 3, "tflops": 395.6} | share)
    assert parallel.device_metrics(torch.device("cuda"), None) == {"memory_gib": 3}
    assert parallel.device_metrics(torch.device("cpu"), 1e9) == {}
    # the rate of operations is the model's operations a token times the tokens a second
    given: list[float | None] = []
    rates: list[float] = []
    metrics = "titans_platform.training.loop.device_metrics"
    monkeypatch.setattr(metrics, lambda _, rate: given.append(rate) or {})
    t = trainer()
    t.flops_per_token = 100.0
    t.run(Hooks(on_step=lambda step, metrics: rates.append(100 * metrics["tokens_per_second"])), until=2)
    assert given == pytest.approx(rates)


def test_blocks_on_a_gpu_are_compiled_and_recompute_what_a_plan_of_their_memory_assumes(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module.recompute))
    parallel.parallelize(LanguageModel(preset("smoke", "lmm")), OptimConfig(), torch.device("cuda"))
    assert set(compiled) == {"selective"}


def test_trace_is_of_three_steps(tmp_path):
    path = tmp_path / "profile" / "worker-0.json.gz"
    with parallel.profiled(path) as stepped:
        trainer(steps=10).run(Hooks(on_step=lambda step, metrics: stepped()))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"}
