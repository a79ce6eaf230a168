"""Looks at the installation: what is there, what is missing for what, and the command that gets it.

A failed run starts with the same questions: which torch, which driver, which GPU, which allocator, which variables. The
report answers them in one text that can be pasted into a bug report. Versions of packages are read from their metadata,
so nothing optional is imported; torch is imported, and an import that fails is reported like everything else.

A report is public once it is pasted. So only variables with known prefixes are read, values that look like a secret are
hidden, passwords are cut out of addresses, and the home folder is shown as `~`.

Example:
    >>> print(stepgraph.doctor())
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stepgraph
from stepgraph.config.base import ConfigSections
from stepgraph.config.environment import Environment, blocking_wait, numbers_of
from stepgraph.config.model import ModelSection
from stepgraph.config.rules import RULES
from stepgraph.core import catalogue

__all__ = ["BrokenRule", "DoctorReport", "Gpu", "Part", "TorchFacts", "doctor"]

PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "NVTE_", "STEPGRAPH_")
"""Only variables that begin like this are read."""
_SECRET_NAME = re.compile(r"SECRET|TOKEN|KEY|PASS|CREDENTIAL|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)|(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{24,}"
)
_GPU_ID = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F-]{36}")
_SECRET_WORD = re.compile(
    r"(?:SECRET|TOKEN|KEY|PASS(?:WORD|WD|PHRASE)?|PWD|CREDENTIALS?|AUTH(?:ORIZATION)?|COOKIE|SIG(?:NATURE)?)"
    r"[\"']?(?:\s*(?:=|:|%3D|%3A)|\s+\S)|\b(?:BEARER|BASIC|NEGOTIATE)\s+\S",
    re.IGNORECASE,
)
"""A name of a secret before a value, as in `password=...`, `--token ...` or `Authorization: Bearer ...`."""
_ADDRESS = re.compile(r"(\w+://)([^\s?#,;]*)[^\s,;]*")
_WIDTH = 80


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """What the installed torch says about itself."""

    version: str
    cuda: str | None
    """The CUDA that it was built with; None for a build without."""
    cudnn: str | None
    nccl: str | None
    allocator: str | None
    """`native` or `cudaMallocAsync`; None without a GPU."""
    sees_gpu: bool
    has_native_guards: bool


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that torch sees."""

    name: str
    compute_capability: str
    memory_gib: float


@dataclass(frozen=True, slots=True)
class Part:
    """Something that stepgraph, or a feature of it, needs."""

    name: str
    needs: str
    """The oldest version that works, such as `>= 2.11`, or empty for any."""
    found: str | None
    status: str
    """`ok`, `missing`, `too old` or `broken`."""
    is_required: bool
    purpose: str
    command: str
    """What to type to get it."""

    @property
    def is_problem(self) -> bool:
        """True if stepgraph cannot work as it is."""
        return self.is_required and self.status != "ok"


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule of the catalogue that the environment breaks, whatever the program is."""

    rule: str
    what: str
    found: str
    """The settings that break it."""
    why: str
    fix: str


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What `stepgraph.doctor()` found; `str()` gives the text for a bug report."""

    stepgraph: str
    python: str
    system: str
    torch: TorchFacts | None
    torch_error: str | None
    """Why torch could not be imported."""
    driver: str | None
    gpus: tuple[Gpu, ...]
    variables: Mapping[str, str]
    parts: tuple[Part, ...]
    broken_rules: tuple[BrokenRule, ...]

    @property
    def ok(self) -> bool:
        """True if nothing that is needed is missing or broken."""
        return not self.broken_rules and not any(part.is_problem for part in self.parts)

    def __str__(self) -> str:
        return "\n".join(_wrapped(line) for line in _lines(self))


