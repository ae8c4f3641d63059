"""The trained part of an adapted model, and its losses: `transfer`, then `tune`.

transfer: each layer's memory learns the teacher's attention output from the teacher's own hidden states, in
one forward pass. tune: the memories, and low-rank changes of the attention if there are any, learn through
the whole model to give the teacher's distribution of the next token. The teacher is the same model with full
attention and without these changes.

Shapes: B rows, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titans_core.adapt.attention import Far, Pass
from titans_core.adapt.model import HEAD_TOKENS
from titans_core.backbone import Model

NAME = "default"
"""peft's name for the only changes that a model has."""


class Memories(Model):
    """The trained part of an adapted model; ``adapted`` is the whole, which is no part of the state dict.

    Args:
        adapted: all but the trained part is frozen, and drops nothing out.
        recompute: keep the input of each layer alone for the backward pass, and compute the rest again.
        lora: rank of changes of the attention's projections, which are trained with the memories; 0: none.
        only_gates: of the memories train what writes, forgets and mixes, and neither maps nor M_0.

    Raises:
        ValueError: ``lora``, but peft is not installed.
    """

    adapted: Any
    added = ("lora",)

    def __init__(self, adapted: Any, recompute: bool = False, lora: int = 0, only_gates: bool = False):
        super().__init__()
        adapted.requires_grad_(False)
        if lora:
            self.lora = add_lora(adapted, lora).requires_grad_(True)
        self.memories = nn.ModuleDict(adapted.memories()).requires_grad_(True)
        for memory in self.memories.values() if only_gates else ():
            cast(Any, memory).freeze_maps()
        self.__dict__["adapted"] = adapted
        for module in adapted.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if recompute:
            older = adapted.gradient_checkpointing_enable  # its name before transformers 5.20
            getattr(adapted, "activation_checkpointing_enable", older)({"use_reentrant": False})

    def _apply(self, fn: Any, recurse: bool = True) -> Memories:
        """Move or convert the whole model."""
        self.adapted._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Memories:
        """Set the mode of the whole model."""
        self.adapted.train(mode)
        return super().train(mode)

    def state_bytes(self, length: int) -> int:
        """Bytes one sequence carries after ``length`` tokens, on a border of chunks."""
        return self.adapted.state_bytes(length)

    def forward(self, tokens_BT: Tensor, stage: str) -> Tensor:
        """Return [B] losses of transfer or tune; [B, T'] losses beyond the window of full, window and memory.

        Args:
            tokens_BT: [B, T + 1], inputs and targets.
            stage: transfer, tune, or what stands for the far tokens (`titans_core.adapt.attention.Far`).
        """
        adapted, options = self.adapted, self.adapted.options
        x_BTD, beyond = adapted.get_input_embeddings()(tokens_BT[:, :-1]), options.window + options.sinks
        if stage == "transfer":
            with torch.no_grad():
                adapted.encode(x_BTD, call := Pass(far="transfer"))
            return torch.stack(call.errors).mean(0)

        def features(far: Far) -> tuple[Tensor, ...]:
            switch_lora(adapted, far == "memory")  # the others are the source's
            return adapted.encode(x_BTD, Pass(far=far))[:, beyond:].split(HEAD_TOKENS, 1)

        if stage == "tune":
            with torch.no_grad():
                taught = features("full")
            parts = zip(features("memory"), taught, strict=True)
            return torch.cat([_Divergence.apply(*part, adapted.lm_head) for part in parts], 1).mean(1)
        switch_lora(adapted, stage == "memory")
        return adapted.nats(tokens_BT, cast(Far, stage))[:, beyond:]

    def weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights of the adapted model that are new, and what is added to the source's, by their names."""
        state = self.adapted.state_dict()
        return {name: x for name, x in state.items() if ".memory." in name}, lora_deltas(self.adapted)


class _Divergence(torch.autograd.Function):
    """[B, T] nats from the teacher's distribution to the student's, of inputs [B, T, D] of a frozen `Linear`.

    The gradient of the logits is (student - teacher), the probabilities, and is taken to the inputs at once:
    logits of all tokens would be the largest tensor, and to find them again costs two products more.
    """

    @staticmethod
    def forward(ctx: Any, student_BTD: Tensor, teacher_BTD: Tensor, head: nn.Linear) -> Tensor:
        """Return the divergences [B, T] in float32."""
        teacher = head(teacher_BTD).float().log_softmax(-1)
        logits = head(student_BTD)
        student = logits.float().log_softmax(-1)
        p = teacher.exp()
        nats = teacher.sub_(student).mul_(p).sum(-1)
        if ctx.needs_input_grad[0]:
            dlogits = student.exp_().sub_(p).to(logits.dtype)
            dx_BTD = dlogits @ head.weight.to(dlogits.dtype)
            ctx.save_for_backward(dx_BTD.to(student_BTD.dtype))
        return nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradient of the student's inputs."""
        (dx_BTD,) = ctx.saved_tensors
        return (gradients[0][..., None] * dx_BTD).to(dx_BTD.dtype), None, None


def add_lora(model: Any, rank: int) -> nn.ModuleDict:
    """Add LoRA to the projections of every attention: W x + B A x of rank ``rank``, B zero at first.

    All other weights of the model are frozen.

    Returns:
        The A and B of each layer, in float32; they stay in the model.

    Raises:
        ValueError: peft is not installed.
    """
    if find_spec("peft") is None:
        raise ValueError("peft is not installed; pip install peft")
    from peft import LoraConfig, inject_adapter_in_model  # pyright: ignore[reportMissingImports]

    family = model.family
    names = rf".*\.{family.attention}\.({'|'.join(family.projections)})"
    transposed = any(type(layer).__name__ == "Conv1D" for layer in model.modules())
    options: Any = {"r": rank, "lora_alpha": rank, "fan_in_fan_out": transposed}
    inject_adapter_in_model(LoraConfig(target_modules=names, **options), model)
    parts = {
        name: nn.ModuleDict({"A": layer.lora_A[NAME], "B": layer.lora_B[NAME]})
        for name, layer in _layers(model)
    }
    return nn.ModuleDict({name.replace(".", "-"): part.float() for name, part in parts.items()})


def switch_lora(model: Any, enabled: bool) -> None:
    """Switch the changes of all layers on or off; without any nothing happens."""
    for _, layer in _layers(model):
        layer.enable_adapters(enabled)


def lora_deltas(model: Any) -> dict[str, Tensor]:
    """Return what is to be added to the weights of the source, by their names there."""
    return {f"{name}.weight": layer.get_delta_weight(NAME).detach() for name, layer in _layers(model)}


def _layers(model: Any) -> list[tuple[str, Any]]:
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A")]
