"""The mechanisms that `stepgraph bench --compare` runs, each as an implementation of the training loop.

All of them train the same model, from one seed, on the same data, in the same loop; only what runs an iteration
differs. So a difference in time is the mechanism's, and a difference in the loss is the mechanism's too.

The mechanisms of others are used as their own documentation asks. torch's reduce-overhead and `make_graphed_callables`
give wrong gradients, or an error, where gradients are accumulated from None, so they get gradients that are allocated
beforehand and zeroed in place.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stepgraph.config.container import ConfigContainer
from stepgraph.config.environment import Environment
from stepgraph.config.rules import broken_rules, finalised
from stepgraph.config.scope import CudaGraphScope
from stepgraph.core.errors import InvalidArgument, nearest
from stepgraph.lab.bench import megatron_core
from stepgraph.lab.train.data import Sample
from stepgraph.lab.train.implementations import Eager, Implementation, Work, choose
from stepgraph.lab.train.iteration import ForwardStep, Result, forward_backward

Make = Callable[[Work, Any], Implementation]


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One way to run a training iteration."""

    name: str
    title: str
    whose: str
    """Whose mechanism it is: eager, torch, Transformer Engine, megatron-core, stepgraph."""
    make: Make = choose
    impl: Literal["none", "local", "transformer_engine"] = "none"
    scope: tuple[str, ...] = ()
    needs_cuda: bool = False
    package: str | None = None
    """The package that must be installed."""
    changes_kernels: bool = False
    """Compiled kernels round differently, so that losses are not those of eager, bit for bit."""
    reference: str = "eager"
    """The mechanism whose losses it must have. Another than eager trains a model of its own."""
    model_provider: Callable[[Any], nn.Module] | None = None
    """Builds that model."""
    unbuilt: Callable[[ConfigContainer], str | None] = lambda cfg: None
    """Names what of a configuration it does not build, or returns None."""

    @property
    def demands(self) -> int:
        """What it asks of a program: 0, nothing; 1, code that compiles; 2, also all that graphs ask."""
        return {"eager": 0, "eager-again": 0, "compile": 1}.get(self.name, 2)

    def configured(self, cfg: ConfigContainer) -> ConfigContainer:
        """Return a copy of a configuration that this mechanism runs."""
        found = cfg.copy()
        found.model.cuda_graph_impl = self.impl
        found.model.cuda_graph_scope = [CudaGraphScope(word) for word in self.scope]
        return found

    def missing(self, device: torch.device, cfg: ConfigContainer) -> str | None:
        """Return why it cannot run here, or None."""
        if (part := self.unbuilt(cfg)) is not None:
            return f"not built for {part}"
        if self.needs_cuda and device.type != "cuda":
            return "needs a GPU"
        if self.package is not None and not _is_installed(self.package):
            return f"{self.package} is not installed"
        return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


class Compiled(Eager):
    """torch.compile around the model."""

    name = "compile"

    def __init__(self, work: Work, cfg: Any) -> None:
        super().__init__(work)
        work.core.compile()


class InPlace(Implementation):
    """Gradients that are there beforehand and are zeroed in place, as other graphs need them."""

    name = "in place"

    def train(self, microbatches: Sequence[Sample]) -> Result:
        work = self.work
        for parameter in work.core.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        work.optimizer.zero_grad(set_to_none=False)
        result = forward_backward(
            forward_step_func=work.forward_step,
            data_iterator=iter(microbatches),
            model=work.model,
            num_microbatches=work.num_microbatches,
            finish=work.finish,
            before_microbatch=self._before_microbatch(),
        )
        work.optimizer.step()
        return result


