"""Audit public layers from the package index, and all variants and rules of this library.

    python experiments/audit/gallery.py --out DIR            # every layer that is installed here
    python experiments/audit/gallery.py --only minGRU ours   # some
    python experiments/audit/gallery.py --out DIR --table    # the table of what DIR holds

Public layers are best installed in an environment of their own, on this repository's source:

    pip install torch numpy pydantic titans-pytorch x-transformers transformers local-attention mambapy \\
        minGRU-pytorch titans-memory titans-trainer xlstm s5-pytorch Mega-pytorch \\
        gated-state-spaces-pytorch fla-core
    PYTHONPATH=kernels:. python experiments/audit/gallery.py --out DIR
"""

# pyright: reportMissingImports=false, reportCallIssue=false
# the packages are installed where the gallery runs, not here

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.audit import Adapter, AuditError, audit

D = 32
"""Width of the public layers."""


def gru() -> Any:
    """Build a GRU of torch."""
    return nn.GRU(D, D, batch_first=True)


def titans_pytorch() -> Adapter:
    """Segments of 16; the state carried with `state=`."""
    from titans_pytorch import NeuralMemory

    layer = NeuralMemory(D, chunk_size=16)
    step = lambda x, state: layer(x) if state is None else layer(x, state=state)  # noqa: E731
    return Adapter(layer, lambda x: layer(x)[0], width=D, step=step, time_grows="linear")


def titans_pytorch_mac() -> Adapter:
    """Build two blocks, segments of 32."""
    from titans_pytorch import MemoryAsContextTransformer

    model = MemoryAsContextTransformer(
        num_tokens=32, dim=D, depth=2, segment_len=32, num_longterm_mem_tokens=4, num_persist_mem_tokens=4,
        heads=2, dim_head=16, use_flex_attn=False, sliding_window_attn=True, neural_memory_segment_len=16,
    )  # fmt: skip
    return Adapter(model, lambda x: model(x), vocab=32, embedding=model.token_emb, time_grows="linear")


def titans_memory() -> Any:
    """Chunks of 16."""
    from titans.memory.neural_memory import NeuralMemory

    return NeuralMemory(D, d_hidden=D, chunk_size=16)


def titans_trainer() -> Any:
    """Chunks of 16."""
    from titans_trainer import NeuralMemory

    return NeuralMemory(D, chunk_size=16)


def x_transformers() -> Adapter:
    """Build one block with rotary positions."""
    from x_transformers import Decoder

    layer = Decoder(dim=D, depth=1, heads=2, attn_dim_head=16, rotary_pos_emb=True)
    return Adapter(layer, lambda x: layer(x), width=D)


def local_attention() -> Any:
    """Build attention over a causal window of 16."""
    from local_attention.transformer import LocalMHA

    return LocalMHA(dim=D, window_size=16, heads=2, dim_head=16, causal=True)


