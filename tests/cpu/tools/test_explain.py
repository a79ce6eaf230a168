"""`explain`: messages of CUDA, torch, Megatron and Transformer Engine lead to cause and fix, unrelated ones nowhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import stepgraph
from stepgraph.commands.cli import app
from stepgraph.core import catalogue
from stepgraph.core.errors import CaptureError
from stepgraph.engine.backends import backend_for
from stepgraph.engine.call.failure import capture_error
from stepgraph.tools.explain import Evidence, explain

PLAIN = {"NO_COLOR": "1", "COLUMNS": "80"}
runner = CliRunner()
HINT = (
    "\nSearch for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)
CODES = {
    900: ("host-read", "operation not permitted when stream is capturing"),
    901: ("capture-invalidated", "operation failed due to a previous error during capture"),
    902: ("capture-merge", "operation would result in a merge of separate capture sequences"),
    903: ("capture-unmatched", "capture was not initiated in this stream"),
    904: ("unjoined-stream", "capturing stream has unjoined work"),
    905: ("capture-isolation", "dependency created on uncaptured work in another stream"),
    906: ("legacy-stream", "operation would make the legacy stream depend on a capturing blocking stream"),
    907: ("captured-event", "operation not permitted on an event last recorded in a capturing stream"),
    908: ("capture-thread", "attempt to terminate a thread-local capture sequence from another thread"),
    700: ("illegal-address", "an illegal memory access was encountered"),
    2: ("out-of-memory", "out of memory"),
}
"""CUDA's own texts."""
PIN_THREAD = """\
Traceback (most recent call last):
  File "train.py", line 40, in <module>
    with torch.cuda.graph(graph):
torch.AcceleratorError: CUDA error: operation failed due to a previous error during capture

During handling of the above exception, another exception occurred:

RuntimeError: Caught AcceleratorError in pin memory thread for device 0.
Original Traceback (most recent call last):
  File "/usr/lib/python3/dist-packages/torch/utils/data/_utils/pin_memory.py", line 41, in do_one_step
    data = pin_memory(data, device)
torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing
"""
ITEM = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/x/train.py", line 31, in <module>
[rank3]:     if loss.item() > 3:
[rank3]: torch.AcceleratorError: CUDA error: operation not permitted when
[rank3]: stream is capturing
[rank3]: During handling of the above exception, another exception occurred:
[rank3]: torch.AcceleratorError: CUDA error: operation failed due to a previous error during capture
"""
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB memory in use. Of the "
    "allocated memory 70.11 GiB is allocated by PyTorch{pools}, and 2.96 GiB is reserved by PyTorch but unallocated."
)
STALE = (
    "During CUDA graph capture, autograd node 'torch::autograd::AccumulateGrad' has a stale reference to the default "
    "stream (stream 0) from warmup. This will invalidate the capture"
)
TEXTS: tuple[tuple[str, str], ...] = (
    # torch
    (PIN_THREAD, "background-thread"),
    (ITEM, "host-read"),
    (OOM.format(pools=""), "out-of-memory"),
    (OOM.format(pools=", with 46.22 GiB allocated in private pools (e.g., CUDA Graphs)"), "graph-memory"),
    (
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.",
        "host-data",
    ),
    (
        "RuntimeError: Attempting CUDA graph capture of step() for an instance of AdamW but param_groups' capturable "
        "is False.",
        "optimizer-capturable",
    ),
    (STALE, "legacy-stream"),
    (
        "UserWarning: The AccumulateGrad node's stream does not match the stream of the node that produced the "
        "incoming gradient. This may incur unnecessary synchronization and break CUDA graph capture",
        "legacy-stream",
    ),
    (
        "RuntimeError: make_graphed_callables does not support the autocast caching. Please set `cache_enabled=False`.",
        "autocast-caching",
    ),
    (
        "AssertionError: In the beta API, sample_args for each callable must contain only Tensors. Other types are "
        "not allowed.",
        "non-tensor-input",
    ),
    (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0 Rank 1] "
        "Process group watchdog thread terminated with exception: CUDA error: operation not permitted when stream is "
        "capturing",
        "nccl-watchdog",
    ),
    ("RuntimeError: CUDA graphs must be captured on a non-default stream. (However, after", "default-stream"),
    ("UserWarning: The CUDA Graph is empty. This usually means that the graph was", "empty-graph"),
    (
        "RuntimeError: Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run.",
        "compile-overwritten",
    ),
    ("W0101 skipping cudagraphs due to mutated inputs (1 instances)", "compile-skips-graphs"),
    (
        "RuntimeError: Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture. If you need this call "
        "to be captured, please file an issue.",
        "reseed",
    ),
    # Megatron Core and Megatron Bridge
    (
        "AssertionError: check_for_nan_in_loss must be disabled when using full_iteration CUDA graph. Set "
        "rerun_state_machine.check_for_nan_in_loss=False.",
        "nan-check-in-graph",
    ),
    (
        "AssertionError: --no-check-for-nan-in-loss-and-grad should be set with --cuda-graph-impl=full_iteration for "
        "training.",
        "nan-check-in-graph",
    ),
    (
        "AssertionError: Transformer engine's RNG tracker is required for cudagraphs, it can be enabled with "
        "use_te_rng_tracker=True'.",
        "rng-tracker",
    ),
    ("AssertionError: RNG tracker does not support cudagraphs!", "rng-tracker"),
    (
        "AssertionError: Tried calling the fwd cudagraph when the bwd cudagraph was expected to be called next!",
        "replay-order",
    ),
    (
        "AssertionError: Setting NCCL_GRAPH_REGISTER=0 to avoid illegal memory access when using CUDA Graph with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        "expandable-segments",
    ),
    (
        "AssertionError: CUDA graph accepts only Tensor inputs. inference_context and packed_seq_params are excluded "
        "from input list. For inference cuda graph, please use cuda_graph_impl=local instead.",
        "packed-sequence",
    ),
    ("AssertionError: full recompute is only supported with full iteration CUDA graph.", "full-recompute"),
    ("AssertionError: moe cuda graph is only supported with drop-padding MoE.", "dropless-moe"),
    ("AssertionError: cuda_graph_modules must not contain both moe and moe_router.", "moe-and-router"),
    (
        "AssertionError: moe_preprocess cuda graph is only supported with moe_router cuda graph.",
        "preprocess-needs-router",
    ),
    (
        "AssertionError: mlp cuda graph is only supported for dense layers, but not found in the model.",
        "mlp-scope-without-dense",
    ),
    ("ValueError: CUDA graphs not supported with CPU offloading.", "cpu-offloading"),
    (
        "AssertionError: CUDA graph with delay_wgrad_compute requires TE version >= 2.12.0.",
        "delayed-wgrad-te-version",
    ),
    (
        "AssertionError: CUDA graph with delay_wgrad_compute requires gradient_accumulation_fusion to be enabled.",
        "delayed-wgrad-fusion",
    ),
    ("AssertionError: CUDA graph with delay_wgrad_compute doesn't support attn bias for now.", "delayed-wgrad-bias"),
    ("ValueError: full_iteration CUDA graph scope cannot be combined with other scopes.", "full-iteration-alone"),
    (
        "ValueError: Packed attention CUDA graphs require offline_packing_specs.pad_cu_seqlens=True. Enable it",
        "packed-sequence",
    ),
    (
        'ValueError: Megatron Bridge supports model.cuda_graph_impl="local" only for full-iteration CUDA graphs with '
        "scopes ['attn'].",
        "bridge-local-scope",
    ),
    # Transformer Engine
    (
        "ValueError: `is_first_microbatch` boolean kwarg must be provided for FP8 weight caching.",
        "fp8-scales",
    ),
    (
        "ValueError: Pipeline-parallel order dimension mismatch: num_model_chunks (2) * num_microbatches (3) * 2 = 12",
        "order",
    ),
    (
        "DEBUG: Available backends = {FlashAttention=False, FusedAttention=False, UnfusedDotProductAttention=False}",
        "te-attention-backend",
    ),
    (
        "ValueError: No dot product attention backend is available for the provided inputs. Please run with "
        "NVTE_DEBUG=1",
        "te-attention-backend",
    ),
    ("ValueError: No dot product attention support for the provided inputs!", "te-attention-backend"),
)
SYMPTOMS = {
    "out of memory during capture": "out-of-memory",
    "loss is nan": "nan-loss",
    "The gradients become NaN after the capture": "nan-loss",
    "hangs at exit": "hang-at-exit",
    "my process does not exit": "hang-at-exit",
    "training gets stuck in destroy_process_group": "hang-at-exit",
    "slower with graphs": "no-speedup",
    "no speed-up": "no-speedup",
    "why is it not faster than eager?": "no-speedup",
    "wrong loss": "wrong-numbers",
    "losses differ from the eager run": "wrong-numbers",
    "OOM with many graphs": "out-of-memory",
    "fits in eager and not with graphs": "graph-memory",
    "FP8 scales are corrupted": "fp8-scales",
    "pipeline order mismatch": "replay-order",
    "NaN check": "nan-check-in-graph",
    "RNG tracker": "rng-tracker",
    "DDP watchdog": "nccl-async-error-handling",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "nccl-async-error-handling",
    "AccumulateGrad runs on the default stream": "legacy-stream",
    "autocast cache": "autocast-caching",
    "expandable segments": "expandable-segments",
    "non-tensor inputs": "non-tensor-input",
    "full recompute with scoped graphs": "full-recompute",
    "the optimizer is not capturable": "optimizer-capturable",
    "no attention backend": "te-attention-backend",
    "packed sequences": "packed-sequence",
    "a pin_memory thread breaks the capture": "background-thread",
}
UNRELATED = (
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 2x2)",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:2 and cpu!",
    "torch.AcceleratorError: CUDA error: device-side assert triggered" + HINT.format(name="cudaErrorAssert"),
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "RuntimeError: CUDA error 719: unspecified launch failure",
    "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "RuntimeError: Trying to backward through the graph a second time",
    "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation",
    "RuntimeError: Error(s) in loading state_dict for Model: Missing key(s) in state_dict: 'loss.weight'",
    "IndexError: Target 10 is out of bounds.",
    "ValueError: Expected input batch_size (4) to match target batch_size (8).",
    "ModuleNotFoundError: No module named 'flash_attn'",
    "FileNotFoundError: [Errno 2] No such file or directory: 'data.bin'",
    "KeyError: 'loss'",
    "TypeError: forward() got an unexpected keyword argument 'mask'",
    "AttributeError: 'NoneType' object has no attribute 'shape'",
    "ZeroDivisionError: division by zero",
    "AssertionError: the loss is NaN",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect",
    "RuntimeError: NCCL error: unhandled system error, NCCL version 2.21.5",
    "MemoryError: Unable to allocate 12.0 GiB for an array with shape (40000, 40000) and data type float64",
    "[Thu Jan  1 00:00:00] Out of memory: Killed process 4711 (python)",
    "torch._dynamo.exc.Unsupported: Graph break: call_function print",
    "UserWarning: The given NumPy array is not writable",
    "PermissionError: [Errno 13] Permission denied: '/data'",
)


def first(text: str) -> str:
    found = explain(text)
    assert found.found, text
    return found.candidates[0].entry.id


def invoke(*arguments: str, **options: Any) -> Any:
    return runner.invoke(app, ["explain", *arguments], env=PLAIN, **options)


# -- what is recognized


@pytest.mark.parametrize("code", CODES)
def test_explain_knows_a_cuda_code_in_every_form(code: int) -> None:
    rule, text = CODES[code]
    entry = catalogue.entry(rule)
    driver = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", entry.name).upper()
    forms = [str(code), f" {code}\n", f"CUDA error {code}", f"Cuda failure {code} '{text}'", entry.name, driver]
    forms += [f"RuntimeError: CUDA error: {text}", f"torch.AcceleratorError: CUDA error: {text}" + HINT]
    for form in forms:
        assert first(form.replace("{name}", entry.name)) == rule, form
        assert explain(form.replace("{name}", entry.name)).candidates[0].evidence is Evidence.CUDA


@pytest.mark.parametrize(("text", "rule"), TEXTS, ids=[f"{n}-{rule}" for n, (_, rule) in enumerate(TEXTS)])
def test_explain_knows_messages_of_other_libraries(text: str, rule: str) -> None:
    assert first(text) == rule
    log = f"INFO step 10 loss 3.2\n\x1b[31m{text}\x1b[0m\nINFO: saving to [data]\n" + "step 11\n" * 50
    assert first(log) == rule, "in the middle of a log"


@pytest.mark.parametrize(("words", "rule"), SYMPTOMS.items())
def test_explain_knows_symptoms_by_their_words(words: str, rule: str) -> None:
    assert first(words) == rule


def test_explain_knows_every_rule_by_its_id() -> None:
    for entry in catalogue.entries():
        for form in (entry.id, f"[{entry.id}]", entry.id.replace("-", "_").upper()):
            assert explain(form).rules == (entry.id,)


@pytest.mark.parametrize("text", UNRELATED)
def test_explain_is_silent_about_unrelated_errors(text: str) -> None:
    assert explain(text).rules == ()
    assert explain(f"Traceback (most recent call last):\n  File 'a.py', line 1, in f\n    x[mask]\n{text}").rules == ()


def test_explain_of_a_long_text_ignores_words() -> None:
    assert explain("the loss is nan " + "and so on " * 20).rules == ()


def test_explain_names_both_causes_of_901() -> None:
    assert explain("901").rules == ("capture-invalidated", "background-thread")
    why = [candidate.entry.why + candidate.entry.fix for candidate in explain("901").candidates]
    assert "try/except" in why[0]
    assert "thread_local" in why[1]


def test_explain_ranks_the_first_error_first_with_its_line() -> None:
    found = explain(ITEM)
    assert found.rules[:2] == ("host-read", "capture-invalidated")
    assert [candidate.line for candidate in found.candidates[:2]] == [4, 7]
    assert found.candidates[0].matched == "operation not permitted when stream is capturing"
    assert found.candidates[0].reason == "CUDA `operation not permitted when stream is capturing`, line 4"


def test_explain_ranks_a_cause_before_the_message_of_cuda() -> None:
    found = explain(PIN_THREAD)
    assert found.rules == ("background-thread", "capture-invalidated", "host-read")


def test_explain_of_an_unknown_text_names_near_rules() -> None:
    assert explain("hots-read").nearest[0] == "host-read"
    assert explain("zzzzzzzzzzzz").nearest == ()
    assert "Did you mean host-read" in str(explain("hots-read"))


def test_explanation_as_text_has_cause_fix_and_page() -> None:
    entry = catalogue.entry("unjoined-stream")
    lines = str(stepgraph.explain("904")).splitlines()
    assert lines[0] == "unjoined-stream   (CUDA `904`, line 1)"
    assert lines[1:] == [f"What: {entry.what}.", f"Why: {entry.why}", f"Fix: {entry.fix}", f"Docs: {entry.page}"]


# -- errors of stepgraph


def test_raised_errors_carry_the_texts_of_explain() -> None:
    backend = backend_for("cpu")
    for rule, text in CODES.values():
        raised = capture_error("step", RuntimeError(f"CUDA error: {text}"), backend)
        assert isinstance(raised, CaptureError)
        found = explain(f"stepgraph.core.errors.CaptureError: {raised}")
        assert found.rules[0] == raised.rule == rule
        assert (raised.why, raised.fix) == found.candidates[0].entry.reason_and_fix()
        assert found.candidates[0].evidence is Evidence.RULE


def test_explain_reads_a_real_refusal() -> None:
    step = stepgraph.capture(lambda x: x * x.sum().item(), backend="tape")
    with pytest.raises(stepgraph.CaptureError) as caught:
        for _ in range(4):
            step(torch.ones(2))
    assert explain(str(caught.value)).rules == ("host-read",)


# -- the catalogue


def test_pieces_of_the_catalogue_lead_to_their_entry() -> None:
    for entry in catalogue.entries():
        for piece in (*entry.texts, *entry.peers):
            if len(piece) >= 12:
                assert entry.id in explain(f"XError: {piece} and more").rules, piece
        assert all(catalogue.entry(other).id != entry.id for other in entry.related)


def test_pieces_of_torch_are_in_the_installed_torch() -> None:
    """Of the messages that torch's Python code prints; those of C++ are provoked on a GPU."""
    files = {
        "cuda/graphs.py": ("does not support the autocast caching", "Modules must not have hooks registered"),
        "optim/optimizer.py": ("capturable is False",),
        "utils/data/_utils/pin_memory.py": ("in pin memory thread for device",),
        "_inductor/cudagraph_trees.py": ("accessing tensor output of CUDAGraphs that has been overwritten",),
        "_inductor/cudagraph_utils.py": ("skipping cudagraphs due to",),
    }
    known = " ".join(piece for entry in catalogue.entries() for piece in (*entry.texts, *entry.peers))
    for file, pieces in files.items():
        source = (Path(torch.__file__).parent / file).read_text()
        for piece in pieces:
            assert piece in known
            assert piece in source, file


