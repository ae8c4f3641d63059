"""Packed documents one after the other, for the forms that have no layout of their own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from titans_kernels.memory.options import Inputs, Layers, Options, Result
from titans_kernels.memory.parts.layout import document_borders


def each_document(
    form: Callable[..., Result], inputs: Inputs, weights: Layers, momentum: Layers, options: Options
) -> Result:
    """Apply ``form`` to each packed document separately, or to all rows if nothing is packed."""
    if options.cu_seqlens is None:
        return form(inputs, weights, momentum, options)
    results = []
    for i, (start, end) in enumerate(pairwise(document_borders(options.cu_seqlens, inputs.q.shape[1]))):
        document = Inputs(*(x[:, start:end] for x in inputs))
        W, S = (tuple(x[i : i + 1] for x in part) for part in (weights, momentum))
        results.append(form(document, W, S, options) if start < end else (document.v, W, S))
    y, *layers = zip(*results, strict=True)
    W, S = (tuple(torch.cat(layer) for layer in zip(*part, strict=True)) for part in layers)
    return torch.cat(y, 1), W, S
