"""Scripts that name `cuda` run on the CPU: each name that is mapped, and that all others are refused."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepgraph.core.errors import InvalidArgument
from stepgraph.engine.backends import backend_for
from stepgraph.tools.script.cuda_on_cpu import CudaOnCpu, missing_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is mapped")


class Refused(BaseException):
    pass


class Heard:
    """What the mapping reported."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.notes: list[str] = []

    def refuse(self, name: str) -> NoReturn:
        raise Refused(name)


ORIGINAL_GENERATOR = torch.Generator


@pytest.fixture
def heard() -> Iterator[Heard]:
    """The mapping, in force during a test."""
    heard = Heard()
    before = {name: value for name, value in vars(torch.cuda).items() if not name.startswith("__")}
    with CudaOnCpu(heard.waits.append, heard.refuse, heard.notes.append).mapped():
        yield heard
    assert {name: value for name, value in vars(torch.cuda).items() if not name.startswith("__")} == before
    assert not torch.cuda.is_available()
    assert not torch.accelerator.is_available()


def assert_on_gpu(tensor: torch.Tensor) -> None:
    """A tensor that says that it is on the GPU."""
    assert tensor.device.type == "cuda"
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert tensor.get_device() == 0


# -- tensors


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)])
def test_factory_functions_take_cuda(heard: Heard, device: Any) -> None:
    assert_on_gpu(torch.zeros(2, device=device))
    assert_on_gpu(torch.randn(2, 3, device=device, dtype=torch.bfloat16))
    assert_on_gpu(torch.arange(3, device=device))
    assert_on_gpu(torch.zeros(3).new_ones(2, device=device))
    assert heard.waits == []
    assert torch.zeros(2).device.type == "cpu"


def test_tensors_from_host_data_are_copied(heard: Heard) -> None:
    array = np.zeros(2, dtype=np.float32)
    there = torch.as_tensor(array, device="cuda")
    there += 1
    assert_on_gpu(there)
    assert array.tolist() == [0, 0]
    assert_on_gpu(torch.tensor([1.0], device="cuda"))
    assert heard.waits == ["torch.as_tensor", "torch.tensor"]


@pytest.mark.parametrize(
    "move",
    [
        lambda t: t.cuda(),
        lambda t: t.cuda(0),
        lambda t: t.to("cuda"),
        lambda t: t.to(torch.device("cuda:0")),
        lambda t: t.to(0),
        lambda t: t.to(device="cuda", dtype=torch.float32),
        lambda t: t.to("cuda", torch.float32),
        lambda t: t.to(torch.zeros(1, device="cuda")),
        lambda t: t.type("torch.cuda.FloatTensor"),
    ],
)
def test_tensor_moves_to_cuda_as_a_copy(heard: Heard, move: Any) -> None:
    host = torch.zeros(2)
    there = move(host)
    assert_on_gpu(there)
    assert move(there) is there or torch.equal(move(there), there)
    if "FloatTensor" not in str(move.__code__.co_consts):
        there.add_(1)
        assert host.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (lambda t: t.cpu(), "Tensor.cpu"),
        (lambda t: t.to("cpu"), "Tensor.to"),
        (lambda t: t.to(torch.zeros(1)), "Tensor.to"),
    ],
)
def test_tensor_moves_to_the_host_and_waits(heard: Heard, move: Any, name: str) -> None:
    there = torch.zeros(2, device="cuda")
    host = move(there)
    there.add_(1)
    assert host.tolist() == [0, 0]
    assert host.device.type == "cpu"
    assert heard.waits == [name]
    assert move(host) is host
    assert heard.waits == [name]


def test_copies_that_do_not_block_are_no_waits(heard: Heard) -> None:
    there = torch.zeros(2).pin_memory().to("cuda", non_blocking=True)
    assert_on_gpu(there.cuda(non_blocking=True))
    there.to("cpu", non_blocking=True)
    assert heard.waits == []
    torch.zeros(2).cuda()
    assert heard.waits == ["Tensor.cuda"]


def test_results_are_where_their_inputs_are(heard: Heard) -> None:
    x = torch.ones(2, 2, device="cuda", requires_grad=True)
    y = x.exp().sum()
    y.backward()
    assert x.grad is not None
    for tensor in (y, x.grad, x.detach(), x[0], x.data, torch.zeros_like(x), x.new_zeros(1), *x.unbind()):
        assert_on_gpu(tensor)
    assert torch.zeros_like(x, device="cpu").device.type == "cpu"
    assert torch.zeros_like(torch.zeros(1)).device.type == "cpu"


