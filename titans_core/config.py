"""Configs of models: every component is a field that can be switched off."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

PositiveInt = Annotated[int, Field(ge=1)]
Width = Annotated[int, Field(ge=1, le=2**20)]
"""Number of features or layers, bounded so that a mistyped value is refused."""
Kernel = Literal[False] | Annotated[int, Field(ge=1, le=2**16)]
"""Width of a convolution, false for none."""


def _kernel(value: object) -> object:
    """Read True as a width of 4; refuse anything that is neither a width nor false, in one line."""
    if not isinstance(value, int):
        raise PydanticCustomError("kernel", "should be a width in tokens, or false for no convolution")
    return 4 if value is True else value


class Frozen(BaseModel):
    """Base of all configs: immutable, no unknown keys, no silent coercion of strings, finite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class MemoryConfig(Frozen):
    """The neural long-term memory of Sections 3.1, 3.2 and 4.4.

    The memory of one head, which is ``d_model // heads`` wide, is an MLP of ``depth`` layers whose hidden
    layers are ``expansion`` times as wide; its weights are the recurrent state.
    """

    depth: Annotated[int, Field(ge=1, le=1000)] = 2
    """L_M, the number of layers of the memory; 1 is a linear memory."""
    heads: Annotated[int, Field(ge=1, le=4096)] = 4
    expansion: Annotated[int, Field(ge=1, le=64)] = 1
    """Hidden width of the memory over its head width."""
    chunk_size: PositiveInt = 64
    """The paper's b (eq. 16): gradients of a chunk are taken at the weights it starts from."""
    activation: Literal["silu", "gelu", "identity"] = "silu"
    """Non-linearity between the layers of the memory."""
    residual: Literal["none", "input", "norm"] = "none"
    """Residual connection around the layers f of the memory: none, ``x + f(x)``, or ``x + LN(f(x))`` with a
    learned weight and bias per head, as in the later published version and in TTT."""
    momentum: bool = True
    """Past surprise, eta_t of eq. 14; off: eta_t = 0."""
    decay: bool = True
    """Forgetting, alpha_t of eq. 13; off: alpha_t = 0."""
    channel_gates: Literal["none", "alpha", "all"] = "none"
    """Gates that are a vector, with one value per output channel of each layer of the memory (with an
    expansion, as many neighbouring hidden channels share one), instead of one per head: alpha, or alpha, eta
    and theta as in eqs. 32 and 33. Slower; no Triton kernel supports it."""
    forget_to: Literal["zero", "initial"] = "zero"
    """The target of decay: zero, as in the paper, or the learned initial weights M_0. Over a long text,
    decay to zero also erases M_0, and a deep memory at zero cannot learn any more; with initial, a memory
    that has forgotten everything is back at its start."""
    max_alpha: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Maximum of alpha_t, as max_theta is theta's: 1 / 1024 keeps at least 37% of a write for 1,024 tokens.
    A decay learnt on short rows may otherwise empty the memory of a longer text. 1 is the paper's."""
    conv: Annotated[Kernel, BeforeValidator(_kernel)] = 4
    """Width of the causal depthwise convolution after each of the q, k, v projections; false for none."""
    qk_norm: bool = True
    """L2-normalise queries and keys."""
    value_norm: bool = True
    """L2-normalise values, so that surprise_bound has the same meaning in every layer."""
    output: Annotated[tuple[Literal["norm", "gate"], ...], Field(strict=False)] = ("norm", "gate")
    """Applied to reads before the output projection (Section 4.4): normalisation, a gate by the token."""
    gates_per: Literal["token", "chunk"] = "token"
    """Gates alpha, eta and theta per token, or one value per chunk (Section 3.2)."""
    max_theta: Annotated[float, Field(gt=0)] = 0.1
    """Maximum of the inner learning rate theta_t. A chunk of b similar tokens takes b full steps from
    the same weights, so larger chunks need a smaller maximum: 0.1 suits a chunk_size of 64, 0.5 one of 16."""
    alpha_bias: float = -6.0
    """Initial bias of alpha before the sigmoid: -6 forgets 0.25% per token, so that M_0 outlasts a row."""
    eta_bias: float = 0.0
    """Initial bias of eta: 0 keeps half of the past surprise."""
    theta_bias: float = -1.0
    """Initial bias of theta: -1 is 0.27 of max_theta."""
    surprise_bound: Annotated[float, Field(gt=0)] | None = 1.0
    """Bound on the norm of each token's surprise; None is the paper's unbounded rule."""
    write_budget: Annotated[float, Field(gt=0)] | None = None
    """Maximum number of full steps along any direction of key space within a chunk: a token whose key is like
    earlier keys of its chunk takes a smaller step. Prevents repeated tokens from making the memory diverge,
    which surprise_bound alone does not; keep both. None is the paper's rule."""
    backend: Literal["auto", "reference", "generic", "chunked", "native", "triton", "online"] = "auto"
    """The operator's form (`titans_kernels.memory.op.FORMS`); auto picks the fastest that it can."""
    rule: str = "paper"
    """The update rule: paper, gated_delta, or ``module:Name`` of a `titans_kernels.Rule`, with parameters in
    parentheses: ``my_lab.rules:Mine(p=2.5)``. Others than these two are slower."""

    @model_validator(mode="before")
    @classmethod
    def _fields_of_earlier_versions(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, default in _REMOVED.items():
            if name in given and given[name] != default:
                value = json.dumps(given[name])
                raise ValueError(f"{name}: {value} was removed; CHANGELOG.md says what replaces it")
        if given.get("backend") == "autograd":
            raise ValueError("backend: autograd is now called generic")
        return {name: value for name, value in given.items() if name not in _REMOVED}


_REMOVED: dict[str, Any] = {
    "output_activation": "none", "written": "all", "start_rank": None, "feature_degree": 1,
    "decay_horizons": None, "query_correction": False, "theta_per": "head", "rule_options": {},
    "head_dim": None, "conv_kernel": 4, "decay_per": "head", "output_norm": True, "output_gate": True,
}  # fmt: skip
"""Former fields and their defaults, with which configs of earlier runs still load."""


class AttentionConfig(Frozen):
    """The short-term memory: softmax attention with rotary positions."""

    heads: PositiveInt = 4
    window: PositiveInt | None = None
    """Sliding window in tokens, including the query; None for full attention. MAC attends to segments."""
    segment_size: PositiveInt | None = None
    """Segment of MAC, in tokens; a multiple of the memory's chunk_size."""
    positions: Literal["rotary", "none"] = "rotary"
    """none: attention sees the order of tokens through the convolution and the causal mask alone."""
    rope_base: Annotated[float, Field(gt=0)] = 10_000.0
    silu: bool = True
    """SiLU after the projections of queries, keys and values (Section 4.4). This and the three fields below
    apply to the Transformer only with its option ``projections: titans``."""
    conv: bool = True
    """Causal depthwise convolution after each of these projections."""
    conv_kernel: Annotated[int, Field(ge=1, le=2**16)] = 4
    qk_norm: bool = True
    """L2-normalise queries and keys, with a learned scale per head."""
    output: Annotated[tuple[Literal["norm", "gate"], ...], Field(strict=False)] = ()
    """Applied to the heads before the output projection, as `memory.output` is to reads: Section 4.4 has both
    in all blocks. Of the Transformer too, with ``projections: titans``."""


class ModelConfig(Frozen):
    """A language model: ``n_layers`` blocks of one variant between an embedding and a head."""

    variant: str = "lmm"
    """lmm, mac, mag, mal, transformer; a baseline: retnet, gla, hgrn2, mamba, mamba2, deltanet,
    gated_deltanet, ttt_linear, ttt_mlp, samba, gated_deltanet_h2, based, hyena; or the import path of a
    block class, ``my_lab.blocks:MyBlock``."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the variant: the fields of its block's ``Options``."""
    vocab_size: PositiveInt = 32_000
    d_model: Width = 256
    n_layers: Width = 4
    persistent_tokens: Annotated[int, Field(ge=0, le=2**20)] = 4
    """N_p of eq. 19, per block; 0 switches persistent memory off."""
    mlp_expansion: Annotated[float, Field(ge=0, le=1024)] = 8 / 3
    """Hidden width of each block's SwiGLU layer over d_model; 0 omits the layer."""
    tie_embeddings: bool = True
    pointwise_conv: bool = False
    """The pointwise half of the depthwise-separable convolution (Section 4.4): a linear layer over the
    channels after each depthwise convolution of a block's memory and attention. Baselines have none."""
    memory: MemoryConfig = MemoryConfig()
    attention: AttentionConfig = AttentionConfig()

    @model_validator(mode="after")
    def _widths_fit(self) -> ModelConfig:
        if self.d_model % self.memory.heads:
            raise ValueError(f"memory.heads: {self.memory.heads} does not divide d_model {self.d_model}")
        if self.d_model % self.attention.heads:
            raise ValueError(
                f"attention.heads: {self.attention.heads} does not divide d_model {self.d_model}"
            )
        if self.attention.positions == "rotary" and (self.d_model // self.attention.heads) % 2:
            raise ValueError("attention.heads: rotary positions need an even head width")
        return self
