"""Adapted models of every family: the source within the window, a memory of constant size beyond it."""

import itertools
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from titans_core.config import MemoryConfig
from titans_core.memory_file import load_memory, save_memory
from titans_kernels import supports

transformers = pytest.importorskip("transformers")
adapt = pytest.importorskip("titans_core.adapt")
attention = pytest.importorskip("titans_core.adapt.attention")
keeping = pytest.importorskip("titans_core.adapt.kept")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
ROTARY = SIZES | {"num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.15}
FAMILIES = {"llama": ROTARY, "qwen2": ROTARY, "qwen3": ROTARY | {"head_dim": 16}, "gpt2": SIZES}
KINDS = {"delta": {}, "titans": {"kind": "titans"}, "kept": {"kept": 7}}
WINDOW, SINKS, LENGTH = 16, 3, 61
SHAPES = (3, 8, 6), (1, 5, 6), (1, 5, 6)
SHORT = {"window": WINDOW, "sinks": SINKS, "chunk": 8}

each_family = pytest.mark.parametrize("family", FAMILIES)
each_kind = pytest.mark.parametrize("kind", KINDS)


def source(family, **fields):
    torch.manual_seed(0)
    sizes = FAMILIES[family] | SPECIAL | {"max_position_embeddings": 256} | fields
    config = transformers.AutoConfig.for_model(family, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def adapted(family="llama", trained=True, **options):
    """An adapted model; ``trained`` has memories that matter."""
    given = SHORT | KINDS[options.pop("kind", "delta")] | options
    model = adapt.convert(source(family), adapt.MemoryOptions(**given))
    for memory in model.memories().values() if trained else ():
        for p in memory.parameters():
            p.data += 0.1 * torch.randn_like(p)
        memory.mix.bias.data.fill_(1.0)
    return model


def tokens(rows=2, length=LENGTH, seed=0):
    return torch.randint(2, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def largest(a, b):
    return (a - b).abs().max().item()


@each_kind
@each_family
@torch.no_grad()
def test_logits_within_the_window_are_the_source_s(family, kind):
    given, model, text = source(family), adapted(family, kind=kind, heads=2), tokens()
    expected, logits, near = given(text).logits, model(text).logits, WINDOW + SINKS
    assert largest(logits[:, :near], expected[:, :near]) < 1e-5
    assert largest(logits[:, near:], expected[:, near:]) > 1e-3
    assert largest(adapted(family, kind=kind, window=LENGTH)(text).logits, expected) < 1e-5
    assert largest(full := model.lm_head(encoded(model, text, "full")), expected) < 1e-5
    assert largest(model.lm_head(encoded(model, text, "transfer")), full) == 0


def encoded(model, text, far):
    return model.encode(model.get_input_embeddings()(text), attention.Pass(far=far))


@each_family
@torch.no_grad()
def test_window_without_sinks_is_the_source_under_a_mask(family):
    given, model, text = source(family, attn_implementation="eager"), adapted(family, sinks=0), tokens()
    age = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = torch.zeros(LENGTH, LENGTH).masked_fill((age < 0) | (age >= WINDOW), -torch.inf)
    expected = given(text, attention_mask=hidden.expand(2, 1, -1, -1)).logits
    assert largest(model.lm_head(encoded(model, text, "window")), expected) < 1e-4


@each_kind
@each_family
@torch.no_grad()
def test_text_read_in_pieces_is_the_text_read_at_once_and_the_state_does_not_grow(family, kind):
    model, text, state, parts, sizes = adapted(family, kind=kind), tokens(), None, [], {}
    for start, end in ((0, 5), (5, 35), *((i, i + 1) for i in range(35, LENGTH))):
        out = model(text[:, start:end], past_key_values=state, use_cache=True)
        state = out.past_key_values
        parts.append(out.logits)
        kept = (x for x in tree_leaves(state.groups[0].state.blocks) if isinstance(x, torch.Tensor))
        sizes[end] = sum(x.nbytes for x in kept)
    assert largest(torch.cat(parts, 1), model(text).logits) < 2e-5
    chunk, near = SHORT["chunk"] if kind == "titans" else 1, WINDOW + SINKS
    borders = [n for n in sizes if n < near or (n - near) % chunk == 0]
    assert [sizes[n] for n in borders] == [2 * model.state_bytes(n) for n in borders]
    assert model.state_bytes(LENGTH) == model.state_bytes(10**6)


@each_kind
def test_state_does_not_grow_in_100_000_tokens(kind):
    model, near = adapted(kind=kind), WINDOW + SINKS
    for length in (near + 80, near + 100_000):  # on borders of chunks
        leaves = tree_leaves(model.read(tokens(1, length + 1)[0].tolist()).state.blocks)
        assert sum(x.nbytes for x in leaves if x is not None) == model.state_bytes(10**6)


def test_kept_tokens_have_the_largest_sums_of_attention_and_surprise(monkeypatch):
    monkeypatch.setattr(keeping, "PIECE", 5)
    B, T, G, H, E, most, first = 2, 60, 2, 4, 6, 7, WINDOW + SINKS
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, heads, E, dtype=torch.float64) for heads in (H, G, G))
    received, M, surprise = torch.rand(B, T, G), torch.zeros(B, G, E, E, dtype=torch.float64), []
    for t in range(T):
        M = M * (1 - keeping.FORGET)
        key = F.normalize(k[:, t], dim=-1)[..., None]
        error = v[:, t] - (key.mT @ M)[:, :, 0]
        M = M + keeping.STEP * key * error[:, :, None]
        each = error.square().sum(-1) / v[:, t].square().sum(-1)
        surprise.append(each.clamp(max=keeping.MOST).mean(1))
    surprise = torch.stack(surprise, 1)
    state, scores = keeping.start(k), []
    for part in (slice(0, 7), slice(7, 50), slice(50, T)):
        score, state = keeping.write(state, k[:, part], v[:, part], WINDOW)
        scores.append(score)
    leaves = slice(SINKS, T - WINDOW)
    both = received[:, leaves] + torch.cat(scores, 1)[:, first:, None]
    given = q[:, first:], state, k[:, leaves], v[:, leaves], both, most
    y, level, after = keeping.attend(attention._attend, *given)
    for b, g, t in itertools.product(range(B), range(G), range(first, T)):
        far = range(SINKS, t - WINDOW + 1)
        near = {i: surprise[b, max(0, i - keeping.AROUND) : i + keeping.AROUND + 1].mean() for i in far}
        best = sorted(sorted(far, key=lambda i: near[i] + received[b, i, g])[-most:])
        for h in (2 * g, 2 * g + 1):
            at = k[b, best, g] @ q[b, t, h]
            torch.testing.assert_close(y[b, t - first, h], at.softmax(0) @ v[b, best, g])
            torch.testing.assert_close(level[b, t - first, h], at.logsumexp(0))
        assert t < T - 1 or torch.equal(after.k[b, g], k[b, best, g])
    given = [x[:1, :12].requires_grad_(True) for x in (q[:, first:], k[:, leaves], v[:, leaves])]

    def ends(q, k, v):
        return keeping.attend(attention._attend, q, keeping.start(k), k, v, both[:1, :12], 3)[:2]

    assert torch.autograd.gradcheck(ends, given)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("fields", [{}, {"rope_parameters": YARN}], ids=["plain", "yarn"])
@torch.no_grad()
def test_attention_that_keeps_every_token_is_full_attention_at_distances_up_to_the_window(fields):
    options = adapt.MemoryOptions(**SHORT, kept=LENGTH, layers=())
    model = adapt.convert(source("llama", num_hidden_layers=1, **fields), options)
    x = torch.randn(2, LENGTH, 32)
    own, index = model.layers()[0].self_attn, torch.arange(LENGTH)
    rotary = model.base_model.rotary_emb(x, index[None])
    q, k, v = (z.repeat_interleave(4 // z.shape[2], 2) for z in own.family.heads(own, x))
    at = lambda q_at, k_at: torch.einsum(  # noqa: E731
        "bqhe,bkhe->bhqk", attention.rotate(q, rotary, q_at), attention.rotate(k, rotary, k_at)
    )
    age = index[:, None] - index
    scores = torch.where(age < WINDOW, at(index, index), at(index * 0 + WINDOW, index * 0))
    sinks = at(index.clamp(max=SINKS + WINDOW - 1), index)
    scores = torch.where((age >= WINDOW) & (index < SINKS), sinks, scores).masked_fill(age < 0, -torch.inf)
    expected = torch.einsum("bhqk,bkhe->bqhe", (scores * own.scaling).softmax(-1), v)
    assert largest(own(x, position_embeddings=rotary)[0], own.family.output(own, expected.flatten(2))) < 1e-5
    # what a token receives of the window's attention, in the older half of its time there, is its score
    near = scores.masked_fill((age >= WINDOW) & (index >= SINKS), -torch.inf)
    given = (near * own.scaling).softmax(-1).unflatten(1, (2, 2)).mean(2)
    given = given * ((age >= WINDOW // 2) & (age < WINDOW))
    blocks, start = None, 0
    for end in (5, 30, 31, 32, LENGTH):
        own(x[:, start:end], position_embeddings=rotary, call=(call := attention.Pass(start, blocks)))
        (kept,) = (carry.kept for carry in call.after.values())
        assert largest(kept.received, given[:, :, :end, max(0, end - WINDOW) : end].sum(2).mT) < 1e-5
        blocks, start = tuple(call.after.values()), end
    surprise, _ = keeping.write(keeping.start(k[:, :, ::2]), k[:, :, ::2], v[:, :, ::2], WINDOW)
    near, far = WINDOW + SINKS, slice(SINKS, LENGTH - WINDOW)
    score = given.sum(2)[:, :, far] + keeping.WEIGHT * surprise[:, None, near:]
    assert largest(kept.score, score) < 1e-5


@torch.no_grad()
def test_memory_alone_reaches_beyond_the_window_and_no_token_sees_a_later_one():
    model, text = adapted(layers=(1,)), tokens()
    other = text.clone()
    other[:, SINKS + 4] = 49 - other[:, SINKS + 4] + 2
    changed = lambda far: (encoded(model, text, far) - encoded(model, other, far)).abs().amax((0, 2))  # noqa: E731
    last = SINKS + 4 + 2 * (WINDOW - 1)  # of two layers' windows
    assert changed("window")[last + 1 :].max() == 0
    assert changed("memory")[last + 1 :].min() > 1e-6
    assert changed("memory")[: SINKS + 4].max() == 0


@each_kind
def test_generation_of_a_padded_batch_is_that_of_its_rows(kind):
    model, rows = adapted(kind=kind), [tokens(1, n, n)[0] for n in (40, 9, 23)]
    padded = [F.pad(row, (40 - len(row), 0), value=1) for row in rows]
    mask = torch.stack([(torch.arange(40) >= 40 - len(row)).long() for row in rows])
    options = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 1}
    written = model.generate(torch.stack(padded), attention_mask=mask, do_sample=False, **options)[:, 40:]
    for row, own in zip(rows, written, strict=True):
        assert model.generate(row[None], do_sample=False, **options)[0, len(row) :].tolist() == own.tolist()
    beams = {"num_beams": 3, "length_penalty": 0.0, "return_dict_in_generate": True, "output_scores": True}
    best = model.generate(torch.stack(padded), attention_mask=mask, do_sample=False, **beams, **options)
    for row, whole, score in zip(rows, best.sequences, best.sequences_scores, strict=True):
        logits = model(whole[None, 40 - len(row) :]).logits[0, len(row) - 1 : -1]
        assert score == pytest.approx(-F.cross_entropy(logits, whole[40:], reduction="sum").item(), rel=1e-4)


@each_family
def test_saved_model_and_its_memory_file_are_loaded_again(family, tmp_path):
    model, text = adapted(family, kind="titans"), tokens(1)[0].tolist()
    model.save_pretrained(tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert pickle.loads(pickle.dumps(loaded.config)).titans == model.config.titans
    reading = model.read(text)
    save_memory(tmp_path / "text.memory", reading, model)
    back = load_memory(tmp_path / "text.memory", loaded)
    assert back.ahead == reading.ahead
    whole = model(torch.tensor([text])).logits[:, -1]
    step, _ = loaded._step(loaded.get_input_embeddings()(torch.tensor([back.ahead])), back.state)
    assert largest(loaded.lm_head(step[0])[:, -1], whole) < 2e-5
    loaded.memories()["0"].mix.bias.data += 1
    with pytest.raises(ValueError, match="written by another model"):
        load_memory(tmp_path / "text.memory", loaded)


def test_gradients_of_attention_and_of_its_levels_are_those_of_finite_differences():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, *of, dtype=torch.float64, requires_grad=True) for n, *of in SHAPES)
    sees = torch.rand(3, 4, 5) < 0.5
    sees[0] = sees[1, 2] = False  # a block and a query that see nothing: levels below all others
    seen = torch.cat([sees, sees], 1).flatten(0, 1)
    outputs = lambda *of: [  # noqa: E731
        x.flatten(2, 3)[:, :, seen.any(-1)] for x in attention._Attention.apply(*of, sees)
    ]
    assert torch.autograd.gradcheck(outputs, (q, k, v))


@each_kind
def test_every_parameter_of_a_memory_learns_from_the_teacher_layer_by_layer(kind, monkeypatch):
    model, hooks = adapted("llama", kind=kind).requires_grad_(False), torch.autograd.graph.saved_tensors_hooks
    memories = torch.nn.ModuleDict(model.memories()).requires_grad_(True)

    def learnt():
        call, read = attention.Pass(far="transfer"), []
        with torch.no_grad(), hooks(lambda x: x, lambda x: read.append(x.shape) or x):
            model.encode(model.get_input_embeddings()(tokens()), call)
        assert [tuple(error.shape) for error in call.errors] == [(2,), (2,)]
        read.clear()
        gradients = torch.autograd.grad(torch.stack(call.errors).sum(), list(memories.parameters()))
        return gradients, {*read} - {p.shape for p in memories.parameters()}

    gradients, kept = learnt()
    assert not kept
    assert all(g.abs().max() > 0 for g in gradients)
    monkeypatch.setattr(attention, "_differentiated", lambda loss_B, module: loss_B)
    expected, kept = learnt()
    assert kept
    torch.testing.assert_close(gradients, expected)


@each_kind
@torch.no_grad()
def test_memory_is_float32_under_autocast_and_beside_weights_in_bf16(kind, tmp_path):
    model, text = adapted(kind=kind), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        state = model(text, use_cache=True).past_key_values.groups[0].state
    parts = tree_leaves([(carry.memory.state, carry.memory.steps) for carry in state.blocks])
    parts += [x for carry in state.blocks if carry.kept for x in tree_leaves(carry.kept[2:]) if x is not None]
    assert {x.dtype for x in parts} == {torch.float32}
    adapt.convert(source("llama").bfloat16(), model.options).save_pretrained(tmp_path)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {x.dtype for x in half.parameters()} == {torch.float32, torch.bfloat16}
    assert {p.dtype for memory in half.memories().values() for p in memory.parameters()} == {torch.float32}
    assert largest(half(text).logits[:, :WINDOW], model(text).logits[:, :WINDOW]) < 0.1
    model = model.to("meta")
    cache = model(text.to("meta"), use_cache=True).past_key_values
    assert model(text.to("meta"), past_key_values=cache).logits.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_defaults_have_kernels_on_a_gpu(dtype):
    of, matrix = adapt.MemoryOptions(), {"depth": 1, "chunk_size": 1, "rule": "gated_delta"}
    config = MemoryConfig(depth=of.depth, chunk_size=of.chunk, surprise_bound=0.3, write_budget=2.0)
    assert supports(config, 64, dtype, 90)[::2] == ("triton", "")
    config = MemoryConfig(**matrix, surprise_bound=None, write_budget=None)
    assert supports(config, 64, dtype, 90) == ("online", "delta", "")


@each_family
def test_low_rank_changes_leave_the_teacher_and_are_added_to_the_weights(family, tmp_path):
    model, text = adapted(family), tokens()
    memories = adapt.Memories(model, lora=2)
    memories(text, "tune").sum().backward()
    assert all(p.grad is not None for p in memories.parameters())
    for p in memories.lora.parameters():
        p.data += 0.1 * torch.randn_like(p)
    logits = source(family)(text[:, :-1]).logits.log_softmax(-1)[:, WINDOW + SINKS :]
    expected = -logits.gather(-1, text[:, WINDOW + SINKS + 1 :, None])[..., 0]
    assert largest(memories(text, "full"), expected) < 1e-5
    before, _ = memories(text, "memory"), adapted(family).save_pretrained(tmp_path)
    adapt.replace_weights(tmp_path, tmp_path, *memories.weights())
    merged = adapt.Memories(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert largest(merged(text, "memory"), before) < 2e-5
    assert largest(adapt.Memories(adapted(family))(text, "memory"), before) > 1e-4


def test_gates_alone_are_trained_if_asked():
    own = adapt.Memories(adapted(kind="titans"), only_gates=True)
    own(tokens(), "tune").sum().backward()
    trained = {name.split(".")[2] for name, p in own.named_parameters() if p.grad is not None}
    assert trained == {"write", "mix", "mix_query_HE", "level_H", "count_H"}


def test_loss_counts_the_tokens_that_are_read():
    model, text, mask = adapted(), tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :20] = 0
    logits = model(text, attention_mask=mask).logits
    pairs = torch.cat([logits[0, 20:-1], logits[1, :-1]]), torch.cat([text[0, 21:], text[1, 1:]])
    loss = model(text, attention_mask=mask, labels=text.masked_fill(mask == 0, -100)).loss
    torch.testing.assert_close(loss, F.cross_entropy(*pairs))


@each_kind
def test_sessions_that_have_read_different_texts_are_decoded_in_one_batch(kind, tmp_path, monkeypatch):
    model, rows, apart = adapted(kind=kind), [], 40 if kind == "titans" else 37
    lengths = {"long": apart + 2 * 8, "longer": apart + 5 * 8, "new": 0, "short": 9}
    asked = {name: tokens(1, 3, seed)[0].tolist() for seed, name in enumerate(lengths)}
    written = {}
    for folder in ("together", "alone"):
        sessions = model.sessions(tmp_path / folder)
        for name, length in lengths.items():
            if length:
                sessions.add(name, tokens(1, length, length)[0].tolist())
        calls = [asked] if folder == "together" else [{name: text} for name, text in asked.items()]
        with monkeypatch.context() as patch:
            step = model._step
            patch.setattr(model, "_step", lambda x, state: rows.append(len(x)) or step(x, state))  # noqa: B023
            pairs = sorted(pair for call in calls for pair in sessions.replies(call, 5))
        written[folder] = pairs, {name: sessions.turns(name)[-1].tokens for name in asked}
    assert written["together"] == written["alone"]
    assert rows.count(2) == 7 - 2  # three tokens in one call, then each of the rest
    states = [model.sessions(tmp_path / folder).reading("longer").state for folder in ("together", "alone")]
    assert states[0].position == apart + 5 * 8 + 3 + 5 - 1
    for pair in zip(*(tree_leaves(state) for state in states), strict=True):
        torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-4)


def test_sessions_forked_rolled_back_and_deleted_equal_a_replay(tmp_path):
    model, rng, expected = adapted(), random.Random(0), {}
    sessions = adapt.Sessions(model, tmp_path / "kept")
    for i in range(100):
        kind, name = rng.choice(("add", "add", "fork", "rollback", "delete")), rng.choice("abc")
        if kind == "add" or not expected.get(name):
            text = [rng.randrange(2, 50) for _ in range(rng.randrange(1, 30))]
            expected[name] = [*expected.get(name, []), (text, sessions.add(name, text))]
        elif kind == "fork":
            turn = rng.randrange(1, len(expected[name]) + 1)
            sessions.fork(name, f"{name}{i}", turn)
            expected[f"{name}{i}"] = expected[name][:turn]
        elif kind == "rollback":
            turn = rng.randrange(len(expected[name]) + 1)
            sessions.rollback(name, turn)
            expected[name] = expected[name][:turn]
        else:
            sessions.delete(name)
            del expected[name]
    kept = {name: turns for name, turns in expected.items() if turns}
    assert sessions.names() == sorted(kept)
    for name, turns in kept.items():
        assert sessions.turns(name) == [turn for _, turn in turns]
    replayed = adapt.Sessions(model, tmp_path / "replayed")
    name, turns = max(kept.items(), key=lambda item: len(item[1]))
    assert [replayed.add(name, text).hash for text, _ in turns] == [turn.hash for _, turn in turns]
    wrong = (sessions.rollback, name, 99), (sessions.delete, "none"), (sessions.turns, "../x")
    for refused, *given in wrong:
        with pytest.raises(ValueError, match="session"):
            refused(*given)
    last = replayed._files(name)[-1]
    last.write_bytes(last.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"memory: damaged: .*; roll the session back to the turn before it"):
        replayed.reading(name)
    replayed.rollback(name, len(turns) - 1)
    assert replayed.turns(name) == [turn for _, turn in turns[:-1]]


def test_sliding_windows_quantised_weights_and_long_texts_are_refused():
    """Other conversions that cannot be: tests/objectives/test_adapt.py."""
    sliding = source("qwen2", use_sliding_window=True, max_window_layers=0)
    with pytest.raises(ValueError, match="layers without full attention"):
        adapt.convert(sliding, adapt.MemoryOptions(**SHORT))
    quantised = source("llama")
    quantised.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match=r"quantised \(gptq\)"):
        adapt.convert(quantised)
    with pytest.raises(ValueError, match="257 tokens; a titans_gpt2 has positions for 256"):
        adapted("gpt2").read([2] * 258)
    assert adapted("llama").read([2] * 300).tokens == 300
