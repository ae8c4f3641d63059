"""Configs of models: every component is a field that can be switched off."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
Width = Annotated[int, Field(ge=1, le=2**20)]
"""Number of features or layers, bounded so that a mistyped value is refused."""


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
    activation: Literal["silu", "gelu", "identity", "swiglu", "geglu"] = "silu"
    """Non-linearity between the layers of the memory. With swiglu or geglu each layer but the last has two
    matrices, ``silu(x W) * (x V)``, as in LaCT (ATLAS++: geglu); slower, since only the forms for any rule
    support it."""
    residual: Literal["none", "input", "norm"] = "none"
    """Residual connection around the layers f of the memory: none, ``x + f(x)``, or ``x + LN(f(x))`` with a
    learned weight and bias per head, as in the later published version and in TTT."""
    output_activation: Literal["none", "silu", "gelu"] = "none"
    """Activation of the memory's output: ``M(x) = o(f(x))``, in the inner loss too. ``silu`` of a memory of
    depth 1 is the one of Modular TTT. Needs residual: none."""
    written: Literal["all", "last"] = "all"
    """Layers whose weights are the state. With last, those below stay at the learned M_0 (arXiv 2602.21204):
    the memory is a linear one of their features of queries and keys, L2-normalised with qk_norm, and exact
    in parallel with chunk_size 1 at any depth. Needs residual: none."""
    start_rank: PositiveInt | None = None
    """Start of all layers but the first: ``L R + I / 2`` with trained factors of this rank (DeltaTTT, LaCT:
    32) in place of a matrix. Needs expansion 1, written: all and at least two layers."""
    feature_degree: Literal[1, 2] = 1
    """2: polynomial features of queries and keys, ``[a_0, a_1 k, a_2 k (x) k]`` with learned a_i (ATLAS,
    eq. 5). The first layer, and its state, then has ``1 + E + E (E + 1) / 2`` inputs for heads of width E,
    2,145 for 64. Needs residual: none."""
    momentum: bool = True
    """Past surprise, eta_t of eq. 14; off: eta_t = 0."""
    decay: bool = True
    """Forgetting, alpha_t of eq. 13; off: alpha_t = 0."""
    decay_per: Literal["head", "channel"] = "head"
    """One alpha_t per head, or one per output channel of each layer of the memory (with an expansion, as many
    neighbouring hidden channels share one). Per channel is slower."""
    forget_to: Literal["zero", "initial"] = "zero"
    """What weights decay to: zero, as in the paper, or the learned initial weights M_0. Over a long text,
    decay to zero also erases M_0, and a deep memory at zero cannot learn any more; with initial, a memory
    that has
    forgotten everything is back at its start."""
    max_alpha: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Maximum of alpha_t, as max_theta is theta's: 1 / 1024 keeps at least 37% of a write for 1,024 tokens.
    A decay learnt on short rows may otherwise empty the memory of a longer text. 1 is the paper's."""
    decay_horizons: (
        Annotated[tuple[Annotated[float, Field(gt=1)], ...], Field(min_length=2, max_length=2)] | None
    ) = None
    """Shortest and longest 1 / alpha_t at the start, in tokens, with those of the other heads (or channels)
    in equal ratios between them (chrono initialisation, arXiv 1804.11188); replaces alpha_bias."""
    conv: bool = True
    """Causal depthwise convolution after each of the q, k, v projections."""
    conv_kernel: Annotated[int, Field(ge=1, le=2**16)] = 4
    qk_norm: bool = True
    """L2-normalise queries and keys."""
    query_correction: bool = False
    """Subtract keys from queries before the L2 norm, ``q - d k`` with a trained d per head (MDN, Comba)."""
    value_norm: bool = True
    """L2-normalise values, so that surprise_bound has the same meaning in every layer."""
    output_norm: bool = True
    output_gate: bool = True
    gates_per: Literal["token", "chunk"] = "token"
    """Gates alpha, eta and theta per token, or one value per chunk (Section 3.2)."""
    theta_per: Literal["head", "matrix"] = "head"
    """One theta_t per head, or one for each matrix of the memory (LaCT), which the forms for any rule alone
    support."""
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
    earlier keys of its chunk takes a smaller step. Prevents repeated tokens from making the memory
    diverge,
    which surprise_bound alone does not; keep both. None is the paper's rule."""
    backend: Literal["auto", "reference", "autograd", "chunked", "native", "online", "triton"] = "auto"
    rule: str = "paper"
    """The update rule: a name in `titans_kernels.RULES`, such as gated_delta or e2_ttt, or ``module:Name`` of
    a `titans_kernels.Rule`."""
    rule_options: dict[str, float] = {}
    """Parameters of the rule by name: ``delta`` of huber and yaad, ``angle`` of mdn, and (1 for true)
    ``tied`` of mdn, ``post`` of delta_ttt and ``lag`` of memora."""

    @model_validator(mode="after")
    def _outputs_fit(self) -> MemoryConfig:
        for name, plain in {"output_activation": "none", "written": "all", "feature_degree": 1}.items():
            if (value := getattr(self, name)) != plain and self.residual != "none":
                raise ValueError(f"residual: {self.residual} is not supported with {name} {value}; use none")
        fits = (self.expansion, self.written) == (1, "all") and self.depth > 1
        if self.start_rank is not None and self.activation in ("swiglu", "geglu"):
            raise ValueError(
                f"start_rank: {self.start_rank} is not supported with activation {self.activation}"
            )
        if self.start_rank is not None and not fits:
            raise ValueError(
                f"start_rank: {self.start_rank} needs expansion 1, written all and depth 2 or more; found "
                f"{self.expansion}, {self.written} and {self.depth}"
            )
        return self

    @property
    def thetas(self) -> int:
        """Number of theta_t of a head."""
        written, gated = self.depth if self.written == "all" else 1, self.activation in ("swiglu", "geglu")
        return (written - 1) * (1 + gated) + 1 if self.theta_per == "matrix" else 1

    @model_validator(mode="after")
    def _one_theta_with_a_budget(self) -> MemoryConfig:
        if self.theta_per == "matrix" and self.write_budget is not None:
            raise ValueError(
                f"theta_per: matrix is not supported with write_budget {self.write_budget}; use head"
            )
        return self

    @model_validator(mode="after")
    def _horizons_are_reachable(self) -> MemoryConfig:
        if self.decay_horizons is None:
            return self
        shortest, longest = self.decay_horizons
        if not 1 / self.max_alpha < shortest <= longest:
            raise ValueError(
                f"decay_horizons: {shortest:g} to {longest:g} tokens must ascend and be longer than "
                f"1 / max_alpha = {1 / self.max_alpha:g}"
            )
        if not self.decay:
            raise ValueError("decay_horizons: has no effect without decay; leave it out")
        return self


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
