"""Reads the nodes of a recorded CUDA graph through cuda-bindings, which is imported on use."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from stepgraph.engine.backends.nodes import Node, Nodes

_MAX_PARAMETERS = 4096
"""A bound on what the driver reports; CUDA's own limit is 32,764 bytes for all parameters."""


def read_nodes(graph: int) -> Nodes | None:
    """Return the nodes of the graph with this handle, or None if cuda-bindings is missing or refuses."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    handle = driver.CUgraph(init_value=graph)
    error, _, count = driver.cuGraphGetNodes(handle)
    if int(error):
        return None
    error, nodes, count = driver.cuGraphGetNodes(handle, count)
    if int(error):
        return None
    return Nodes(tuple(_node(driver, node) for node in nodes[:count]), _memory())


def _memory() -> tuple[tuple[int, int], ...]:
    """The ranges that torch's allocator holds."""
    segments = torch.cuda.memory_snapshot()
    return tuple(sorted((segment["address"], segment["address"] + segment["total_size"]) for segment in segments))


def _node(driver: Any, node: Any) -> Node:
    error, kind = driver.cuGraphNodeGetType(node)
    kinds = driver.CUgraphNodeType
    if int(error):
        return Node("unknown")
    if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
        return _kernel(driver, node)
    if kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
        return _copy(driver, node)
    if kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
        return _fill(driver, node)
    return Node(str(kind.name).removeprefix("CU_GRAPH_NODE_TYPE_").lower())


def _kernel(driver: Any, node: Any) -> Node:
    error, given = driver.cuGraphKernelNodeGetParams(node)
    if int(error):
        return Node("kernel")
    function = given.func
    if function is None or not int(function):  # a kernel of a library that is loaded late has no function yet
        error, function = driver.cuKernelGetFunction(given.kern)
        if int(error):
            return Node("kernel")
    error, name = driver.cuFuncGetName(function)
    launch = (
        *(given.gridDimX, given.gridDimY, given.gridDimZ),
        *(given.blockDimX, given.blockDimY, given.blockDimZ),
        given.sharedMemBytes,
    )
    known = "" if int(error) else _demangled(name.decode(errors="replace"))
    return Node("kernel", known, tuple(map(int, launch)), _parameters(driver, function, given))


def _parameters(driver: Any, function: Any, given: Any) -> tuple[bytes, ...]:
    """The bytes of each parameter. A kernel that was given one packed buffer has none that could be told apart."""
    start = int(given.kernelParams or 0)
    if not start or not hasattr(driver, "cuFuncGetParamInfo"):
        return ()
    sizes: list[int] = []
    while len(sizes) < _MAX_PARAMETERS:
        error, _, size = driver.cuFuncGetParamInfo(function, len(sizes))
        if int(error):
            break
        sizes.append(int(size))
    if not sizes:
        return ()
    pointers = (ctypes.c_void_p * len(sizes)).from_address(start)
    return tuple(ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True) if pointer)


def _copy(driver: Any, node: Any) -> Node:
    error, given = driver.cuGraphMemcpyNodeGetParams(node)
    if int(error):
        return Node("copy")
    extent = (given.WidthInBytes, given.Height, given.Depth)
    ends = (given.srcHost, given.srcDevice, given.dstHost, given.dstDevice)
    return Node("copy", "", tuple(map(int, extent)), tuple(_word(int(end or 0)) for end in ends))


def _fill(driver: Any, node: Any) -> Node:
    error, given = driver.cuGraphMemsetNodeGetParams(node)
    if int(error):
        return Node("fill")
    extent = (given.width, given.height, given.elementSize)
    value = int(given.value).to_bytes(4, "little")
    return Node("fill", "", tuple(map(int, extent)), (_word(int(given.dst)), value))


def _word(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _demangled(name: str) -> str:
    """The kernel's name as C++ writes it, where torch can tell."""
    demangle = getattr(torch._C, "_demangle", None)
    return str(demangle(name)) if demangle is not None else name
