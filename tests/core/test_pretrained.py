"""Hugging Face export: logits survive the round trip, and `generate` of transformers works."""

import pytest
import torch

from tests.core.small import VARIANTS, model, tokens
from titans_core.pretrained import load_folder, save_folder

SPECIAL = {"bos_token_id": 38, "eos_token_id": 38, "pad_token_id": 39}


@pytest.mark.parametrize(("name", "content", "says"), [
    ("config.json", None, "No such file"), ("config.json", "{", "Expecting"),
    ("config.json", '{"model_type": "llama"}', "model_type is llama, not titans"),
    ("config.json", '{"model_type": "titans", "titans": {"d_model": 0}}', r"titans\.d_model: "),
    ("config.json", '{"model_type": "titans", "titans": {"variant": "mlp"}}', "variant: "),
    ("model.safetensors", None, "No such file"), ("model.safetensors", "cut", ""),
])  # fmt: skip
def test_what_is_no_such_folder_is_one_line(name, content, says, tmp_path):
    save_folder(tmp_path, model("lmm"))
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"not a saved Titans model: .*{says}") as caught:
        load_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_loads_it_with_the_same_logits_and_text(variant, tmp_path):
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    assert pytest.importorskip("titans_core.huggingface").MODEL_TYPE == "titans"
    m, x = model(variant), tokens(2, 21) % 38  # transformers treats every pad token as padding
    save_folder(tmp_path, m, SPECIAL)
    back, loaded = load_folder(tmp_path), auto.from_pretrained(tmp_path, dtype=torch.float64)
    assert (back.config, loaded.config.bos_token_id) == (m.config, 38)
    for again in (back, loaded):
        assert torch.equal(again(x).logits, m(x).logits)
    expected = torch.tensor(m.generate(x.tolist(), 9))
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    assert torch.equal(loaded.generate(x, **options)[:, 21:], expected)
    assert torch.equal(loaded.generate(x, use_cache=False, **options)[:, 21:], expected)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(load_folder(tmp_path / "again")(x).logits, m(x).logits)