def test_pieces_of_other_libraries_do_not_reach_lookup() -> None:
    known = {entry.id: entry for entry in catalogue.entries("capture") if entry.peers}
    assert len(known) > 5
    for entry in known.values():
        for piece in entry.peers:
            found = catalogue.lookup(piece)
            assert found is None or found is entry, piece


# -- the command


def test_explain_command_prints_cause_fix_and_page() -> None:
    result = invoke("CUDA", "error:", "capturing", "stream", "has", "unjoined", "work")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "unjoined-stream CUDA 904 cudaErrorStreamCaptureUnjoined" in text
    assert "Fix: call torch.cuda.current_stream().wait_stream(side)" in text
    assert "docs/errors.md#unjoined-stream" in text


def test_explain_command_as_json_has_candidates() -> None:
    values = json.loads(invoke("--json", "-", input=ITEM).stdout)
    assert values["found"] is True
    one = values["candidates"][0]
    assert (one["id"], one["code"], one["evidence"], one["line"]) == ("host-read", 900, "cuda", 4)
    assert one["page"] == "docs/errors.md#host-read"
    missing = json.loads(invoke("--json", "hots-read").stdout)
    assert (missing["found"], missing["exit_code"], missing["candidates"]) == (False, 1, [])
    assert missing["nearest"][0] == "host-read"