def test_modules_move_and_say_so(heard: Heard) -> None:
    made = nn.Linear(2, 2, device="cuda")
    for module in (made, nn.Linear(2, 2).cuda(), nn.BatchNorm1d(2).to("cuda"), copy.deepcopy(made)):
        for tensor in (*module.parameters(), *module.buffers()):
            assert_on_gpu(tensor)
    before = made.weight.data_ptr()
    made.to("cuda")
    assert made.weight.data_ptr() == before
    assert {p.device.type for p in made.cpu().parameters()} == {"cpu"}


def test_engine_and_torch_see_the_cpu(heard: Heard) -> None:
    x = torch.zeros(2, device="cuda")
    assert "cuda" not in repr(x)
    assert backend_for("cpu").name == "tape"
    with pytest.raises(InvalidArgument, match="sees no GPU"):
        backend_for("cuda")


def test_default_device_and_device_context(heard: Heard) -> None:
    with torch.device("cuda"):
        assert_on_gpu(torch.zeros(2))
    torch.set_default_device("cuda")
    assert_on_gpu(torch.zeros(2))
    assert_on_gpu(nn.Linear(2, 2).weight)
    torch.set_default_device(None)
    assert torch.zeros(2).device.type == "cpu"


def test_recomputed_forwards_in_backward_are_mapped(heard: Heard) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        assert_on_gpu(torch.zeros(2, device="cuda"))
        return x * torch.ones(2, device="cuda")

    x = torch.ones(2, device="cuda", requires_grad=True)
    checkpoint(forward, x, use_reentrant=False).sum().backward()
    checkpoint(forward, x, use_reentrant=True).sum().backward()


def test_files_saved_on_a_gpu_load(heard: Heard) -> None:
    for place in (None, "cuda", "cuda:0", torch.device("cuda"), {"cuda:0": "cuda:0"}):
        file = io.BytesIO()
        torch.save({"x": torch.ones(2, device="cuda")}, file)
        file.seek(0)
        assert torch.load(file, map_location=place)["x"].tolist() == [1, 1]


def test_generator_is_known_to_tables_by_class(heard: Heard) -> None:
    assert {ORIGINAL_GENERATOR: "known"}[torch.Generator] == "known"
    assert torch.Generator != torch.Tensor


def test_generators_take_cuda(heard: Heard) -> None:
    generator = torch.Generator(device="cuda")
    generator.manual_seed(3)
    assert isinstance(generator, torch.Generator)
    first = torch.randn(2, device="cuda", generator=generator)
    again = torch.randn(2, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    assert torch.equal(first, again)


# -- torch.cuda


def test_devices_are_there(heard: Heard) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert torch.cuda.device_count() == 1
    torch.cuda.set_device("cuda:0")
    torch.cuda.set_device(torch.device("cuda"))
    torch.cuda.set_device(0)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_capability("cuda:0") == (9, 0)
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor) == (9, 0)
    assert properties.total_memory > 2**30
    assert torch.cuda.get_device_name(0) == properties.name
    assert torch.cuda.is_bf16_supported()
    assert torch.backends.cuda.is_built()
    with torch.cuda.device(0), torch.cuda.device_of(torch.zeros(1)):
        assert_on_gpu(torch.zeros(1, device="cuda"))


def test_ranks_see_a_device_each(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.device_count() == 4
    torch.cuda.set_device(3)
    assert torch.cuda.current_device() == 3
    assert_on_gpu(torch.zeros(1, device="cuda:3"))


def test_seeds_and_states_are_the_cpus(heard: Heard) -> None:
    for seed in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.manual_seed):
        seed(5)
        first = torch.randn(2, device="cuda")
        seed(5)
        assert torch.equal(first, torch.randn(2, device="cuda"))
    state, states = torch.cuda.get_rng_state(), torch.cuda.get_rng_state_all()
    first = torch.randn(2, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.randn(2, device="cuda"))
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(first, torch.randn(2, device="cuda"))
    assert torch.cuda.initial_seed() == 5
    with torch.random.fork_rng():
        inner = torch.randn(2, device="cuda")
    assert torch.equal(inner, torch.randn(2, device="cuda"))