class CopiedResults(ForwardStep):
    """Copies what an iteration keeps of a microbatch: its loss, and the load of its experts.

    The results of a model with torch's own graphs lie in the graph's memory, where the next replay writes. torch asks
    to copy them outside of the compiled model. The loss to differentiate is used before the next replay.
    """

    @classmethod
    def of(cls, step: ForwardStep) -> CopiedResults:
        """The same step, with copies."""
        return cls(**{field.name: getattr(step, field.name) for field in dataclasses.fields(step)})

    def __call__(self, microbatch: Sample, model: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
        total, loss, load = super().__call__(microbatch, model)
        return total, loss.clone(), None if load is None else load.clone()


class ReduceOverhead(InPlace):
    """torch.compile(mode="reduce-overhead"): torch's own graphs of what it compiles."""

    name = "reduce-overhead"

    def __init__(self, work: Work, cfg: Any) -> None:
        super().__init__(dataclasses.replace(work, forward_step=CopiedResults.of(work.forward_step)))
        work.core.compile(mode="reduce-overhead")

    def _before_microbatch(self) -> Any:
        return lambda index: torch.compiler.cudagraph_mark_step_begin()


class TensorLayer(nn.Module):
    """A layer whose one argument is a tensor, as torch's graphed callables want it."""

    def __init__(self, block: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary
        self.run = block.forward  # bound now: the block's own forward is about to lead here

    def forward(self, x: Tensor) -> Any:
        """Run the layer."""
        return self.run(x, self.rotary)


def graph_layers(
    blocks: Iterable[nn.Module], rotary: nn.Module, shape: tuple[int, ...], make: Callable[..., Any]
) -> None:
    """Put graphs by `make`, a make_graphed_callables, in the place of the forwards of layers."""
    layers = tuple(TensorLayer(block, rotary) for block in blocks)
    weight = next(layers[0].parameters())
    samples = tuple((torch.randn(shape, device=weight.device, dtype=weight.dtype, requires_grad=True),) for _ in layers)
    for layer, graphed in zip(layers, make(layers, samples), strict=True):
        layer.block.forward = lambda x, rotary, graphed=graphed: graphed(x)


class TorchCallables(InPlace):
    """torch.cuda.make_graphed_callables around every layer, captured before training."""

    name = "torch callables"

    def __init__(self, work: Work, cfg: Any) -> None:
        super().__init__(work)
        self._cfg = cfg
        blocks = getattr(work.core, "blocks", None)
        if not isinstance(blocks, nn.ModuleList):
            raise InvalidArgument(
                "the model has no list of layers",
                rule="option",
                why="torch's graphed callables are put around each layer.",
                fix="leave this mechanism out: --only.",
            )
        self._blocks = list(blocks)

    def capture(self) -> None:
        begun = time.perf_counter()
        cfg = self._cfg
        shape = (cfg.train.micro_batch_size, cfg.model.seq_length, cfg.model.hidden_size)
        rotary: nn.Module = self.work.core.rotary  # type: ignore[assignment]
        graph_layers(self._blocks, rotary, shape, self._graphed)
        torch.cuda.synchronize()
        self.is_captured, self.capture_seconds = True, time.perf_counter() - begun

    def _graphed(self, layers: tuple[nn.Module, ...], samples: tuple[tuple[Tensor, ...], ...]) -> Any:
        return torch.cuda.make_graphed_callables(layers, samples)

    @property
    def num_graphed(self) -> int:
        return len(self._blocks) if self.is_captured else 0


class TransformerEngineCallables(TorchCallables):
    """Transformer Engine's own make_graphed_callables around every layer."""

    name = "Transformer Engine callables"

    def _graphed(self, layers: tuple[nn.Module, ...], samples: tuple[tuple[Tensor, ...], ...]) -> Any:
        engine = importlib.import_module("transformer_engine.pytorch")
        return engine.make_graphed_callables(layers, samples)


def compiled_and_captured(work: Work, cfg: Any) -> Implementation:
    """One graph of the full iteration around compiled layers."""
    work.core.compile()
    return choose(work, cfg)


def _unbuilt_by_megatron(cfg: ConfigContainer) -> str | None:
    if cfg.dataset.kind != "text":
        return f"data of kind {cfg.dataset.kind}"
    return megatron_core.unbuilt_part(cfg.model)


def _megatron(graphs: megatron_core.Graphs, title: str) -> Mechanism:
    return Mechanism(
        f"megatron-{graphs}",
        f"megatron-core GPTModel, {title}",
        "megatron-core",
        functools.partial(megatron_core.MegatronIteration, graphs=graphs),
        needs_cuda=True,
        package="megatron.core",
        reference="megatron-none",
        model_provider=megatron_core.Provider(graphs),
        unbuilt=_unbuilt_by_megatron,
    )


OTHERS = (
    Mechanism("eager", "eager", "eager", impl="none"),
    Mechanism("eager-again", "eager, once more", "eager", impl="none"),
    Mechanism("compile", "torch.compile", "torch", Compiled, needs_cuda=True, changes_kernels=True),
    Mechanism(
        *("reduce-overhead", "torch.compile, reduce-overhead", "torch", ReduceOverhead),
        needs_cuda=True,
        changes_kernels=True,
    ),
    Mechanism(
        "torch-callables", "torch make_graphed_callables", "torch", TorchCallables, "transformer_engine", ("attn",)
    ),
    Mechanism(
        *("te-callables", "Transformer Engine make_graphed_callables", "Transformer Engine"),
        *(TransformerEngineCallables, "transformer_engine", ("attn",)),
        needs_cuda=True,
        package="transformer_engine",
    ),
    _megatron("none", "eager"),
    _megatron("layers", "its graphs of layers"),
    _megatron("iteration", "its graph of an iteration"),
)
SCOPES: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        "gpt": (("attn",), ("mlp",), ("attn", "mlp"), ()),
        "moe": (("attn",), ("attn", "moe_router"), ("attn", "moe_router", "moe_preprocess"), ("attn", "moe"), ()),
        "mamba": (("mamba",), ()),
        "hybrid": (("mamba",), ("mamba", "attn"), ("mamba", "attn", "mlp"), ()),
        "vision_language": (("attn",), ("attn", "moe_router", "moe_preprocess")),
    }
)
"""The scopes that are worth a run, by the kind of model; those that a rule forbids are left out."""