@pytest.mark.parametrize("arguments", [["-"], []])
def test_explain_command_reads_stdin(arguments: list[str]) -> None:
    assert "background-thread" in invoke(*arguments, input=PIN_THREAD).stdout


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "stdin is empty"),
        (b" \n\n", "stdin is empty"),
        (bytes(range(256)) * 40, "stdin is binary data"),
        (b"nothing of note\n", "this text is not in the catalogue"),
    ],
)
def test_explain_command_answers_what_it_cannot_read(data: bytes, expected: str) -> None:
    result = invoke("-", input=data)
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert expected in text
    assert "`stepgraph doctor`" in text
    assert "`stepgraph check SCRIPT`" in text


def test_explain_command_reads_both_ends_of_a_huge_log(monkeypatch: pytest.MonkeyPatch) -> None:
    command = sys.modules["stepgraph.commands.explain"]
    monkeypatch.setattr(command, "_HEAD_BYTES", 2**16)
    monkeypatch.setattr(command, "_TAIL_BYTES", 2**16)
    filler = b"step 1 loss 2.5\n" * (2**17)
    for log in (ITEM.encode() + filler, filler + ITEM.encode()):
        result = invoke("-", input=log)
        assert "host-read" in result.stdout
        assert "2 MiB in the middle of the text were not read" in result.stdout
    assert "were not read" not in invoke("-", input=ITEM).stdout


