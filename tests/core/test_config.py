"""Configs: size presets, parameter counts without building a model, rejected values."""

import json
import time

import pytest
import torch

from tests.core.small import VARIANTS, config, model, tokens
from titans_core import AttentionConfig, LanguageModel, MemoryConfig, ModelConfig, count_parameters, presets
from titans_kernels import supports


def test_windows_variants_and_mixed_calls_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"attention\.window: variant mac attends to whole segments"):
        LanguageModel(ModelConfig(variant="mac", attention=AttentionConfig(window=32, segment_size=64)))
    with pytest.raises(ValueError, match="variant: 'mlp' is not one of lmm"):
        LanguageModel(ModelConfig(variant="mlp"))
    m = model()
    state = m(tokens(1, 5)).state
    with pytest.raises(ValueError, match="document_starts"):
        m(tokens(1, 5), state, document_starts=torch.zeros(1, 5, dtype=torch.bool))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", ["170M", "340M", "400M", "760M"])
def test_presets_have_the_parameters_of_their_name(size, variant):
    # which the next test holds to the model's own count
    assert count_parameters(presets.preset(size, variant)) == pytest.approx(float(size[:-1]) * 1e6, rel=0.03)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_presets_have_kernels_on_every_gpu(arch):
    for size in presets.SIZES:
        c = presets.size_config(size)
        support = supports(c.memory, c.d_model // c.memory.heads, torch.bfloat16, arch)
        assert (support.form, support.reason) == ("triton", "")
        for gates in ("alpha", "all"):  # which the operator refuses
            switched = c.memory.model_copy(update={"channel_gates": gates, "decay": gates == "alpha"})
            assert supports(switched, 64, torch.bfloat16, arch).reason.startswith("channel_gates: no kernel")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_counted_without_the_model(variant, tied):
    c = config(variant).model_copy(update={"n_layers": 3, "tie_embeddings": tied})
    assert count_parameters(c) == LanguageModel(c).num_parameters()


@pytest.mark.parametrize(("fields", "at_least"), [
    ({"n_layers": 10**6}, 10**11), ({"d_model": 2**20}, 10**13), ({"vocab_size": 10**15}, 10**17),
    ({"d_model": 2**20, "memory": MemoryConfig(depth=1000, heads=1, expansion=64)}, 10**18),
])  # fmt: skip
def test_a_model_no_machine_can_hold_is_counted_at_once(fields, at_least):
    started = time.process_time()
    assert count_parameters(ModelConfig(**fields)) > at_least
    assert time.process_time() - started < 5


def test_fields_of_earlier_versions_load_with_their_defaults_and_are_named_with_others():
    former = {"written": "all", "head_dim": None, "conv_kernel": 4, "rule_options": {}, "depth": 3}
    assert MemoryConfig.model_validate_json(json.dumps(former)) == MemoryConfig(depth=3)
    assert MemoryConfig(conv=True).conv == 4
    assert ModelConfig(d_model=36, attention=AttentionConfig(positions="none")).attention.heads == 4
    for fields, message in (
        ({"written": "last"}, 'written: "last" was removed; CHANGELOG.md says what replaces it'),
        ({"decay_per": "channel"}, 'decay_per: "channel" was removed'),
        ({"backend": "autograd"}, "backend: autograd is now called generic"),
    ):
        with pytest.raises(ValueError, match=message):
            MemoryConfig.model_validate(fields)


def test_calls_whose_tensors_do_not_fit_are_refused():
    model, tokens = LanguageModel(ModelConfig(vocab_size=9, d_model=8, n_layers=1)), torch.zeros(2, 6).long()
    for options, message in (
        ({"document_starts": torch.zeros(2, 4, dtype=torch.bool)}, r"document_starts: \[2, 4\]"),
        ({"targets_BT": tokens.T}, r"targets_BT: \[6, 2\] is not \[2, 6\]"),
        ({"targets_BT": tokens, "last": True}, "targets_BT: losses are of all tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, **options)
