"""All initialisation, in one place.

| parameter | start |
|---|---|
| embedding | normal, std 1 / sqrt(d_model), tied or not the head too; read times sqrt(d_model) |
| linear layers | normal, std 1 / sqrt(fan in) |
| layers that write to the residual stream (w_o, down) | the same over sqrt(2 n_layers) |
| norms, the scale of attention's scores | 1; the bias of LN inside a memory 0 |
| convolutions | uniform in +-1 / sqrt(kernel), so that earlier tokens are seen from the first step |
| M_0 | normal, std 1 / sqrt(fan in); its last layer a tenth of that, to predict little; not under LN |
| M_0, with `MemoryConfig.start_rank` | first layer normal, std 0.02; L, R normal, std 0.5 / sqrt(fan in) |
| persistent tokens | normal, std 1, as large as the normalised input they stand before |
| log of the correction of queries | log of a uniform number in [0, 1], as in MDN |
| polynomial features | the coefficient of degree i 1 / i! |
| alpha, eta, theta | weight 0.02, bias `MemoryConfig.alpha_bias`, `eta_bias`, `theta_bias` |
| a rule's own gates | weight 0.02, bias `Rule.extra_bias` |
| alpha, with `MemoryConfig.decay_horizons` | the bias that gives its head or channel its horizon, 1 / alpha |
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from titans_core.layers import CausalConv, HeadNorm

RESIDUAL = ("w_o", "down")
"""Attribute names of the linear layers that write to the residual stream."""


@torch.no_grad()
def initialize(model: nn.Module, n_layers: int) -> None:
    """Initialise every parameter of a model, or of a part of one, from the global RNG.

    Layers are recognised by type, the other parameters by attribute name, so that custom blocks are
    initialised like the built-in ones.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, CausalConv):
            bound = module.weight_KC.shape[0] ** -0.5
            nn.init.uniform_(module.weight_KC, -bound, bound)
        elif isinstance(module, HeadNorm):
            nn.init.ones_(module.weight_HE)
            nn.init.zeros_(module.bias_HE)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
    for module in model.modules():
        _initialize_by_name(module, n_layers)


def _initialize_by_name(module: Any, n_layers: int) -> None:
    if isinstance(getattr(module, "initial_weights", None), nn.ParameterList):
        _initialize_memory(module)
    if getattr(module, "persistent_PD", None) is not None:
        nn.init.normal_(module.persistent_PD)
    if getattr(module, "scale_H", None) is not None:
        nn.init.ones_(module.scale_H)
    if getattr(module, "log_correction_H", None) is not None:
        nn.init.uniform_(module.log_correction_H).log_()
    if getattr(module, "coefficients_HI", None) is not None:
        module.coefficients_HI.copy_(torch.tensor([1.0, 1.0, 0.5]))
    for name in RESIDUAL:
        if isinstance(layer := getattr(module, name, None), nn.Linear):
            layer.weight.div_(math.sqrt(2 * n_layers))


def _initialize_memory(memory: Any) -> None:
    """M_0 and the gates of a `NeuralMemory`."""
    for W in (*memory.feature_weights, *memory.initial_weights):
        nn.init.normal_(W, std=W.shape[-2] ** -0.5)
    config = memory.config
    for L, R in zip(memory.start_factors[::2], memory.start_factors[1::2], strict=True):  # as in LaCT
        nn.init.normal_(L, std=0.5 * L.shape[-1] ** -0.5)
        nn.init.normal_(R, std=0.5 * R.shape[-1] ** -0.5)
        nn.init.normal_(memory.initial_weights[0], std=0.02)
    if (
        config.residual != "norm" and not memory.start_factors
    ):  # under LN it would only scale up the gradient tenfold
        memory.initial_weights[-1].mul_(0.1)
    biases = {"alpha": config.alpha_bias, "eta": config.eta_bias, "theta": config.theta_bias}
    biases["extra"] = memory.rule.extra_bias
    for name, bias in biases.items():
        gate = getattr(memory, name)
        if gate is not None:
            nn.init.normal_(gate.weight, std=0.02)
            nn.init.constant_(gate.bias, bias)
    if config.decay_horizons is not None:
        # alpha = max_alpha * sigmoid(bias) = 1 / horizon
        ends = torch.tensor(config.decay_horizons, dtype=torch.float64).log()
        step = torch.linspace(0, 1, len(memory.alpha.bias), dtype=torch.float64)
        if len(step) == 1:
            step += 1  # a single head has the longest
        horizons = torch.exp(ends[0] + step * (ends[1] - ends[0]))
        memory.alpha.bias.copy_(-torch.log(config.max_alpha * horizons - 1))