def test_streams_and_events_run_at_once(heard: Heard) -> None:
    side, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    side.wait_stream(torch.cuda.current_stream())
    start.record()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        x = torch.zeros(2, device="cuda") + 1
        x.record_stream(side)
        side.wait_event(start)
        done = side.record_event()
    end.record(side)
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    torch.cuda.current_stream().wait_event(done)
    assert done.query()
    assert side.query()
    assert heard.waits == []
    end.synchronize()
    side.synchronize()
    torch.cuda.synchronize()
    torch.cuda.synchronize("cuda:0")
    names = ["torch.cuda.Event.synchronize", "torch.cuda.Stream.synchronize", *2 * ["torch.cuda.synchronize"]]
    assert heard.waits == names
    assert start.elapsed_time(end) >= 0


def test_memory_names_answer(heard: Heard) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 0
    assert torch.cuda.memory_reserved(0) == torch.cuda.max_memory_reserved("cuda") == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert torch.cuda.mem_get_info()[0] > 0
    assert isinstance(torch.cuda.memory_summary(), str)
    torch.cuda.memory.empty_cache()


def test_nvtx_ranges_do_nothing(heard: Heard) -> None:
    torch.cuda.nvtx.range_push("forward")
    torch.cuda.nvtx.mark("here")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("step"):
        pass


def test_pinned_memory_is_pinned(heard: Heard) -> None:
    pinned = torch.zeros(2).pin_memory()
    assert pinned.is_pinned()
    assert not torch.zeros(2).is_pinned()
    assert torch.empty(2, pin_memory=True).shape == (2,)


@pytest.mark.filterwarnings("error")
def test_data_loader_may_pin_memory(heard: Heard) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True):
        assert_on_gpu(batch.to("cuda", non_blocking=True))


def test_flags_of_backends_can_be_set(heard: Heard) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.enable_flash_sdp(True)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark = before


# -- mixed precision, compilers, processes