def mechanisms_for(cfg: ConfigContainer, environment: Environment) -> list[Mechanism]:
    """Return all mechanisms for a configuration: those of others, and ours at each scope that the rules allow."""
    found = all_mechanisms(cfg, environment)
    return [mechanism for mechanism in found if _is_legal(mechanism, cfg, environment)]


def all_mechanisms(cfg: ConfigContainer, environment: Environment) -> list[Mechanism]:
    """Return the mechanisms for a configuration with all scopes, also those that the rules forbid."""
    found = list(OTHERS)
    kind = finalised(cfg, environment).model.kind
    implementations: tuple[Literal["transformer_engine", "local"], ...] = ("transformer_engine", "local")
    for impl in implementations:
        for scope in SCOPES.get(kind, ()):
            title = f"{impl}: {','.join(scope) or 'layers'}"
            name = f"ours-{_short(impl)}-{'+'.join(scope) or 'layers'}"  # without a comma, for --only
            found.append(Mechanism(name, title, "stepgraph", impl=impl, scope=scope))
    whole = ("full_iteration",)
    found.append(Mechanism("ours-whole", "local: full_iteration", "stepgraph", impl="local", scope=whole))
    found.append(
        Mechanism(
            *("ours-whole-compile", "local: full_iteration, with torch.compile", "stepgraph", compiled_and_captured),
            *("local", whole),
            needs_cuda=True,
            changes_kernels=True,
        )
    )
    return found


def _short(impl: str) -> str:
    return "te" if impl == "transformer_engine" else impl


def _is_legal(mechanism: Mechanism, cfg: ConfigContainer, environment: Environment) -> bool:
    if mechanism.whose != "stepgraph":
        return True
    found = finalised(mechanism.configured(cfg), environment)
    return not broken_rules(found, environment, ("config", "run"))


def named(name: str, known: Sequence[Mechanism]) -> Mechanism:
    """Return the mechanism of this name."""
    found = next((mechanism for mechanism in known if mechanism.name == name), None)
    if found is None:
        raise _unknown(name, known)
    return found


def select(words: str, known: Sequence[Mechanism]) -> list[Mechanism]:
    """Return the mechanisms that names and patterns, separated by commas, stand for, in the order of the known ones.

    Example:
        >>> select("eager*,ours-whole", mechanisms)
    """
    patterns = [word.strip() for word in words.split(",") if word.strip()]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(mechanism.name, pattern) for mechanism in known):
            raise _unknown(pattern, known)
    if not patterns:
        raise _unknown(words, known)
    return [m for m in known if any(fnmatch.fnmatchcase(m.name, pattern) for pattern in patterns)]


def _unknown(name: str, known: Sequence[Mechanism]) -> InvalidArgument:
    names = [mechanism.name for mechanism in known]
    near = nearest(name, names)
    return InvalidArgument(
        f"`{name}` is no mechanism of this comparison",
        rule="option",
        why=f"they are {', '.join(names)}.",
        fix=f"did you mean {near}?" if near else "name some of them, or patterns such as ours-*, separated by commas.",
    )
