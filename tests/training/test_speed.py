"""Step speed: FLOP counts, model FLOPs utilisation, profiler traces."""

import gzip
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.training.small import trainer
from titans_core.presets import preset
from titans_kernels import forms_used
from titans_platform.config import RunConfig
from titans_platform.objectives import build_objective
from titans_platform.runs.check import training_flops
from titans_platform.training import parallel
from titans_platform.training.loop import Hooks


def run_of(variant: str, layers: int = 3, length: int = 64) -> RunConfig:
    model = preset("smoke", variant, vocab_size=260).model_dump(mode="json") | {"n_layers": layers}
    values = {"model": model, "data": {"sequence_length": length}}
    return RunConfig.model_validate_json(json.dumps(values))


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal", "transformer", "retnet"])
def test_counted_operations_are_those_of_the_whole_model_forward_and_backward(variant):
    cfg = run_of(variant)
    objective = build_objective(cfg)
    with torch.device("meta"):
        model = objective.build_model()
    batch = objective.sample_batch(1)
    forms_used(forget=True)
    with FlopCounterMode(display=False) as counter:
        objective.losses(model, type(batch)(*(part.to("meta") for part in batch))).sum().backward()
    assert training_flops(cfg) == pytest.approx(counter.get_total_flops(), rel=0.03)
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
    monkeypatch.setattr(
        "titans_platform.training.loop.device_metrics", lambda _, rate: given.append(rate) or {}
    )
    t = trainer()
    t.flops_per_token = 100.0
    t.run(Hooks(on_step=lambda step, metrics: rates.append(100 * metrics["tokens_per_second"])), until=2)
    assert given == pytest.approx(rates)


def test_trace_is_of_three_steps(tmp_path):
    path = tmp_path / "profile" / "worker-0.json.gz"
    with parallel.profiled(path) as stepped:
        trainer(steps=10).run(Hooks(on_step=lambda step, metrics: stepped()))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"}
