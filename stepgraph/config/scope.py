"""The words for what is captured: `CudaGraphScope`, the implementations, and how a scope is read.

A scope may be written as a list, as enum members (ours, or Megatron's, which have numbers for values), or as one string
with commas or spaces between the words.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from stepgraph.core.errors import InvalidArgument, nearest
from stepgraph.core.wording import with_article


class CudaGraphScope(enum.StrEnum):
    """A part of the model, or the whole iteration, that is captured.

    Example:
        >>> cfg.model.cuda_graph_scope = [CudaGraphScope.attn, CudaGraphScope.moe_router]
        >>> "attn" in cfg.model.cuda_graph_scope
        True
    """

    full_iteration = "full_iteration"
    """All microbatches of an iteration, forward and backward, in one graph."""
    attn = "attn"
    """Attention."""
    mlp = "mlp"
    """The MLP of dense layers."""
    moe = "moe"
    """The whole MoE layer: router, dispatch, experts."""
    moe_router = "moe_router"
    """The router of MoE layers, with shared experts."""
    moe_preprocess = "moe_preprocess"
    """What prepares the dispatch of tokens to experts."""
    mamba = "mamba"
    """Mamba layers."""


VALID_CUDA_GRAPH_IMPLS = ["none", "local", "transformer_engine"]
"""The values of `cuda_graph_impl`."""
VALID_CUDA_GRAPH_SCOPES = [str(word) for word in CudaGraphScope]
"""The words of `cuda_graph_scope`."""
WHOLE_LAYERS = "full"
"""Megatron's word for an empty scope."""


def read_scope(scope: Any) -> list[str]:
    """Return the entries of a scope, given as a list or as one string with commas or spaces."""
    given: list[Any] = [*scope] if isinstance(scope, Iterable) and not isinstance(scope, (str, enum.Enum)) else [scope]
    texts = [entry.name if isinstance(entry, enum.Enum) else entry for entry in given]
    for entry in texts:
        if not isinstance(entry, str):
            raise InvalidArgument(
                f"the scope has {entry!r}, which is {with_article(type(entry))}",
                rule="scope",
                why="a scope is a list of words and paths.",
                fix='pass strings, such as ["attn", "layers.3.mlp"].',
            )
    return [word for entry in texts for word in entry.replace(",", " ").split()]


def read_words(scope: Any, name: str = "cuda_graph_scope") -> list[CudaGraphScope]:
    """Read a scope that consists of words alone, each once. None, "" and Megatron's "full" are whole layers."""
    words = [] if scope is None else read_scope(scope)
    if words == [WHOLE_LAYERS]:
        return []
    for word in words:
        if word not in VALID_CUDA_GRAPH_SCOPES:
            near = nearest(word, VALID_CUDA_GRAPH_SCOPES)
            listed = ", ".join(VALID_CUDA_GRAPH_SCOPES)
            raise InvalidArgument(
                f"{name} has {word!r}",
                rule="scope",
                why=f"the words of a scope are {listed}.",
                fix=f"did you mean {near!r}?" if near else f"use one of {listed}.",
            )
    return [CudaGraphScope(word) for word in dict.fromkeys(words)]
