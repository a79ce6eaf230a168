"""Without a GPU, `cuda` stands for the CPU: in the script's own process, and only while the script runs.

This is the one exception to the rule that torch.cuda is never mocked. A script written for a GPU names it in many
places. To look at its steps on a laptop, those names must mean something. Two mechanisms give them a meaning:

- `DeviceMode`, a TorchFunctionMode, sees every call of torch that the script makes. It takes `cuda` out of the
  arguments and remembers which memory would be on the GPU. To the script, such tensors say `cuda:0`; to torch and to
  stepgraph they say the truth. Moving them between host and "GPU" makes a copy, as it does there.
- `mapped` replaces names of `torch.cuda` and of `torch.accelerator`, and those few elsewhere that take a device in
  another way.

A wait for the device (`synchronize`, `.cpu()`) is reported. A name of torch.cuda that has no meaning here, and any
failure that says that a GPU is missing, ends the script: nothing can be judged.

What does not behave as on a GPU:

- Autocast uses the CPU's list of operators; float16 is slower here, and its results differ.
- There is one random generator, the CPU's: `torch.cuda.manual_seed` seeds it too.
- Sizes of memory are 0; times of events are the host's.
- Results that autograd computes, seen in a custom backward, say `cpu`.
- `Tensor.numpy()` of a tensor that would be on the GPU works here, and raises there.
- Threads that the script starts do not see the mapping of arguments.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from stepgraph.core.frames import is_engine, is_user
from stepgraph.core.storage import storage_of

__all__ = ["CudaOnCpu", "missing_gpu"]

_CPU = torch.device("cpu")
_MEMORY_BYTES = 80 * 2**30
_CAPABILITY = (9, 0)
_GPU_ERRORS = (
    "Torch not compiled with CUDA",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "CUDA driver version is insufficient",
    "from the 'CUDA' backend",
    "has no attribute '_cuda",
    "has no attribute '_nccl",
    "No available kernel",
    "active drivers",
    "libcuda",
    "libcudart",
)
_GPU_PACKAGES = (
    "triton",
    "transformer_engine",
    "transformer_engine_torch",
    "flash_attn",
    "apex",
    "mamba_ssm",
    "xformers",
)


def missing_gpu(error: BaseException) -> str | None:
    """Return what a script's error says it needs a GPU for, or None if the error is the script's own."""
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        return f"{package}, which is not installed here" if package in _GPU_PACKAGES else None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _GPU_PACKAGES:
            kernel = getattr(getattr(frame.f_locals.get("self"), "fn", None), "__name__", frame.f_code.co_name)
            return f"{kernel}, a kernel of {package}"
        trace = trace.tb_next
    text = str(error)
    return text.splitlines()[0] if any(piece in text for piece in _GPU_ERRORS) else None


Result = TypeVar("Result")


class _DeviceMemory:
    """Remembers which storages would be in the memory of a GPU."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        self._limit = 1024

    def add(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._known:
            return
        if len(self._known) >= self._limit:
            self._known = {key: ref for key, ref in self._known.items() if not ref.expired()}
            self._limit = max(1024, 2 * len(self._known))
        self._known[storage._cdata] = StorageWeakRef(storage)  # while it lives, no other storage has this number

    def __contains__(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        return storage is not None and storage._cdata in self._known


class DeviceMode(TorchFunctionMode):
    """Runs what names `cuda` on the CPU, and answers the script's questions about devices as a GPU would."""

    def __init__(self, synchronizes: Callable[[str], None]) -> None:
        super().__init__()
        self._synchronizes = synchronizes
        self._memory = _DeviceMemory()
        self._pinned = _DeviceMemory()
        tensor: Any = torch.Tensor
        self._special: dict[Any, Callable[..., Any]] = {
            tensor.to: self._to,
            tensor.cuda: self._cuda,
            tensor.cpu: lambda _, t, *a, **k: self._moved(t, False, "Tensor.cpu", lambda: t.clone()),
            tensor.type: self._type,
            tensor.pin_memory: lambda _, t, *a: self._pinned_copy(t),
            tensor.is_pinned: lambda _, t, *a: t in self._pinned,
            tensor.get_device: lambda f, t: self._answer(t, 0, f(t)),
            tensor.device.__get__: lambda f, t, *a: self._answer(t, torch.device("cuda", 0), f(t)),
            tensor.is_cuda.__get__: lambda f, t, *a: self._answer(t, True, f(t)),
            tensor.is_cpu.__get__: lambda f, t, *a: self._answer(t, False, f(t)),
            tensor.data.__set__: self._set_data,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = self._special.get(func)
        if special is not None:
            return special(func, *args, **kwargs)
        if func in _FACTORIES and "device" not in kwargs:
            result = func(*args, **(kwargs | {"pin_memory": False} if "pin_memory" in kwargs else kwargs))
            is_cuda = _default_is_cuda() if func not in _LIKE else self._any_on_device(args)
            return self._marked(result) if is_cuda else result
        if "device" in kwargs:
            return self._made(func, args, kwargs)
        result = func(*args, **kwargs)
        return self._marked(result) if self._any_on_device((*args, *kwargs.values())) else result

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor would be on the GPU."""
        return tensor in self._memory

    def _any_on_device(self, values: Iterable[Any]) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                if value in self._memory:
                    return True
            elif isinstance(value, (list, tuple)) and self._any_on_device(value):
                return True
        return False

    def _marked(self, result: Result) -> Result:
        if isinstance(result, torch.Tensor):
            self._memory.add(result)
        elif isinstance(result, (list, tuple)):
            for part in result:
                self._marked(part)
        return result

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function with a `device=`."""
        device, named = kwargs["device"], dict(kwargs)
        is_cuda = _is_cuda(device) if device is not None else _default_is_cuda() or self._any_on_device(args)
        if device is not None and _is_cuda(device):
            named["device"] = _CPU
        if named.get("pin_memory"):
            named["pin_memory"] = False
        result = func(*args, **named)
        if not is_cuda:
            return result
        if func in _FROM_HOST and not self._any_on_device(args):
            self._synchronizes(f"torch.{func.__name__}")
            result = result.clone()  # a GPU's copy does not share memory with the array
        return self._marked(result)

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.to`, in all its forms."""
        other = next((arg for arg in (*args[:1], kwargs.get("other")) if isinstance(arg, torch.Tensor)), None)
        device = kwargs.get("device", args[0] if args and isinstance(args[0], (str, torch.device, int)) else None)
        if other is not None:
            device = torch.device("cuda" if other in self._memory else "cpu")
        if device is None or isinstance(device, bool):
            return self._kept(func, tensor, args, kwargs)
        is_cuda = isinstance(device, int) or _is_cuda(device)
        if is_cuda and other is None:
            args = (_CPU, *args[1:]) if "device" not in kwargs else args
            kwargs = kwargs | {"device": _CPU} if "device" in kwargs else kwargs

        def copied() -> torch.Tensor:
            result: torch.Tensor = func(tensor, *args, **kwargs)
            return result.clone() if _storage_number(result) == _storage_number(tensor) else result

        if is_cuda == (tensor in self._memory) or (not is_cuda and torch.device(device).type != "cpu"):
            return self._kept(func, tensor, args, kwargs)
        return self._moved(tensor, is_cuda, "" if _is_async(args, kwargs) else "Tensor.to", copied)

    def _cuda(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._moved(tensor, True, "" if _is_async(args, kwargs) else "Tensor.cuda", lambda: tensor.clone())

    def _kept(self, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        result = func(tensor, *args, **kwargs)
        return self._marked(result) if tensor in self._memory else result

    def _moved(self, tensor: torch.Tensor, is_cuda: bool, name: str, copy: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Copy a tensor to the other memory; `name` is what waits for the copy, if anything does."""
        if (tensor in self._memory) == is_cuda:
            return tensor
        if name:
            self._synchronizes(name)
        result = copy()
        return self._marked(result) if is_cuda else result

    def _type(self, func: Any, tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            return self._marked(func(tensor, dtype.replace("torch.cuda.", "torch."), *args, **kwargs))
        return self._kept(func, tensor, () if dtype is None else (dtype, *args), kwargs)

    def in_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward. Hooks and recomputed forwards in it are the script's code: the mapping holds there too."""
        if self._is_on():
            return original(*args, **kwargs)
        with self:
            return original(*args, **kwargs)

    def in_device_context(
        self, original: Any, context: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make a tensor in the `with` of a device, or with a default device. One of the two modes runs in the other."""
        kwargs = kwargs or {}
        is_named = func not in _FACTORIES or kwargs.get("device") is not None
        if _is_cuda(context.device) and not is_named and not self._is_on():
            kwargs = kwargs | {"device": _CPU}
        return original(context, func, types, args, kwargs)

    def _is_on(self) -> bool:
        return any(mode is self for mode in torch.overrides._get_current_function_mode_stack())

    def _pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor in self._pinned:
            return tensor
        copy = tensor.clone()
        self._pinned.add(copy)
        return copy

    def _answer(self, tensor: torch.Tensor, gpu: Any, truth: Any) -> Any:
        """Answer a question about a tensor's device: to the script as on a GPU, to torch and stepgraph as it is."""
        return gpu if tensor in self._memory and is_user(_asking_file()) else truth

    def _set_data(self, func: Any, tensor: torch.Tensor, value: torch.Tensor) -> Any:
        is_cuda = value in self._memory
        result = func(tensor, value)
        if is_cuda:
            self._memory.add(tensor)
        return result


def _asking_file() -> str:
    """Return the file of the code that asks; modes may stand between it and this one."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        code = frame.f_code
        if code.co_filename != __file__ and code.co_name != "__torch_function__":
            return code.co_filename
        frame = frame.f_back
    return ""


def _is_async(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of a copy say `non_blocking`: the only flag that may stand before `copy`."""
    flags = [arg for arg in args if isinstance(arg, bool)]
    return bool(kwargs.get("non_blocking", flags[0] if flags else False))


def _storage_number(tensor: torch.Tensor) -> int | None:
    storage = storage_of(tensor)
    return None if storage is None else int(storage._cdata)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def _default_is_cuda() -> bool:
    """Whether tensors are made on the GPU where no device is named: `set_default_device`."""
    return _is_cuda(torch.utils._device.CURRENT_DEVICE)


def _device_factories() -> frozenset[Any]:
    from torch.utils._device import _device_constructors

    return frozenset(_device_constructors())


_FACTORIES = _device_factories()
_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray)
_LIKE = frozenset(function for function in _FACTORIES if str(getattr(function, "__name__", "")).endswith("_like"))


class Stream:
    """A CUDA stream on the CPU: all work is done when a call returns."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = torch.device("cuda", 0), priority
        self.cuda_stream = self.stream_id = id(self)

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def record_event(self, event: Event | None = None) -> Event:
        found = Event() if event is None else event
        found.record(self)
        return found

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: there is one stream."""


class Event:
    """A CUDA event on the CPU, with the host's time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end_event: Event) -> float:
        if self._time is None or end_event._time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1000 * (end_event._time - self._time)


class _Nothing(contextlib.AbstractContextManager["_Nothing"]):
    """A context manager that takes any arguments and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.idx, self.prev_idx = 0, 0

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Take any arguments and do nothing."""


class CudaOnCpu:
    """The mapping. `synchronizes` is called with the name of each wait, `refuse` with each name that is not mapped."""

    def __init__(
        self,
        synchronizes: Callable[[str], None],
        refuse: Callable[[str], NoReturn],
        note: Callable[[str], None],
    ) -> None:
        self._synchronizes, self._refuse, self._note = synchronizes, refuse, note
        self._mode = DeviceMode(synchronizes)
        self._device = 0
        self._streams: list[Any] = []

    @contextlib.contextmanager
    def mapped(self) -> Iterator[None]:
        """Map `cuda` to the CPU in this block."""
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*pin_memory.*no accelerator")
            names = {**self._questions(), **self._random(), **self._memory_names(), **self._stream_names()}
            for name, value in names.items():
                self._replace(stack, name, value)
            self._refuse_others(stack, names)
            self._map_accelerator(stack, names)
            self._map_autocast(stack)
            self._map_elsewhere(stack)
            stack.enter_context(self._mode)
            yield

    def _questions(self) -> dict[str, Any]:
        """Names that ask for devices, or choose one."""
        properties = types.SimpleNamespace(
            name="CPU in the place of a GPU",
            major=_CAPABILITY[0],
            minor=_CAPABILITY[1],
            total_memory=_MEMORY_BYTES,
            multi_processor_count=132,
            max_threads_per_multi_processor=2048,
            shared_memory_per_block=49152,
            shared_memory_per_multiprocessor=233472,
            regs_per_multiprocessor=65536,
            warp_size=32,
            L2_cache_size=50 * 2**20,
            is_integrated=False,
            is_multi_gpu_board=False,
            gcnArchName="",
        )
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": _nothing,
            "device_count": lambda: max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
            "current_device": lambda: self._device,
            "set_device": self._set_device,
            "device": _Nothing,
            "device_of": _Nothing,
            "get_device_name": lambda device=None: properties.name,
            "get_device_capability": lambda device=None: _CAPABILITY,
            "get_device_properties": lambda device=None: properties,
            "get_arch_list": lambda: ["sm_90"],
            "is_bf16_supported": lambda including_emulation=True: True,
            "is_tf32_supported": lambda: True,
            "can_device_access_peer": lambda device, peer: False,
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": _nothing,
            "is_current_stream_capturing": lambda: False,
            "ipc_collect": _nothing,
            "synchronize": lambda device=None: self._synchronizes("torch.cuda.synchronize"),
        }

    def _set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        self._device = index or 0

    def _random(self) -> dict[str, Any]:
        """Names of random generators: all are the CPU's."""
        generator = torch.default_generator

        def seed_with(seed: int) -> None:
            generator.manual_seed(int(seed))

        return {
            "manual_seed": seed_with,
            "manual_seed_all": seed_with,
            "seed": generator.seed,
            "seed_all": generator.seed,
            "initial_seed": generator.initial_seed,
            "get_rng_state": lambda device="cuda": generator.get_state(),
            "get_rng_state_all": lambda: [generator.get_state()],
            "set_rng_state": lambda new_state, device="cuda": generator.set_state(new_state) and None,
            "set_rng_state_all": lambda new_states: [generator.set_state(state) for state in new_states] and None,
            "default_generators": (generator,),
        }

    def _memory_names(self) -> dict[str, Any]:
        """Names of the allocator and its statistics."""
        zero = (
            *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
            *("memory_cached", "max_memory_cached", "memory_usage", "utilization", "device_memory_used"),
        )
        silent = (
            *("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
            *("reset_max_memory_allocated", "reset_max_memory_cached", "set_per_process_memory_fraction"),
            *("reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats"),
        )
        return {
            **dict.fromkeys(zero, lambda device=None: 0),
            **dict.fromkeys(silent, _nothing),
            "memory_stats": lambda device=None: collections.defaultdict(int),
            "memory_summary": lambda device=None, abbreviated=False: "no GPU: memory is not counted",
            "memory_snapshot": lambda *args, **kwargs: [],
            "mem_get_info": lambda device=None: (_MEMORY_BYTES, _MEMORY_BYTES),
            "get_allocator_backend": lambda: "native",
        }

    def _stream_names(self) -> dict[str, Any]:
        """Names of streams and events. The classes report their waits."""
        synchronizes = self._synchronizes

        class ReportingEvent(Event):
            def synchronize(self) -> None:
                synchronizes("torch.cuda.Event.synchronize")

        class ReportingStream(Stream):
            def synchronize(self) -> None:
                synchronizes("torch.cuda.Stream.synchronize")

            def record_event(self, event: Event | None = None) -> Event:
                return super().record_event(ReportingEvent() if event is None else event)

        default = ReportingStream()

        @contextlib.contextmanager
        def stream_context(stream: Any) -> Iterator[None]:
            self._streams.append(stream or current())
            try:
                yield
            finally:
                self._streams.pop()

        def current(device: Any = None) -> Any:
            return self._streams[-1] if self._streams else default

        def choose(stream: Any) -> None:
            self._streams[-1:] = [stream]

        return {
            "Event": ReportingEvent,
            "Stream": ReportingStream,
            "ExternalStream": ReportingStream,
            "StreamContext": stream_context,
            "stream": stream_context,
            "current_stream": current,
            "default_stream": lambda device=None: default,
            "set_stream": choose,
        }

    def _replace(self, stack: contextlib.ExitStack, name: str, value: Any) -> None:
        """Replace a name of torch.cuda, in the module that defines it too."""
        original = getattr(torch.cuda, name, None)
        if original is None:
            return
        if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
            value = _for_scripts(original, value)
        for module in (torch.cuda, *_submodules()):
            if vars(module).get(name) is original:
                _set(stack, module, name, value)

    def _refuse_others(self, stack: contextlib.ExitStack, names: Iterable[str]) -> None:
        """Refuse all other functions and classes of torch.cuda."""
        for name, value in list(vars(torch.cuda).items()):
            home = str(getattr(value, "__module__", ""))
            if name.startswith("_") or name in names or not home.startswith("torch.cuda"):
                continue
            if isinstance(value, type):
                if issubclass(value, BaseException):
                    continue
                if name.endswith(("Tensor", "Storage")):
                    _set(stack, torch.cuda, name, getattr(torch, name, value))
                else:
                    self._replace(stack, name, self._refused_class(name, value))
            elif callable(value):
                self._replace(stack, name, self._refused_function(name, value))
        for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
            _set(stack, torch.cuda.nvtx, name, lambda *args, **kwargs: 0)
        _set(stack, torch.cuda.nvtx, "range", _Nothing)
        _set(stack, torch.cuda, "_lazy_init", _nothing)

    def _refused_function(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if is_user(sys._getframe(2).f_code.co_filename):
                self._refuse(f"torch.cuda.{name}")
            return original(*args, **kwargs)

        return refused

    def _refusing(self, name: str) -> Callable[..., NoReturn]:
        return lambda *args, **kwargs: self._refuse(name)

    def _refused_class(self, name: str, original: type) -> type:
        refuse = self._refuse

        class Refused(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                if is_user(sys._getframe(1).f_code.co_filename):
                    refuse(f"torch.cuda.{name}")
                return original(*args, **kwargs)

            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, original)

        return Refused(name, (), {"__module__": "torch.cuda"})

    def _map_accelerator(self, stack: contextlib.ExitStack, names: Mapping[str, Any]) -> None:
        """Let the script find its GPU through torch.accelerator. Torch itself finds none: it would use its streams."""
        own = {
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "synchronize": lambda device=None: self._synchronizes("torch.accelerator.synchronize"),
            "empty_host_cache": _nothing,
            "get_device_capability": None,  # not the one of torch.cuda
        }
        truth = {"current_accelerator": _nothing, "is_available": lambda: False, "device_count": lambda: 0}
        for name in torch.accelerator.__all__:
            mapped = own[name] if name in own else names.get(_OF_ACCELERATORS.get(name, name))
            if mapped is None:
                mapped = self._refusing(f"torch.accelerator.{name}")
            original = getattr(torch.accelerator, name)
            _set(stack, torch.accelerator, name, _for_user(mapped, truth.get(name, original)))

    def _map_autocast(self, stack: contextlib.ExitStack) -> None:
        """Autocast for `cuda` is the CPU's, with CUDA's default type."""
        kind: Any = torch.amp.autocast_mode.autocast
        begin = kind.__init__

        def made(this: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
            if str(device_type).partition(":")[0] == "cuda":
                device_type, dtype = "cpu", torch.float16 if dtype is None else dtype
            begin(this, device_type, dtype, *args, **kwargs)

        _set(stack, kind, "__init__", made)
        for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
            _set(stack, torch, name, _with_cpu(getattr(torch, name)))
        _set(stack, torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu"))

    def _map_elsewhere(self, stack: contextlib.ExitStack) -> None:
        """Replace what takes a device outside of torch.cuda and is no function of tensors."""
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader

        dist: Any = torch.distributed
        _wrap(stack, torch.utils._device.DeviceContext, "__torch_function__", self._mode.in_device_context)
        _wrap(stack, torch.autograd, "_engine_run_backward", self._mode.in_backward)
        _wrap(stack, torch, "load", _load)
        _wrap(stack, torch, "compile", self._compile)
        _wrap(stack, DataLoader, "__init__", _without("pin_memory", "pin_memory_device"))
        _wrap(stack, DistributedDataParallel, "__init__", _without("device_ids", "output_device"))
        _set(stack, sys.modules["torch.nn.parallel.data_parallel"], "_get_available_device_type", lambda: None)
        _set(stack, torch, "Generator", _generator_class())
        _set(stack, torch.backends.cuda, "is_built", lambda: True)
        if dist.is_available():
            for module in (dist, dist.distributed_c10d):
                for name in ("init_process_group", "new_group"):
                    _wrap(stack, module, name, self._gloo)
                _set(stack, module, "is_nccl_available", lambda: True)
        stack.callback(delattr, torch.Tensor, "record_stream")
        tensors: Any = torch.Tensor
        tensors.record_stream = _nothing  # its arguments are read before any mode is asked
        for module in [value for name, value in sys.modules.items() if name.startswith("torch.optim.")]:
            name = "_get_capturable_supported_devices"
            if name in vars(module):
                _wrap(stack, module, name, lambda original, *args, **kwargs: [*original(*args, **kwargs), "cpu"])

    def _compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._note("torch.compile: the compiled code ran as eager code")
        torch.compiler.set_stance("force_eager")
        return original(*args, **kwargs)

    def _gloo(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        named = {name: value for name, value in kwargs.items() if name not in ("device_id", "pg_options")}
        if "nccl" in str(named.get("backend", "")):
            self._note("torch.distributed: NCCL's collectives ran on gloo")
            named["backend"] = "gloo"
        elif args and "nccl" in str(args[0]):
            self._note("torch.distributed: NCCL's collectives ran on gloo")
            args = ("gloo", *args[1:])
        return original(*args, **named)


def _submodules() -> list[types.ModuleType]:
    return [value for value in vars(torch.cuda).values() if isinstance(value, types.ModuleType) and _is_ours(value)]


def _is_ours(module: types.ModuleType) -> bool:
    return module.__name__.startswith("torch.cuda.")


def _set(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute, and set it back at the end."""
    before = vars(owner).get(name)
    if before is None:
        return
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before)


def _wrap(stack: contextlib.ExitStack, owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a function by one that is given it first."""
    original = vars(owner).get(name)
    if original is not None:

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        _set(stack, owner, name, wrapped)


def _for_scripts(original: Any, mapped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is mapped for the script and for torch, and the original for stepgraph."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_engine(sys._getframe(1).f_code.co_filename):
            return original(*args, **kwargs)
        return mapped(*args, **kwargs)

    return call


_OF_ACCELERATORS = {
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "device_index": "device",
    "get_memory_info": "mem_get_info",
}
"""Names of torch.accelerator by their names in torch.cuda, where these differ."""


def _for_user(mapped: Callable[..., Any], truth: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is mapped for the script and its libraries, and tells torch and stepgraph the truth."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_user(sys._getframe(1).f_code.co_filename):
            return mapped(*args, *kwargs.values())  # of one argument at most, which torch.cuda calls `device`
        return truth(*args, **kwargs)

    return call


def _with_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of torch's functions of autocast that takes `cuda`, also where it is left out, for `cpu`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if "device_type" in kwargs:
            args, kwargs = (kwargs["device_type"], *args), {}
        if not args or not isinstance(args[0], str):
            args = ("cuda", *args)
        return function("cpu" if args[0] == "cuda" else args[0], *args[1:], **kwargs)

    return call


def _without(*names: str) -> Callable[..., Any]:
    """Return a call that leaves arguments out."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{name: value for name, value in kwargs.items() if name not in names})

    return call


def _load(original: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    if map_location is None or _is_cuda(map_location):
        map_location = _CPU
    elif isinstance(map_location, dict):
        map_location = {key: "cpu" if _is_cuda(value) else value for key, value in map_location.items()}
    return original(f, map_location, *args, **kwargs)


def _generator_class() -> type:
    original: Any = torch.Generator

    class Generators(type):
        def __call__(cls, device: Any = "cpu") -> Any:
            return original(_CPU if _is_cuda(device) else device)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original)

        def __eq__(cls, other: object) -> bool:  # tables by class, made before this one, know it as the original
            return other is cls or other is original

        def __hash__(cls) -> int:
            return hash(original)

    return Generators("Generator", (), {"__module__": "torch"})