def doctor() -> DoctorReport:
    """Look at versions, GPU, driver, allocator, variables and optional parts of this installation.

    Example:
        >>> stepgraph.doctor().ok
        True
    """
    variables = shown_variables(os.environ)
    torch, error, gpus = _torch_facts()
    driver = _driver()
    capability = tuple(map(int, gpus[0].compute_capability.split("."))) if gpus else None
    report = DoctorReport(
        stepgraph=stepgraph.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {_kernel()} {platform.machine()}",
        torch=torch,
        torch_error=error,
        driver=driver,
        gpus=gpus,
        variables=variables,
        parts=tuple(_parts(torch, error, driver, gpus)),
        broken_rules=tuple(broken_rules(variables, capability)),
    )
    shown: DoctorReport = _without_home(report)
    return shown


# -- what may be shown


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that belong into a report, without secrets.

    Example:
        >>> shown_variables({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_abc"})
        {'NCCL_DEBUG': 'INFO'}
    """
    names = sorted(name for name in environment if name.startswith(PREFIXES))
    return {name: _shown_value(name, environment[name]) for name in names}


def _shown_value(name: str, value: str) -> str:
    if _SECRET_NAME.search(name):
        return "(hidden)"
    shown = _ADDRESS.sub(r"\1\2", _without_user(str(_without_home(value))))
    is_secret = _SECRET_WORD.search(shown) or _SECRET_VALUE.search(_GPU_ID.sub("", shown))
    return "(hidden)" if is_secret else shown


def _without_user(value: str) -> str:
    """A value without what stands before an `@`, which is a user, often with a password, in any kind of address.

    A password may hold any sign, spaces, commas and `@` too, so that nobody can say where it begins: all but the first
    scheme goes. `%40` is an `@` that was quoted twice, for an address inside another one.
    """
    before, found, host = value.rpartition("@")
    if "%40" in host:
        return "(hidden)"
    scheme = re.match(r"\s*\w+://", before)
    return (scheme.group() if scheme else "") + host if found else value


def _without_home(value: Any) -> Any:
    """A copy in which `~` stands for the home folder, in all texts."""
    home = os.path.expanduser("~").rstrip("/")
    homes = {home, os.path.realpath(home)} - {"", "~"}
    if isinstance(value, str):
        for folder in sorted(homes, key=len, reverse=True):
            value = re.sub(rf"{re.escape(folder)}(?=/|$|[^\w.-])", "~", value)
        return value
    if isinstance(value, Mapping):
        return {key: _without_home(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_without_home(part) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _without_home(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


# -- what is there


def _torch_facts() -> tuple[TorchFacts | None, str | None, tuple[Gpu, ...]]:
    try:
        import torch

        sees_gpu = torch.cuda.is_available()
        gpus = tuple(map(_gpu, range(torch.cuda.device_count()))) if sees_gpu else ()
        facts = TorchFacts(
            version=torch.__version__,
            cuda=torch.version.cuda,
            cudnn=str(torch.backends.cudnn.version()) if sees_gpu else None,
            nccl=".".join(map(str, torch.cuda.nccl.version())) if sees_gpu and _has_nccl() else None,
            allocator=torch.cuda.get_allocator_backend() if sees_gpu else None,
            sees_gpu=sees_gpu,
            has_native_guards=_has_native_guards(),
        )
    except Exception as error:  # noqa: BLE001 (whatever a broken torch raises is what the user asks about)
        return None, f"{type(error).__name__}: {error}", ()
    return facts, None, gpus


def _gpu(index: int) -> Gpu:
    import torch

    found = torch.cuda.get_device_properties(index)
    return Gpu(found.name, f"{found.major}.{found.minor}", round(found.total_memory / 2**30, 1))


def _has_nccl() -> bool:
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_nccl_available())


def _has_native_guards() -> bool:
    from stepgraph.engine.backends.native import library

    return library.is_built()


def _kernel() -> str:
    """The number of the system's release, without the name of a build."""
    return re.split(r"[^0-9.]", platform.release())[0]


def _driver() -> str | None:
    """The version of NVIDIA's kernel driver, if there is one."""
    told = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module(?: for \S+)?\s+(\d[\d.]+)", told.read_text()) if told.is_file() else None
    if found is not None:
        return found[1]
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _first_line(program: str, *options: str) -> str | None:
    """The first line that a program prints; None where it is missing, fails or takes long."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run([path, *options], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.strip().splitlines()), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- what is needed

_PACKAGES = (
    ("rich", "rich", "", True, "tables and progress", "pip install rich"),
    ("typer", "typer", "", True, "the command line", "pip install typer"),
    ("cuda-bindings", "cuda-bindings", "", False, "the nodes of graphs", 'pip install "stepgraph[inspect]"'),
    ("nvidia-ml-py", "nvidia-ml-py", "", False, "load of the GPU in measurements", 'pip install "stepgraph[nvml]"'),
    ("matplotlib", "matplotlib", "", False, "pictures of `stepgraph demo`", 'pip install "stepgraph[plot]"'),
    ("APEX", "apex", "", False, "its capturable optimizers", "build it from github.com/NVIDIA/apex"),
    (
        *("Transformer Engine", "transformer-engine", ">= 2.2", False, "its layers"),
        'pip install --no-build-isolation "transformer-engine[pytorch]>=2.2"',
    ),
    ("Megatron core", "megatron-core", ">= 0.14", False, "its layers and loops", 'pip install "megatron-core>=0.14"'),
    ("torchao", "torchao", "", False, "its layers", "pip install torchao"),
    ("transformers", "transformers", "", False, "models of Hugging Face", "pip install transformers"),
    ("lightning", "lightning", "", False, "loops of Lightning", "pip install lightning"),
)
"""Name, package, oldest version, whether it is required, what for, and the command that gets it."""
_OLDEST_PYTHON, _OLDEST_TORCH, _OLDEST_CUDA = (3, 11), (2, 11), (11, 0)
_CUDA_TORCH = "install torch from the index of your CUDA, see pytorch.org/get-started"


def part(name: str, needs: str, found: str | None, is_required: bool, purpose: str, command: str) -> Part:
    """Return a part with its status: the version that was found against the oldest one that works."""
    oldest = numbers_of(needs.removeprefix(">= "))
    is_old = found is not None and bool(oldest) and numbers_of(found)[: len(oldest)] < oldest
    status = "missing" if found is None else "too old" if is_old else "ok"
    return Part(name, needs, found, status, is_required, purpose, command)


def _parts(facts: TorchFacts | None, error: str | None, driver: str | None, gpus: tuple[Gpu, ...]) -> Iterator[Part]:
    dotted = ".".join
    python = f">= {dotted(map(str, _OLDEST_PYTHON))}"
    yield part("Python", python, dotted(map(str, sys.version_info[:3])), True, "everything", "install a newer Python")
    yield _torch_part(facts, error)
    yield from _gpu_parts(facts, driver, gpus)
    for name, package, needs, is_required, purpose, command in _PACKAGES:
        yield part(name, needs, _version(package), is_required, purpose, command)
    nsys = _first_line("nsys", "--version")
    yield part("Nsight Systems", "", nsys, False, "profiles with graphs", "developer.nvidia.com/nsight-systems")
    is_built = facts is not None and facts.has_native_guards
    purpose = "cheaper replays for the host"
    yield part("C++ guards", "", "built" if is_built else None, False, purpose, "stepgraph native --build")
    if not is_built:
        compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
        yield part("C++ compiler", "", compiler, False, "to build the C++ guards", "apt install g++")
        ninja = _version("ninja") or ("found" if shutil.which("ninja") else None)
        yield part("ninja", "", ninja, False, "to build the C++ guards", "pip install ninja")


def _torch_part(facts: TorchFacts | None, error: str | None) -> Part:
    needs = f">= {'.'.join(map(str, _OLDEST_TORCH))}"
    command, installed = f'pip install "torch{needs.replace(" ", "")}"', _version("torch")
    if facts is None and installed is not None:
        return Part("torch", needs, installed, "broken", True, f"everything ({error})", command)
    return part("torch", needs, None if facts is None else facts.version, True, "everything", command)


def _gpu_parts(facts: TorchFacts | None, driver: str | None, gpus: tuple[Gpu, ...]) -> Iterator[Part]:
    """Without a driver a GPU is optional: the tape needs none. With one, a torch that cannot use it is broken."""
    has_driver, cuda = driver is not None, None if facts is None else facts.cuda
    needs = f">= {'.'.join(map(str, _OLDEST_CUDA))}"
    yield part("CUDA of torch", needs, cuda, has_driver and facts is not None, "graphs on a GPU", _CUDA_TORCH)
    yield part("NVIDIA driver", "", driver, False, "graphs on a GPU", "a machine with an NVIDIA GPU")
    seen = f"{len(gpus)} x {gpus[0].name}" if gpus else None
    usable = part("NVIDIA GPU", "", seen, False, "graphs on a GPU; the CPU tape needs none", "a machine with a GPU")
    if has_driver and cuda is not None and not gpus:
        advice = "compare the driver with torch's CUDA, and look at CUDA_VISIBLE_DEVICES"
        usable = Part("NVIDIA GPU", "", None, "broken", True, "torch sees no GPU beside the driver", advice)
    yield usable


def broken_rules(variables: Mapping[str, str], capability: tuple[int, ...] | None) -> Iterator[BrokenRule]:
    """Yield the rules that these variables break for any program with graphs and collectives.

    Example:
        >>> [each.rule for each in broken_rules({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, (9, 0))]
        ['expandable-segments']
    """
    pair = None if capability is None else (capability[0], capability[1])
    environment = Environment(compute_capability=pair, variables=variables)
    layers = ConfigSections(model=ModelSection(cuda_graph_impl="transformer_engine"))
    for line in RULES["expandable-segments"](layers, environment):
        yield _broken("expandable-segments", line)
    blocking = blocking_wait(variables)
    if blocking is not None:
        yield _broken("nccl-blocking-wait", f"{blocking}={variables[blocking]}")


def _broken(rule: str, found: str) -> BrokenRule:
    entry = catalogue.entry(rule)
    return BrokenRule(rule, entry.what, found, *entry.reason_and_fix())


# -- the text


def _lines(report: DoctorReport) -> Iterator[str]:
    yield f"stepgraph {report.stepgraph}, Python {report.python}, {report.system}"
    torch = report.torch
    if torch is None:
        yield f"torch: cannot be imported: {report.torch_error}"
    else:
        parts = (("CUDA", torch.cuda or "none"), ("cuDNN", torch.cudnn), ("NCCL", torch.nccl))
        rest = [f"{name} {value}" for name, value in (*parts, ("allocator", torch.allocator)) if value]
        yield ", ".join([f"torch {torch.version}", *rest])
    yield f"driver {report.driver or 'none'}"
    for index, gpu in enumerate(report.gpus):
        yield f"GPU {index}: {gpu.name}, compute capability {gpu.compute_capability}, {gpu.memory_gib:g} GiB"
    if not report.gpus:
        yield "GPU none: captures run on the CPU tape"
    for title, is_required in (("Needed", True), ("Optional", False)):
        yield from ("", title)
        yield from (line for each in report.parts if each.is_required is is_required for line in _part_lines(each))
    yield from ("", "Variables")
    yield from (f"  {name}={value}" for name, value in report.variables.items())
    if not report.variables:
        yield f"  none of {', '.join(prefix + '*' for prefix in PREFIXES)} is set"
    for broken in report.broken_rules:
        yield from ("", f"{broken.what}   [{broken.rule}]")
        yield from (f"  {broken.found}", f"  Why: {broken.why}", f"  Fix: {broken.fix}")
    yield from ("", _verdict(report))


def _part_lines(each: Part) -> Iterator[str]:
    version = " ".join(filter(None, (each.found, f"({each.needs})" if each.needs else "")))
    yield f"  {each.status:<8} {' '.join((each.name, version)).strip()}: {each.purpose}"
    if each.status != "ok":
        yield f"           get it: {each.command}"


def _verdict(report: DoctorReport) -> str:
    problems = [f"{each.name} is {each.status}" for each in report.parts if each.is_problem]
    problems += [f"the environment breaks {each.rule}" for each in report.broken_rules]
    if problems:
        return f"Not fine: {'; '.join(problems)}."
    return "Fine: nothing that stepgraph needs is missing."


def _wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return "\n".join(textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)) or ""