def mambapy() -> Adapter:
    """Build one block that decodes by its `step`."""
    from mambapy.mamba import Mamba, MambaConfig

    model = Mamba(MambaConfig(d_model=D, n_layers=1))

    def decode(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        inner = model.config.d_inner
        caches = state or [(None, x.new_zeros(len(x), inner, model.config.d_conv - 1))]
        y, caches = model.step(x[:, 0], list(caches))
        return y[:, None], caches

    return Adapter(model, model, width=D, decode=decode, time_grows="linear")


def mingru() -> Adapter:
    """Build a minGRU whose hidden state is carried."""
    from minGRU_pytorch import minGRU

    layer = minGRU(D)
    step = lambda x, state: layer(x, state, return_next_prev_hidden=True)  # noqa: E731
    return Adapter(layer, layer, width=D, step=step, state_grows="constant", time_grows="linear")


def minlstm() -> Adapter:
    """Build a minLSTM whose hidden state is carried."""
    from minGRU_pytorch.minLSTM import minLSTM

    layer = minLSTM(D)
    step = lambda x, state: layer(x, state, return_next_prev_hidden=True)  # noqa: E731
    return Adapter(layer, layer, width=D, step=step, state_grows="constant", time_grows="linear")


def s5() -> Any:
    """Build a layer with as many states as channels."""
    from s5 import S5

    return S5(D, D)


def mega() -> Adapter:
    """Build a causal MEGA layer."""
    from mega_pytorch import MegaLayer

    layer = MegaLayer(dim=D, ema_heads=4, attn_dim_qk=16, attn_dim_value=32, causal=True)
    return Adapter(layer, layer, width=D)


def gss() -> Adapter:
    """32 states."""
    from gated_state_spaces_pytorch.gss import GSS

    layer = GSS(dim=D, dss_kernel_N=32, dss_kernel_H=16)
    return Adapter(layer, layer, width=D)


def xlstm_block() -> Adapter:
    """Build one mLSTM block that decodes by its `step`."""
    from xlstm import mLSTMBlockConfig, mLSTMLayerConfig, xLSTMBlockStack, xLSTMBlockStackConfig

    config = xLSTMBlockStackConfig(
        mlstm_block=mLSTMBlockConfig(mlstm=mLSTMLayerConfig(num_heads=2)),
        context_length=4096, num_blocks=1, embedding_dim=D,
    )  # fmt: skip
    stack = xLSTMBlockStack(config)

    def decode(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return stack.step(x, state=state)

    return Adapter(stack, stack, width=D, decode=decode, changes_state=True)


def _transformers(model: Any, cache: str, **claims: Any) -> Adapter:
    """Wrap a base model of transformers on embedded tokens; its caches are changed in place, by design."""

    def forward(x: Tensor) -> Tensor:
        return model(inputs_embeds=x, use_cache=False).last_hidden_state

    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        out = model(inputs_embeds=x, use_cache=True, **({} if state is None else {cache: state}))
        return out.last_hidden_state, getattr(out, cache)

    for name, p in model.named_parameters():
        p.requires_grad_("embed" not in name)  # the inputs are embedded already
    return Adapter(model, forward, width=D, step=step, changes_state=True, **claims)


def transformers_mamba() -> Adapter:
    """Build one block."""
    from transformers import MambaConfig, MambaModel

    config = MambaConfig(vocab_size=32, hidden_size=D, num_hidden_layers=1, state_size=8)
    return _transformers(MambaModel(config), "cache_params", time_grows="linear")


def transformers_mamba2() -> Adapter:
    """Build one block, chunks of 16."""
    from transformers import Mamba2Config, Mamba2Model

    config = Mamba2Config(
        vocab_size=32, hidden_size=D, num_hidden_layers=1, state_size=8, head_dim=16, num_heads=4, n_groups=1,
        chunk_size=16, expand=2,
    )  # fmt: skip
    return _transformers(Mamba2Model(config), "cache_params", time_grows="linear")


def transformers_gated_deltanet() -> Adapter:
    """Qwen3-Next with linear attention only."""
    from transformers import Qwen3NextConfig, Qwen3NextModel

    config = Qwen3NextConfig(
        vocab_size=32, hidden_size=D, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, intermediate_size=32, num_experts=0,
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        mlp_only_layers=[0, 1],
    )  # fmt: skip
    return _transformers(Qwen3NextModel(config), "past_key_values")


def transformers_recurrent_gemma() -> Adapter:
    """Build two recurrent blocks and one of attention."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaModel

    config = RecurrentGemmaConfig(
        vocab_size=32, hidden_size=D, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=64, lru_width=D, attention_window_size=16, head_dim=16,
    )  # fmt: skip
    model = RecurrentGemmaModel(config)
    for name, p in model.named_parameters():
        p.requires_grad_("embed" not in name)
    return Adapter(model, lambda x: model(inputs_embeds=x, use_cache=False).last_hidden_state, width=D)


def transformers_rwkv() -> Adapter:
    """Build one block."""
    from transformers import RwkvConfig, RwkvModel

    config = RwkvConfig(vocab_size=32, hidden_size=D, num_hidden_layers=1, attention_hidden_size=D)
    return _transformers(RwkvModel(config), "state", time_grows="linear")


def transformers_llama() -> Adapter:
    """Build one block."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=32, hidden_size=D, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    return _transformers(LlamaModel(config), "past_key_values")


class _Projected(nn.Module):
    """Projections of q, k, v and gates around one of fla's operators in plain PyTorch."""

    def __init__(self, run: Callable[..., Any], gates: int):
        super().__init__()
        self.run, self.qkv, self.gates, self.out = (
            run,
            nn.Linear(D, 3 * D),
            nn.Linear(D, 2 * gates),
            nn.Linear(D, D),
        )

    def forward(self, x: Tensor, run: Callable[..., Any] | None = None) -> Tensor:
        """[B, T, D] to [B, T, D]; ``run`` replaces the operator."""
        q, k, v = self.qkv(x).unflatten(-1, (6, 16)).chunk(3, -2)
        gates = self.gates(x).sigmoid().unflatten(-1, (-1, 2))
        o = (run or self.run)(q, F.normalize(k, dim=-1), v, *gates.unbind(-2))
        return self.out(o.flatten(-2))


def fla_gated_delta() -> Adapter:
    """Compare the chunked form in plain PyTorch with the recurrent one."""
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule as chunked
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule as recurrent

    layer = _Projected(lambda q, k, v, beta, g: chunked(q, k, v, g=g.log(), beta=beta, chunk_size=16)[0], 2)
    slow = lambda q, k, v, beta, g: recurrent(q, k, v, beta, g.log())[0]  # noqa: E731
    return Adapter(layer, layer, width=D, reference=lambda x: layer(x, slow), time_grows="linear")


PUBLIC: dict[str, tuple[str, Callable[[], Any]]] = {
    "torch GRU": ("torch", gru),
    "titans-pytorch NeuralMemory": ("titans-pytorch", titans_pytorch),
    "titans-pytorch MAC": ("titans-pytorch", titans_pytorch_mac),
    "titans-memory NeuralMemory": ("titans-memory", titans_memory),
    "titans-trainer NeuralMemory": ("titans-trainer", titans_trainer),
    "x-transformers Decoder": ("x-transformers", x_transformers),
    "local-attention LocalMHA": ("local-attention", local_attention),
    "mambapy Mamba": ("mambapy", mambapy),
    "minGRU": ("minGRU-pytorch", mingru),
    "minLSTM": ("minGRU-pytorch", minlstm),
    "s5-pytorch S5": ("s5-pytorch", s5),
    "Mega-pytorch MegaLayer": ("Mega-pytorch", mega),
    "gated-state-spaces GSS": ("gated-state-spaces-pytorch", gss),
    "xlstm mLSTM": ("xlstm", xlstm_block),
    "transformers Mamba": ("transformers", transformers_mamba),
    "transformers Mamba2": ("transformers", transformers_mamba2),
    "transformers Qwen3-Next": ("transformers", transformers_gated_deltanet),
    "transformers RecurrentGemma": ("transformers", transformers_recurrent_gemma),
    "transformers RWKV-4": ("transformers", transformers_rwkv),
    "transformers Llama": ("transformers", transformers_llama),
    "fla gated delta rule, PyTorch": ("fla-core", fla_gated_delta),
}
"""Layers by name: the distribution that they come from, and what makes an adapter of them."""


def ours() -> dict[str, Callable[[], Any]]:
    """Return all variants, and the memory rules and options that change what is computed."""
    from experiments.rules.names import RULES
    from titans_core.audit.variants import variant_factory, variant_names

    factories = {f"ours: {name}": variant_factory(name) for name in variant_names()}
    memories: dict[str, dict[str, Any]] = {
        f"rule {name}": {"rule": rule} for name, rule in RULES.items() if name != "paper"
    }
    memories |= {
        "depth 1": {"depth": 1},
        "depth 3": {"depth": 3},
        "gates per chunk": {"gates_per": "chunk"},
        "decay per channel": {"channel_gates": "alpha"},
        "forget_to initial": {"forget_to": "initial"},
        "residual norm": {"residual": "norm"},
        "no momentum": {"momentum": False},
    }
    for title, memory in memories.items():
        if memory.get("rule"):  # the other rules have no write budget of their own
            memory = {**memory, "write_budget": None}
            if title == "rule delta_ttt":
                memory |= {"chunk_size": 1, "surprise_bound": None}
        factories[f"ours: lmm, {title}"] = variant_factory("lmm", memory=memory)
    return factories


def main() -> None:
    """Audit the layers, each result written as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("audit-gallery"), help="folder of JSON files")
    parser.add_argument("--only", nargs="+", default=[], help="first letters of names")
    parser.add_argument("--check", nargs="+", default=[], help="names of checks")
    parser.add_argument("--table", action="store_true", help="print the Markdown table of the folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.table:
        table(options.out)
        return
    layers = [(name, dist, factory) for name, (dist, factory) in PUBLIC.items()]
    if any(part.startswith("ours") for part in options.only) or not options.only:
        try:
            layers += [(name, "", factory) for name, factory in ours().items()]
        except ImportError as error:
            print(f"ours: {error}", file=sys.stderr)
    for part in options.only or [""]:
        for name, dist, factory in layers:
            if name.startswith(part):
                one(name, dist, factory, options)


def one(name: str, dist: str, factory: Callable[[], Any], options: argparse.Namespace) -> None:
    """Audit one layer, print its findings, write its JSON file."""
    began = time.perf_counter()
    try:
        version = importlib.metadata.version(dist) if dist else "this commit"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = audit(factory, name=name, width=D, only=options.check)
    except (ImportError, AuditError) as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return
    failed = {result.check: result.finding for result in report.of("fail")}
    print(f"{name} {version}: {len(report.of('pass'))} pass, {len(failed)} fail, {report.precision}, "
          f"{time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip
    for check, finding in failed.items():
        print(f"    {check}: {finding}", flush=True)
    if not options.check:
        record = {**report.to_dict(), "version": version}
        file = (
            options.out / f"{name.replace(' ', '_').replace('/', '_').replace(',', '').replace(':', '')}.json"
        )
        file.write_text(json.dumps(record, indent=1, default=str))


def table(folder: Path) -> None:
    """Print the gallery's table in Markdown."""
    print("| layer | version | pass | fail | precision | seconds |\n|:--|:--|--:|:--|:--|--:|")
    names = [*PUBLIC, *sorted(p.stem for p in folder.glob("ours*.json"))]
    for name in names:
        file = folder / f"{name.replace(' ', '_').replace('/', '_').replace(',', '').replace(':', '')}.json"
        if not file.exists():
            continue
        record = json.loads(file.read_text())
        by = {v: [r["check"] for r in record["results"] if r["verdict"] == v] for v in ("pass", "fail")}
        failed = ", ".join(f"`{check}`" for check in by["fail"]) or "—"
        print(f"| {record['layer']} | {record['version']} | {len(by['pass'])} | {failed} "
              f"| {record['precision']} | {record['seconds']:.0f} |")  # fmt: skip


if __name__ == "__main__":
    main()