@pytest.mark.parametrize(
    ("context", "dtype"),
    [
        (lambda: torch.autocast("cuda"), torch.float16),
        (lambda: torch.autocast(device_type="cuda", dtype=torch.bfloat16), torch.bfloat16),
        (lambda: torch.amp.autocast("cuda", torch.float16), torch.float16),
        (lambda: torch.cuda.amp.autocast(), torch.float16),
        (lambda: torch.cuda.amp.autocast(dtype=torch.bfloat16), torch.bfloat16),
        (lambda: torch.autocast("cuda", enabled=False), torch.float32),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_autocast_casts_as_named(heard: Heard, context: Any, dtype: torch.dtype) -> None:
    module = nn.Linear(2, 2).cuda()
    with context():
        assert torch.is_autocast_enabled() == torch.is_autocast_enabled("cuda") == (dtype is not torch.float32)
        if dtype is not torch.float32:
            assert torch.get_autocast_dtype("cuda") is dtype
        assert module(torch.ones(1, 2, device="cuda")).dtype is dtype
    assert not torch.is_autocast_enabled()


@pytest.mark.parametrize("make", [lambda: torch.amp.GradScaler("cuda"), lambda: torch.cuda.amp.GradScaler()])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_grad_scaler_scales_and_skips(heard: Heard, make: Any) -> None:
    model, scaler = nn.Linear(2, 1).cuda(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2, device="cuda")).sum() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (factor != 1.0)
    assert scaler.is_enabled()
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"foreach": True}])
def test_optimizers_step_with_options_of_gpus(heard: Heard, options: dict[str, bool]) -> None:
    model = nn.Linear(2, 1, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    assert_on_gpu(optimizer.state[model.weight]["exp_avg"])


def test_accelerator_of_a_script_is_cuda(heard: Heard) -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 1
    device = torch.accelerator.current_accelerator(check_available=True)
    assert device == torch.device("cuda")
    torch.accelerator.set_device_index(0)
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.memory_allocated(device_index=0) == 0
    assert torch.accelerator.current_stream().query()
    assert_on_gpu(torch.ones(2, device=device))
    assert heard.waits == []
    torch.accelerator.synchronize()
    assert heard.waits == ["torch.accelerator.synchronize"]
    with pytest.raises(Refused, match=r"torch\.accelerator\.get_device_capability"):
        torch.accelerator.get_device_capability()


def test_torch_itself_finds_no_accelerator(heard: Heard) -> None:
    """A build of torch for CUDA would ask a driver that is not there for its streams."""
    asked: dict[str, Any] = {"torch": torch}
    source = "answers = torch.accelerator.current_accelerator(check_available=True), torch.accelerator.is_available()"
    exec(compile(source, torch.optim.__file__, "exec"), asked)
    assert asked["answers"] == (None, False)


def test_compiled_code_runs_as_eager_and_is_noted(heard: Heard) -> None:
    model = torch.compile(nn.Linear(2, 1).cuda(), mode="reduce-overhead")
    try:
        model(torch.ones(1, 2, device="cuda")).sum().backward()
    finally:
        torch.compiler.set_stance("default")
    assert list(model.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
    assert heard.notes == ["torch.compile: the compiled code ran as eager code"]


def test_data_parallel_runs_its_module(heard: Heard) -> None:
    model = nn.DataParallel(nn.Linear(2, 1)).cuda()
    assert_on_gpu(model(torch.ones(1, 2, device="cuda")))


@pytest.fixture
def one_rank(heard: Heard, tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    yield
    torch.distributed.destroy_process_group()


def test_nccl_is_gloo(heard: Heard, one_rank: None) -> None:
    assert torch.distributed.get_backend() == "gloo"
    torch.distributed.new_group(backend="nccl")
    x = torch.ones(2, device="cuda")
    torch.distributed.all_reduce(x)
    assert_on_gpu(x)
    assert set(heard.notes) == {"torch.distributed: NCCL's collectives ran on gloo"}
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1).cuda(), device_ids=[0], output_device=0)
    model(x[None]).sum().backward()


# -- what is not mapped


@pytest.mark.parametrize("name", ["CUDAGraph", "graph", "graph_pool_handle", "make_graphed_callables", "MemPool"])
def test_other_names_are_refused_by_name(heard: Heard, name: str) -> None:
    with pytest.raises(Refused, match=f"torch.cuda.{name}"):
        getattr(torch.cuda, name)(None)


def test_refused_classes_still_answer_isinstance(heard: Heard) -> None:
    assert not isinstance(3, torch.cuda.CUDAGraph)


def test_every_public_function_is_mapped_or_refused(heard: Heard) -> None:
    """No function of torch.cuda is left that would say that CUDA is missing."""
    names = [name for name, value in vars(torch.cuda).items() if callable(value) and not name.startswith("_")]
    own = [name for name in names if str(getattr(getattr(torch.cuda, name), "__module__", "")).startswith("torch.cuda")]
    reached = []
    for name in own:
        with contextlib.suppress(Refused, TypeError):
            try:
                getattr(torch.cuda, name)()
            except (AssertionError, AttributeError, RuntimeError) as error:
                if missing_gpu(error):
                    reached.append(name)
    assert reached == []
    assert len(own) > 60


def raised(call: Any) -> BaseException:
    try:
        call()
    except Exception as error:  # noqa: BLE001 (any)
        return error
    raise AssertionError


def test_errors_of_missing_gpus_are_known() -> None:
    assert missing_gpu(raised(lambda: torch.zeros(2, device="cuda")))
    told = missing_gpu(raised(torch.cuda.current_stream))
    assert str(told).startswith(("Torch not compiled with CUDA enabled", "Found no NVIDIA driver"))  # by the build
    assert missing_gpu(RuntimeError("CUDA error: CUDA driver version is insufficient for CUDA runtime version"))
    assert missing_gpu(ModuleNotFoundError("no", name="transformer_engine.pytorch"))
    assert missing_gpu(ModuleNotFoundError("no", name="my_module")) is None
    assert missing_gpu(raised(lambda: 1 / 0)) is None


def test_error_in_a_triton_kernel_names_the_kernel() -> None:
    program = "class JITFunction:\n    def run(self):\n        raise RuntimeError('0 active drivers')\n"
    names: dict[str, Any] = {"__name__": "triton.runtime.jit"}
    exec(program, names)

    def softmax_kernel() -> None: ...

    function = names["JITFunction"]()
    function.fn = softmax_kernel
    assert missing_gpu(raised(function.run)) == "softmax_kernel, a kernel of triton"