def test_explain_command_reads_text_that_is_no_utf8() -> None:
    assert "not in the catalogue" in invoke("-", input=b"caf\xe9 \xff broken text").stdout
    assert "unjoined-stream" in invoke("-", input=b"\xff CUDA error: capturing stream has unjoined work").stdout


def test_explain_command_names_the_way_to_read_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.log").write_text(ITEM)
    result = invoke("run.log")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "Next: stepgraph explain - < run.log"


@pytest.mark.slow
@pytest.mark.usefixtures("new_processes")
def test_explain_command_in_a_terminal_shows_its_help() -> None:
    program = "import os, pty, sys\nsys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, *sys.argv[1:]])))"
    command = [sys.executable, "-c", program, "-m", "stepgraph", "explain"]
    env = {**os.environ, "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env)
    assert done.returncode == 2, done.stderr
    assert "stepgraph explain [OPTIONS]" in done.stdout
    assert "--json" in done.stdout


# -- the page


def test_explain_page_shows_what_the_command_prints() -> None:
    page = (Path(__file__).parents[3] / "docs" / "explain.md").read_text()
    shown = re.findall(r"^```text\n\$ stepgraph explain (.+)\n((?:.*\n)+?)```$", page, re.MULTILINE)
    assert len(shown) == 3
    for arguments, expected in shown:
        printed = invoke(*shlex.split(arguments)).stdout
        assert [line.rstrip() for line in printed.splitlines()] == expected.splitlines(), arguments
