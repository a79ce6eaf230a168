"""A call's signature decides which graph may replay it: `key` makes it, `differences` compares two of them."""

from __future__ import annotations

from stepgraph.core.ambient import (
    AMBIENT_NAMES,
    AmbientReader,
    OwnMode,
    ambient_key,
    compiler_guards,
    reason_for_eager,
    saved_tensor_hooks,
    transform_around,
)
from stepgraph.engine.guards.signature.differences import Difference, find_differences
from stepgraph.engine.guards.signature.key import (
    Signature,
    argument_names,
    describe_leaf,
    leaf_key,
    leaf_keys,
    refuse_arguments,
    refuse_gradient,
    refuse_opaque,
    refuse_tensor_classes,
    tensor_key,
)

__all__ = [
    "AMBIENT_NAMES",
    "AmbientReader",
    "Difference",
    "OwnMode",
    "Signature",
    "ambient_key",
    "argument_names",
    "compiler_guards",
    "describe_leaf",
    "find_differences",
    "leaf_key",
    "leaf_keys",
    "reason_for_eager",
    "refuse_arguments",
    "refuse_gradient",
    "refuse_opaque",
    "refuse_tensor_classes",
    "saved_tensor_hooks",
    "tensor_key",
    "transform_around",
]
