"""Errors: each raw CUDA message finds its entry, each error says what, why and how, each rule is in the catalogue."""

import ast
import re
from pathlib import Path

import pytest

import stepgraph
from stepgraph.core import catalogue, errors
from stepgraph.core.catalogue import entry, lookup
from stepgraph.core.errors import CaptureError, CaptureRefused, InvalidArgument, Location, StepgraphError

PACKAGE = Path(stepgraph.__file__).parent
KNOWN_TEXTS = [row for row in catalogue.entries("capture") if row.texts]
HINT = (
    "\nSearch for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)
RAW = {
    "CUDA error: operation not permitted when stream is capturing"
    + HINT.format(name="cudaErrorStreamCaptureUnsupported"): ("host-read", 900),
    "CUDA error: operation failed due to a previous error during capture"
    + HINT.format(name="cudaErrorStreamCaptureInvalidated"): ("capture-invalidated", 901),
    "CUDA error: operation would result in a merge of separate capture sequences": ("capture-merge", 902),
    "CUDA error: capture was not initiated in this stream": ("capture-unmatched", 903),
    "CUDA error: capturing stream has unjoined work": ("unjoined-stream", 904),
    "CUDA error: dependency created on uncaptured work in another stream": ("capture-isolation", 905),
    "CUDA error: operation would make the legacy stream depend on a capturing blocking stream": ("legacy-stream", 906),
    "CUDA error: operation not permitted on an event last recorded in a capturing stream": ("captured-event", 907),
    "CUDA error: attempt to terminate a thread-local capture sequence from another thread": ("capture-thread", 908),
    "CUDA error: an illegal memory access was encountered": ("illegal-address", 700),
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.5 GiB is "
    "free.": ("out-of-memory", 2),
    "CUDA error: out of memory" + HINT.format(name="cudaErrorMemoryAllocation"): ("out-of-memory", 2),
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. Please use "
    "tensor.pin_memory() or allocate the tensor with pin_memory=True.": ("host-data", None),
    "Attempt to increase offset for a CUDA generator not in capture mode.": ("generator", None),
    "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same as the "
    "original seed.": ("reseed", None),
    "Attempting CUDA graph capture of step() for an instance of AdamW but param_groups' capturable is False.": (
        "optimizer-capturable",
        None,
    ),
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`": ("library-call", None),
    "the tape does not record aten::_sparse_mm": ("tape-limit", None),
}


def test_lookup_finds_the_row_of_a_raw_message() -> None:
    for text, expected in RAW.items():
        found = lookup(text)
        assert found is not None, text
        assert (found.id, found.code) == expected


def test_lookup_cases_cover_the_catalogue() -> None:
    assert {rule for rule, _ in RAW.values()} == {row.id for row in KNOWN_TEXTS}


def test_lookup_finds_a_row_by_its_cuda_name_alone() -> None:
    for row in KNOWN_TEXTS:
        if row.code is not None and row.name != "cudaErrorMemoryAllocation":
            assert lookup(f"RuntimeError: {row.name}: something the driver said") is row


@pytest.mark.parametrize(
    "text",
    ["", "mat1 and mat2 shapes cannot be multiplied (1x3 and 2x2)", "CUDA error: device-side assert triggered"],
)
def test_lookup_of_an_unknown_text_is_none(text: str) -> None:
    assert lookup(text) is None


def test_lookup_texts_do_not_hide_each_other() -> None:
    for row in KNOWN_TEXTS:
        for text in row.texts:
            assert lookup(text) is row, text


# -- what the package raises


def error_calls() -> list[tuple[Path, ast.Call]]:
    """Every construction of one of our errors in the package."""
    ours = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, StepgraphError)
    } - {"StepgraphError", "ConfigError"}  # the texts of the second are the catalogue's
    return [
        (path, node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours
    ]


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def raised_rules() -> set[str]:
    """The rules of raw messages, of `rule="..."`, of entries by name, of obstacles of warm-up, and of warnings."""
    found = {row.id for row in KNOWN_TEXTS}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "rule":
                values: list[ast.expr] = [node.value]
            elif isinstance(node, ast.Call) and called(node) == "entry":
                values = node.args
            elif isinstance(node, ast.Call) and called(node) in ("Obstacle", "note_obstacle"):
                values = node.args[:1]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"\w   \[([a-z]+-[a-z-]+)\]", node.value))
                continue
            else:
                continue
            constants = [part.value for value in values for part in ast.walk(value) if isinstance(part, ast.Constant)]
            found |= {value for value in constants if isinstance(value, str)}
    return found


def test_raised_rules_are_found() -> None:
    assert {"host-read", "closed", "backend", "varying-output", "stale-memory"} <= raised_rules()


def test_raised_rules_are_in_the_catalogue() -> None:
    assert raised_rules() - {row.id for row in catalogue.entries()} == set()


def test_catalogue_has_no_capture_rule_that_nobody_raises() -> None:
    assert {row.id for row in catalogue.entries("capture")} - raised_rules() == set()


def test_raised_errors_name_their_rule() -> None:
    calls = error_calls()
    assert len(calls) > 100
    for path, call in calls:
        assert "rule" in {keyword.arg for keyword in call.keywords}, f"{path.name}:{call.lineno}"


def test_texts_of_the_catalogue_stand_nowhere_else() -> None:
    """A raised error leaves out `why` or `fix` where the catalogue says the same."""
    known = {_bare(text): row.id for row in catalogue.entries() for text in (row.what, row.why, row.fix)}
    found = [
        f"{path.name}:{keyword.value.lineno} [{known[text]}]"
        for path, call in error_calls()
        for keyword in call.keywords
        if isinstance(keyword.value, ast.Constant) and (text := _bare(str(keyword.value.value))) in known
    ]
    assert found == []


def _bare(text: str) -> str:
    return re.sub(r"[`'\"]", "", text).strip(" .").lower()


# -- the shape of a message


def test_message_is_what_rule_details_why_fix() -> None:
    error = StepgraphError("it broke", rule="some-rule", details=["captured  a", "received  b"], why="so.", fix="do.")
    assert str(error).splitlines() == [
        "it broke   [some-rule]",
        "  captured  a",
        "  received  b",
        "Why: so.",
        "Fix: do.",
    ]
    assert (error.what, error.rule, error.why, error.fix) == ("it broke", "some-rule", "so.", "do.")
    assert error.details == ("captured  a", "received  b")


def test_message_takes_what_is_not_given_from_the_catalogue() -> None:
    error = CaptureError("it broke", rule="host-random", fix="do.")
    assert (error.why, error.fix) == (entry("host-random").why, "do.")
    error = CaptureError("it broke", rule="host-random")
    assert error.fix == entry("host-random").fix.replace("{whose}", "step")
    assert "[`graph_modules`]" in entry("varying-operations").fix
    assert CaptureError("it broke", rule="varying-operations").fix.endswith("with `graph_modules`.")
    assert str(StepgraphError("it broke", rule="some-rule", why="", fix="")) == "it broke   [some-rule]"
    with pytest.raises(KeyError, match="some-rule"):
        StepgraphError("it broke", rule="some-rule")


def test_capture_error_shows_line_code_and_operation() -> None:
    where = Location(__file__, 1, "train_step")
    error = CaptureError.from_entry("step", entry("host-read"), operation=".item()", where=where, raw="RuntimeError: x")
    lines = str(error).splitlines()
    assert lines[0] == f"step: {entry('host-read').what}   [host-read]"
    assert lines[1].startswith(f"  at    {__file__}:1 in train_step: `")
    assert lines[2:5] == ["  cuda  900 cudaErrorStreamCaptureUnsupported", "  op    .item()", "  torch RuntimeError: x"]
    assert [line.partition(":")[0] for line in lines[5:]] == ["Why", "Fix"]
    assert (error.code, error.where, error.entry) == (900, where, entry("host-read"))


def test_capture_error_without_a_code_shows_none() -> None:
    error = CaptureError.from_entry("step", entry("reseed"))
    assert error.code is None
    assert "cuda  " not in str(error)


def test_location_shows_its_source_line() -> None:
    number = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.startswith("HINT"))
    assert str(Location(__file__, number, "<module>")) == f"{__file__}:{number} in <module>: `HINT = (`"
    assert str(Location("gone.py", 3, "f")) == "gone.py:3 in f"


def test_refusal_names_operation_and_code() -> None:
    refused = CaptureRefused(entry("host-read"), ".item()", None)
    assert str(refused).startswith(".item(): ")
    assert str(refused).endswith("(CUDA error 900)")
    assert "CUDA error" not in str(CaptureRefused(entry("reseed"), "torch.manual_seed", None))


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(InvalidArgument, ValueError)
    assert issubclass(CaptureError, RuntimeError)
    assert issubclass(stepgraph.StaleMemoryError, RuntimeError)
    assert issubclass(stepgraph.StepgraphWarning, UserWarning)
    assert issubclass(stepgraph.ClosedError, StepgraphError)
