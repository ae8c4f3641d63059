"""What a model is, in data: every component a field that can be switched off."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
Width = Annotated[int, Field(ge=1, le=2**20)]
"""Features or layers: far beyond what any machine holds, and still small enough to be counted."""


class Frozen(BaseModel):
    """Base of all configs: immutable, no unknown keys, no silent coercion of strings, finite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class MemoryConfig(Frozen):
    """The neural long-term memory of Sections 3.1, 3.2 and 4.4.

    The memory of one head is an MLP of ``depth`` layers from ``head_dim`` to ``head_dim`` whose hidden
    layers are ``expansion * head_dim`` wide; its weights are the recurrent state.
    """

    depth: Annotated[int, Field(ge=1, le=1000)] = 2
    """L_M, the number of layers of the memory; 1 is a linear memory."""
    heads: Annotated[int, Field(ge=1, le=4096)] = 4
    head_dim: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Width of a head; ``d_model // heads`` where None."""
    expansion: Annotated[int, Field(ge=1, le=64)] = 1
    """Hidden width of the memory over its head width."""
    chunk_size: PositiveInt = 64
    """The paper's b (eq. 16): gradients of a chunk are taken at the weights it starts from."""
    activation: Literal["silu", "gelu", "identity"] = "silu"
    """Non-linearity between the layers of the memory."""
    residual: Literal["none", "input", "norm"] = "none"
    """What is around the layers f of the memory: nothing, ``x + f(x)``, or ``x + LN(f(x))`` with a trained
    weight and bias of each head, as in the later published version and in TTT."""
    momentum: bool = True
    """Past surprise, eta_t of eq. 14; off: eta_t = 0."""
    decay: bool = True
    """Forgetting, alpha_t of eq. 13; off: alpha_t = 0."""
    decay_per: Literal["head", "channel"] = "head"
    """alpha_t as one number a head, or one for each channel that a layer of the memory gives out (a hidden
    layer of a larger expansion has as many neighbours of one alpha). Slower."""
    forget_to: Literal["zero", "initial"] = "zero"
    """What forgetting leads to: zero, the paper's rule, or the learned initial weights M_0. Over a long text
    decay to zero forgets M_0 too, and a deep memory at zero learns nothing more; with initial, a memory that
    forgets all is as it was before the first token."""
    conv: bool = True
    """Causal depthwise convolution after each of the q, k, v projections."""
    conv_kernel: Annotated[int, Field(ge=1, le=2**16)] = 4
    qk_norm: bool = True
    """L2-normalise queries and keys."""
    value_norm: bool = True
    """L2-normalise values, so that a bound on the surprise means the same in every layer."""
    output_norm: bool = True
    output_gate: bool = True
    gates_per: Literal["token", "chunk"] = "token"
    """alpha, eta, theta as functions of the token, or one value a chunk (Section 3.2)."""
    max_theta: Annotated[float, Field(gt=0)] = 0.1
    """Upper end of the inner learning rate theta_t. A chunk of b like tokens takes b full steps at once,
    so what is stable falls with chunk_size: 0.1 suits 64, 0.5 suits 16."""
    alpha_bias: float = -6.0
    """Where forgetting starts, before the sigmoid: -6 is 0.25% a token, so that M_0 outlives the row."""
    eta_bias: float = 0.0
    """Where momentum starts: 0 keeps half of the past surprise."""
    theta_bias: float = -1.0
    """Where the inner learning rate starts: -1 is 0.27 of max_theta."""
    surprise_bound: Annotated[float, Field(gt=0)] | None = 1.0
    """Bound c on each token's surprise; None is the paper's unbounded rule."""
    write_budget: Annotated[float, Field(gt=0)] | None = None
    """Full steps that a direction of key space is written at most within a chunk: a token whose key earlier
    tokens of its chunk have written along takes a smaller step. Repeated tokens can then not make the memory
    diverge, which surprise_bound alone does not prevent; keep both. None is the paper's rule."""
    backend: Literal["auto", "reference", "autograd", "chunked", "native", "online", "triton"] = "auto"
    rule: str = "paper"
    """What a token does to the memory: paper, gated_delta, huber, yaad, or ``module:Name`` of a
    `titans_kernels.Rule`."""
    rule_options: dict[str, float] = {}
    """Parameters of the rule by name: ``delta`` of huber and yaad."""


class AttentionConfig(Frozen):
    """The short-term memory: softmax attention with rotary positions."""

    heads: PositiveInt = 4
    window: PositiveInt | None = None
    """Tokens a query sees, itself included; None: all before it. MAC's is its segment."""
    segment_size: PositiveInt | None = None
    """Segment of MAC, in tokens; a multiple of the memory's chunk_size."""
    rope_base: Annotated[float, Field(gt=0)] = 10_000.0
    silu: bool = True
    """SiLU after the projections of queries, keys and values, as Section 4.4 has it in all blocks of Titans.
    This and the three below are the Transformer's too where its option ``projections`` says so."""
    conv: bool = True
    """Causal depthwise convolution after each of these projections."""
    conv_kernel: Annotated[int, Field(ge=1, le=2**16)] = 4
    qk_norm: bool = True
    """L2-normalise queries and keys; a learned scale a head takes the place of their lengths."""


class ModelConfig(Frozen):
    """A language model: ``n_layers`` blocks of one variant between an embedding and a head."""

    variant: str = "lmm"
    """lmm, mac, mag, mal, transformer; a baseline: retnet, gla, hgrn2, mamba, mamba2, deltanet,
    gated_deltanet, ttt_linear, ttt_mlp, samba, gated_deltanet_h2, based, hyena; or the import path of a block
    class, ``my_lab.blocks:MyBlock``."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """What a variant takes beyond the fields here: the fields of its block's ``Options``."""
    vocab_size: PositiveInt = 32_000
    d_model: Width = 256
    n_layers: Width = 4
    persistent_tokens: Annotated[int, Field(ge=0, le=2**20)] = 4
    """N_p of eq. 19, in every block; 0 switches persistent memory off."""
    mlp_expansion: Annotated[float, Field(ge=0, le=1024)] = 8 / 3
    """Hidden width of the SwiGLU layer of a block over d_model; 0 leaves the layer out."""
    tie_embeddings: bool = True
    memory: MemoryConfig = MemoryConfig()
    attention: AttentionConfig = AttentionConfig()

    @model_validator(mode="after")
    def _widths_fit(self) -> ModelConfig:
        if self.memory.head_dim is None and self.d_model % self.memory.heads:
            raise ValueError(f"memory.heads: {self.memory.heads} does not divide d_model {self.d_model}")
        if self.d_model % self.attention.heads:
            raise ValueError(
                f"attention.heads: {self.attention.heads} does not divide d_model {self.d_model}"
            )
        if (self.d_model // self.attention.heads) % 2:
            raise ValueError("attention.heads: rotary positions need an even head width")
        return self
