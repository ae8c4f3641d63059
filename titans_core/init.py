"""All initialisation, in one place.

| parameter | start |
|---|---|
| embedding | normal, std 1 / sqrt(d_model), tied or not the head too; read times sqrt(d_model) |
| linear layers | normal, std 1 / sqrt(fan in) |
| layers that write to the residual stream (w_o, down) | the same over sqrt(2 n_layers) |
| norms, the scale of attention's scores | 1; the bias of LN inside a memory 0 |
| convolutions | uniform in +-1 / sqrt(kernel), so that earlier tokens are seen from the first step |
| M_0 | normal, std 1 / sqrt(fan in); its last layer a tenth of that, to predict little; not under LN |
| persistent tokens | normal, std 1, as large as the normalised input they stand before |
| alpha, eta, theta | weight 0.02, bias `MemoryConfig.alpha_bias`, `eta_bias`, `theta_bias` |
| a rule's own gates | weight 0.02, bias `Rule.extra_bias` |
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
    initialised like the built-in ones. On the meta device, where drawing takes most of the time that a model
    takes to build, nothing is done.
    """
    if all(parameter.is_meta for parameter in model.parameters()):
        return
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
    for name in RESIDUAL:
        if isinstance(layer := getattr(module, name, None), nn.Linear):
            layer.weight.div_(math.sqrt(2 * n_layers))


def _initialize_memory(memory: Any) -> None:
    """M_0 and the gates of a `NeuralMemory`."""
    config = memory.config
    for W in memory.initial_weights:
        nn.init.normal_(W, std=W.shape[-2] ** -0.5)
    if config.residual != "norm":  # under LN it would only scale up the gradient tenfold
        memory.initial_weights[-1].mul_(0.1)
    biases = {"alpha": config.alpha_bias, "eta": config.eta_bias, "theta": config.theta_bias}
    biases["extra"] = memory.rule.extra_bias
    for name, bias in biases.items():
        gate = getattr(memory, name)
        if gate is not None:
            nn.init.normal_(gate.weight, std=0.02)
            nn.init.constant_(gate.bias, bias)
