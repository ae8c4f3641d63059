"""`TitansForCausalLM`: each argument is honoured as `LlamaForCausalLM` honours it, or refused."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint

from tests.core.small import config, tokens
from titans_core.pretrained import load_folder, save_folder

transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("titans_core.huggingface")

VARIANTS = ["lmm", "mac", "mag", "transformer", "gated_deltanet"]
LENGTHS = [21, 8, 33, 1, 16]
IGNORED = -100


def titans(variant="lmm", tied=False, **memory):
    torch.manual_seed(0)
    about = config(variant, **memory).model_copy(update={"tie_embeddings": tied})
    fields = about.model_dump(mode="json", exclude_defaults=True)
    return huggingface.TitansForCausalLM(huggingface.TitansConfig(titans=fields)).double().eval()


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **sizes)).double().eval()


MODELS = {variant: partial(titans, variant) for variant in VARIANTS} | {"llama": llama}
each_model = pytest.mark.parametrize("name", MODELS)
each_variant = pytest.mark.parametrize("variant", VARIANTS)
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def rows(lengths=LENGTHS):
    return [tokens(1, length, seed)[0] for seed, length in enumerate(lengths)]


def padded(sequences, side="right", pad=39):
    """Tokens, mask and labels [B, T]; labels are -100 at padding and at the first token."""
    width, batch = max(map(len, sequences)), {"input_ids": [], "attention_mask": [], "labels": []}
    for row in sequences:
        gap = [0, width - len(row)][:: 1 if side == "right" else -1]
        labels = torch.cat([torch.tensor([IGNORED]), row[1:]])
        for key, x, fill in zip(batch, (row, torch.ones_like(row), labels), (pad, 0, IGNORED), strict=True):
            batch[key].append(torch.nn.functional.pad(x, gap, value=fill))
    return {key: torch.stack(x) for key, x in batch.items()}


def real_tokens(x, mask):
    return [row[kept.bool()] for row, kept in zip(x, mask, strict=True)]


# padding


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("use_cache", [False, True])
@each_variant
def test_padded_rows_equal_rows_alone(variant, use_cache, side):
    net, batch = titans(variant), padded(rows(), side)
    out = net(**batch, use_cache=use_cache)
    losses, logits = [], real_tokens(out.logits, batch["attention_mask"])
    for row, ours in zip(rows(), logits, strict=True):
        alone = net(row[None])
        close(ours, alone.logits[0])
        losses.append(torch.nn.functional.cross_entropy(alone.logits[0, :-1], row[1:], reduction="sum"))
    # transformers computes losses in float32
    close(out.loss.double(), sum(losses) / (sum(LENGTHS) - len(LENGTHS)), rtol=1e-6, atol=1e-6)


def test_masked_tokens_are_not_read_and_labels_after_padding_no_targets():
    net, (row,) = titans("mac"), rows([40])
    kept = torch.rand(40, generator=torch.Generator().manual_seed(3)) < 0.6
    kept[0] = True
    out = net(row[None], attention_mask=kept[None].long())
    close(out.logits[0, kept], net(row[kept][None]).logits[0])
    close(out.logits[0], out.logits[0, torch.arange(40).masked_fill(~kept, 0).cummax(0).values])
    batch, net = padded(rows(), "left"), titans()
    first, labels = batch["attention_mask"].argmax(1), batch["labels"].clone()
    labels[torch.arange(len(first)), first] = batch["input_ids"][torch.arange(len(first)), first]
    labels[:, 0] = IGNORED
    assert torch.equal(net(**batch | {"labels": labels}).loss, net(**batch).loss)


@pytest.mark.parametrize("side", ["right", "left"])
@each_variant
def test_padded_batch_continues_from_its_states(variant, side):
    net, batch, more = titans(variant), padded(rows(), side), tokens(len(LENGTHS), 7, 99)
    first = net(batch["input_ids"], batch["attention_mask"])
    mask, state = torch.cat([batch["attention_mask"], torch.ones_like(more)], 1), first.past_key_values
    assert (state.get_seq_length(), state.positions()) == (max(LENGTHS), LENGTHS)
    state.reorder_cache(beams := torch.tensor([2, 2, 0, 4, 1]))
    second = net(more, mask[beams], past_key_values=state)
    for row, old in enumerate(beams.tolist()):
        close(second.logits[row], net(torch.cat([rows()[old], more[row]])[None]).logits[0, -7:])


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"use_cache": False}, {"num_beams": 2, "num_return_sequences": 2}]
)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("variant", ["mac", "transformer"])
def test_generation_from_prompts_of_different_lengths_equals_each_alone(variant, side, options):
    net, lengths = titans(variant), [21, 8, 1]
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 39, **options}
    batch = padded(rows(lengths), side)
    del batch["labels"]
    together = net.generate(**batch, **options)[:, max(lengths) :].unflatten(0, (len(lengths), -1))
    for row, texts in zip(rows(lengths), together, strict=True):
        alone = net.generate(row[None], attention_mask=torch.ones_like(row)[None], **options)
        assert torch.equal(alone[:, len(row) :], texts)


# packed documents


def packings(lengths):
    """Ways of transformers to say where documents begin."""
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    lens = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 33, "max_length_k": 33}
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(torch.int32)
    running = torch.arange(sum(lengths))[None]
    return {
        "position_ids": {"position_ids": position}, "from two": {"position_ids": position + 2},
        "borders": lens, "borders and positions": {"position_ids": position, **lens},
        "borders and running positions": {"position_ids": running, **lens}, "index": {"seq_idx": index},
    }  # fmt: skip


@pytest.mark.parametrize("way", packings([1]))
@each_variant
def test_packed_documents_equal_documents_alone(variant, way):
    net, packed = titans(variant), torch.cat(rows())[None]
    out = net(packed, **packings(LENGTHS)[way])
    assert out.past_key_values is None
    for row, ours in zip(rows(), out.logits[0].split(LENGTHS), strict=True):
        close(ours, net(row[None]).logits[0])


def test_packed_rows_may_be_padded_or_come_from_the_collator_of_transformers():
    net, lengths = titans("mac"), [[9, 12], [30], [5, 5, 5]]
    texts = [torch.cat([tokens(1, n, n + i)[0] for i, n in enumerate(row)]) for row in lengths]
    places = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    for side in ("left", "right"):
        batch, position = padded(texts, side), padded(places, side, 0)["input_ids"]
        out = net(batch["input_ids"], batch["attention_mask"], position)
        for i, ours in enumerate(real_tokens(out.logits, batch["attention_mask"])):
            close(ours, torch.cat([net(part[None]).logits[0] for part in texts[i].split(lengths[i])]))
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    texts = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows()]
    net, batch = titans("lmm"), padded(rows())
    close(net(**collator(texts)).loss, net(**batch).loss, rtol=1e-6, atol=1e-6)


@each_model
def test_positions_that_rise_by_one_change_nothing(name):
    net, x = MODELS[name](), tokens(2, 20)
    expected = net(x).logits
    for position in (torch.arange(20)[None], torch.arange(20).expand(2, 20), torch.arange(3, 23)[None]):
        close(net(x, position_ids=position).logits, expected, rtol=1e-6, atol=1e-6)
    first = net(x[:, :11], use_cache=True)
    rest = net(x[:, 11:], position_ids=torch.arange(11, 20)[None], past_key_values=first.past_key_values)
    close(rest.logits, expected[:, 11:])


# arguments that cannot be honoured


REFUSED = {
    "misspelt": ({"lables": tokens(2, 6)}, TypeError, "lables"),
    "bidirectional": ({"is_causal": False}, TypeError, "is_causal"),
    "attentions": ({"output_attentions": True}, ValueError, "output_attentions: "),
    "positions that jump": ({"position_ids": torch.arange(6)[None] ** 2}, ValueError, "do not rise by 1"),
    "positions too short": ({"position_ids": torch.arange(5)[None]}, ValueError, r"position_ids: \[1, 5\]"),
    "labels too short": ({"labels": tokens(2, 5)}, ValueError, r"labels: \[2, 5\], not \[2, 6\]"),
    "labels as probabilities": ({"labels": torch.rand(2, 6)}, ValueError, "labels: torch.float32"),
    "mask too long": ({"attention_mask": torch.ones(2, 7)}, ValueError, r"attention_mask: \[2, 7\]"),
    "mask of pairs": ({"attention_mask": torch.ones(2, 1, 6, 6)}, ValueError, "attention_mask: "),
    "mask of documents": ({"attention_mask": 1 + tokens(2, 6)}, ValueError, "position_ids"),
    "no input": ({"input_ids": None}, ValueError, "input_ids, inputs_embeds: give one"),
    "both inputs": ({"inputs_embeds": torch.rand(2, 6, 16)}, ValueError, "give one"),
    "one row without a batch": ({"input_ids": tokens(1, 6)[0]}, ValueError, r"input_ids: \[6\]"),
    "logits below 0": ({"logits_to_keep": -2}, ValueError, "logits_to_keep: -2"),
    "logits by a mask": ({"logits_to_keep": torch.ones(2, 6) > 0}, ValueError, "logits_to_keep: "),
    "packed for a state": ({"seq_idx": torch.arange(12).view(2, 6), "use_cache": True}, ValueError, "leave"),
    "a cache of theirs": ({"past_key_values": transformers.DynamicCache()}, ValueError, "a DynamicCache"),
    "borders cut short": ({"cu_seq_lens_q": torch.tensor([0, 4])}, ValueError, "cu_seq_lens_q: "),
    "borders of keys": ({"cu_seq_lens_k": torch.tensor([0, 12])}, ValueError, "cu_seq_lens_k: "),
    "index of other tokens": ({"seq_idx": tokens(2, 5)}, ValueError, "seq_idx: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_argument_that_cannot_be_honoured_is_refused_in_one_line(name):
    arguments, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as caught:
        titans()(**{"input_ids": tokens(2, 6), **arguments})
    assert "\n" not in str(caught.value)


def test_state_that_does_not_fit_the_mask_or_positions_is_refused():
    net, x = titans(), tokens(2, 6)
    past, mask = net(x, use_cache=True).past_key_values, torch.ones(2, 12)
    mask[1, 2] = 0
    with pytest.raises(ValueError, match="past_key_values: a state of 2 rows, not 3"):
        net(tokens(3, 6), past_key_values=past)
    with pytest.raises(ValueError, match="attention_mask: of earlier tokens"):
        net(x, mask, past_key_values=past)
    with pytest.raises(ValueError, match="position_ids: begin at"):
        net(x, position_ids=torch.arange(6)[None], past_key_values=past)
    with pytest.raises(ValueError, match="packed documents leave no state"):
        net(x, position_ids=torch.tensor([[6, 7, 8, 0, 1, 2]]), past_key_values=past)


# outputs


@each_model
def test_outputs_have_the_form_of_transformers(name):
    net, x = MODELS[name](), tokens(2, 9)
    out = net(x, labels=x, use_cache=False)
    loss, logits = net(x, labels=x, use_cache=False, return_dict=False)
    assert torch.equal(loss, out.loss)
    assert torch.equal(logits, out.logits)
    if name == "llama":  # it fails then in 5.23
        return
    net.config.return_dict = False
    assert isinstance(net(x), tuple)
    assert torch.equal(net(x, return_dict=True).logits, net(x)[0])


@each_model
@pytest.mark.parametrize("keep", [0, 1, 3, 50, torch.tensor([0, 4, 8])])
def test_logits_to_keep_selects_logits_and_the_loss_has_all_labels(name, keep):
    net, x = MODELS[name](), tokens(2, 9)
    whole = net(x, labels=x)
    rows = keep if isinstance(keep, torch.Tensor) else slice(-keep, None)
    close(net(x, logits_to_keep=keep).logits, whole.logits[:, rows])
    if name != "llama":
        assert torch.equal(net(x, labels=x, logits_to_keep=keep).loss, whole.loss)


@each_model
@pytest.mark.parametrize("cached", [False, True])
def test_hidden_states_are_the_embedding_and_every_block(name, cached):
    net, batch = MODELS[name](), padded(rows([12, 7]))
    del batch["labels"]
    out = net(**batch, output_hidden_states=True, use_cache=cached)
    assert [h.shape for h in out.hidden_states] == [(2, 12, 16)] * 3
    close(net.get_output_embeddings()(out.hidden_states[-1]), out.logits)
    scale = 1.0 if name == "llama" else 4.0
    close(out.hidden_states[0][0], scale * net.get_input_embeddings()(batch["input_ids"])[0])
    net.config.output_hidden_states = True
    assert len(net(**batch).hidden_states) == 3


@each_model
def test_num_items_in_batch_divides_losses_and_embeddings_replace_tokens(name):
    net, batch = MODELS[name](), padded(rows())
    count = sum(LENGTHS) - len(LENGTHS)
    few = {"num_items_in_batch": torch.tensor(count)}
    parts = [net(**padded([row]), **few).loss for row in rows() if len(row) > 1]
    close(sum(parts), net(**batch).loss, rtol=1e-5, atol=1e-6)
    close(net(**batch, num_items_in_batch=7).loss, net(**batch).loss * count / 7, rtol=1e-5, atol=1e-6)
    x = tokens(2, 9)
    close(net(inputs_embeds=net.get_input_embeddings()(x)).logits, net(x).logits)


# transformers' own methods


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("size", "options", "resized"), [
    (45, {}, 45), (33, {}, 33), (40, {}, 40), (45, {"mean_resizing": False}, 45),
    (41, {"pad_to_multiple_of": 16}, 48),
])  # fmt: skip
def test_resized_embeddings_train_save_and_load(size, options, resized, tied, tmp_path):
    auto = transformers.AutoModelForCausalLM
    save_folder(tmp_path / "a", titans("mac", tied).model)
    net, x, n = auto.from_pretrained(tmp_path / "a"), tokens(2, 12) % 30, min(40, resized)
    with torch.no_grad():
        before = net(x).logits
    net.resize_token_embeddings(size, **options)
    out = net(x, labels=x)
    close(out.logits[..., :n], before[..., :n], rtol=1e-4, atol=1e-4)
    assert (net.get_input_embeddings().weight is net.get_output_embeddings().weight) == tied
    assert out.logits.shape[-1] == net.config.vocab_size == net.model.config.vocab_size == resized
    assert net.get_input_embeddings().weight.std() < 0.5
    out.loss.backward()
    net(torch.full((1, 3), resized - 1))
    net.save_pretrained(tmp_path / "b", max_shard_size="9KB" if tied else "9MB")
    for again in (load_folder(tmp_path / "b"), auto.from_pretrained(tmp_path / "b")):
        assert torch.equal(again(x).logits, out.logits)
    assert len(net.generate(x, max_new_tokens=3, do_sample=False)[0]) == 15


@pytest.mark.parametrize("how", [{}, {"use_reentrant": True}, {"use_reentrant": False}])
@each_variant
def test_activation_checkpointing_gives_the_same_gradients(variant, how):
    x = tokens(2, 20)
    (net := titans(variant)).train()(x, labels=x).loss.backward()
    again, calls = titans(variant).train(), []
    again.activation_checkpointing_enable(how or None)
    assert again.gradient_checkpointing
    for block in again.model.blocks:
        func = block.checkpoint
        block.checkpoint = lambda *args, func=func: calls.append(1) or func(*args)
    again(x, labels=x).loss.backward()
    assert len(calls) == 2
    for (name, p), q in zip(net.named_parameters(), again.parameters(), strict=True):
        close(q.grad, p.grad, msg=name)
    again.activation_checkpointing_disable()
    again(x)
    assert len(calls) == 2


def test_checkpointing_of_every_second_block_and_contradicting_configs(tmp_path):
    net = titans()
    net._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False), every_n_layers=2)
    assert [block.recompute for block in net.model.blocks] == [True, False]
    save_folder(tmp_path, titans().model)
    with pytest.raises(ValueError, match="vocab_size: 50 contradicts the config's titans: 40"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, vocab_size=50)
    about = huggingface.TitansConfig(titans={"d_model": 24, "n_layers": 3})
    assert (about.hidden_size, about.num_hidden_layers) == (24, 3)


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_folder_without_a_weight_or_with_another_shape_is_refused(change, tmp_path):
    auto, name = transformers.AutoModelForCausalLM, "model.blocks.1.memory.eta.bias"
    titans().save_pretrained(tmp_path)
    _, about = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not about["missing_keys"]
    weights = load_file(tmp_path / "model.safetensors")
    bias = weights.pop(name)
    if change == "shape":
        weights[name] = bias[:1]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"1 of them, the first is {name}"):
        auto.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
