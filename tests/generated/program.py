"""A training program as plain data, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any

FLAGS = ("period", "from", "until", "flips")
NUMBERS = ("rests", "grows", "ramps")
HOLDERS = ("dict", "space", "deep", "cell", "net", "argument")
PERIODS = (2, 2, 3, 3, 5, 11, 16, 50)
MOST_CALLS = 110


@dataclass(frozen=True)
class Value:
    """A host value that the step reads and the loop sets: a flag, a number, or a count of calls."""

    holder: str
    schedule: str
    """A flag: period, from, until, flips. A number: rests, grows, ramps. A count: counts."""
    at: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        return "flag" if self.schedule in FLAGS else "number" if self.schedule in NUMBERS else "count"


@dataclass(frozen=True)
class Condition:
    """When a line of a step runs."""

    value: int
    period: int = 2
    phase: int = 0
    negated: bool = False


@dataclass(frozen=True)
class Line:
    """A line of a step: what it does, to which model and optimizer, and under which condition."""

    kind: str
    which: int = 0
    condition: Condition | None = None
    weight: int | None = None
    """The value that a loss is multiplied by."""
    form: str = ""


@dataclass(frozen=True)
class Optimizer:
    kind: str
    model: int = 0
    grouped: bool = False
    schedule: str | None = None
    """A learning rate schedule, which the loop calls after each call of the step."""


@dataclass(frozen=True)
class Layer:
    kind: str
    value: int | None = None
    """The value that its forward reads."""


@dataclass(frozen=True)
class Event:
    """Something that the loop does before a call: at one call, at every so many calls, or from a call on."""

    kind: str
    when: tuple[str, int, int] = ("at", 6, 0)
    which: int = 0
    number: int = 0


@dataclass(frozen=True)
class Program:
    """A training program. `form` says how models and steps belong together.

    one: a step for one model. given: a step that is given its model. each: a step for each model. both: one step for
    two models. split: one step computes gradients, another one applies them. pipeline: stages of a schedule.
    """

    form: str
    models: tuple[tuple[Layer, ...], ...]
    optimizers: tuple[Optimizer, ...]
    steps: tuple[tuple[Line, ...], ...]
    order: tuple[int, ...]
    """Which model or step each call is of."""
    result: str = "loss"
    result_condition: Condition | None = None
    values: tuple[Value, ...] = ()
    events: tuple[Event, ...] = ()
    small: tuple[int, ...] = ()
    """Calls with a smaller batch."""
    other_dtype: tuple[int, ...] = ()
    """Calls with a batch of float64."""
    scaler: str | None = None
    autocast: bool = False
    average: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    shared: bool = False
    """All steps share one session."""
    pipeline: str = "ScheduleGPipe"
    seed: int = 0


OPTIMIZERS = {
    "sgd": "torch.optim.SGD({}, lr=0.1)",
    "momentum": "torch.optim.SGD({}, lr=0.1, momentum=0.9)",
    "nesterov": "torch.optim.SGD({}, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "sgd fused": "torch.optim.SGD({}, lr=0.1, momentum=0.9, fused=True)",
    "adam": "torch.optim.Adam({}, lr=0.01)",
    "adam foreach": "torch.optim.Adam({}, lr=0.01, foreach=True)",
    "adam single": "torch.optim.Adam({}, lr=0.01, foreach=False)",
    "adam fused": "torch.optim.Adam({}, lr=0.01, fused=True)",
    "adam capturable": 'torch.optim.Adam({}, lr=0.01, capturable=DEVICE.type == "cuda")',
    "adamw": "torch.optim.AdamW({}, lr=0.01, weight_decay=0.1)",
    "adamw foreach": "torch.optim.AdamW({}, lr=0.01, foreach=True)",
    "adamw fused": "torch.optim.AdamW({}, lr=0.01, fused=True)",
    "adamw amsgrad": "torch.optim.AdamW({}, lr=0.01, amsgrad=True)",
    "rmsprop": "torch.optim.RMSprop({}, lr=0.01)",
    "rmsprop momentum": "torch.optim.RMSprop({}, lr=0.01, momentum=0.9, centered=True)",
    "adagrad": "torch.optim.Adagrad({}, lr=0.05)",
    "adagrad fused": "torch.optim.Adagrad({}, lr=0.05, fused=True)",
    "adadelta": "torch.optim.Adadelta({})",
    "adamax": "torch.optim.Adamax({}, lr=0.01)",
    "nadam": "torch.optim.NAdam({}, lr=0.01)",
    "radam": "torch.optim.RAdam({}, lr=0.01)",
    "asgd": "torch.optim.ASGD({}, lr=0.01)",
    "rprop": "torch.optim.Rprop({}, lr=0.01)",
}
SCHEDULES = {
    "step": "torch.optim.lr_scheduler.StepLR({}, 5, 0.5)",
    "lambda": "torch.optim.lr_scheduler.LambdaLR({}, lambda n: 1 / (1 + n))",
    "one cycle": "torch.optim.lr_scheduler.OneCycleLR({}, 0.1, total_steps=200, cycle_momentum=False)",
    "plateau": "torch.optim.lr_scheduler.CosineAnnealingLR({}, 20)",
}
STATEFUL = ("Conv", "Norm", "Spectral")
"""Layers that a pipeline may not have: torch runs them on uninitialized memory to find out shapes."""
LAYERS = (
    "Dense",
    "Conv",
    "Norm",
    "Drop",
    "Attention",
    "Recurrent",
    "Tied",
    "Spectral",
    "Weighted",
    "Embedded",
    "Twice",
)
READING = ("Scaled", "Branch", "Tells")
FORMS = ("one",) * 6 + ("given", "each", "both", "split")
RARE_LINES = ("noise", "decay", "clear", "train", "eval", "grad none", "times", "times", "times", "mode", "lr", "step")
RESULTS = ("loss",) * 6 + ("loss and output", "either", "number", "keys", "none", "output", "nothing")
EVENTS = (
    *("load model", "load optimizer", "lr", "lr", "mode", "clear state", "freeze", "unfreeze", "grad none"),
    *("own grads", "zero grads", "swap grads", "alias grads", "one grad none", "data", "data transposed", "parameter"),
    *("buffer", "optimizer", "scale", "module hook", "tensor hook", "accumulate hook", "optimizer hook", "unhook"),
    *("step", "step", "zero", "zero in place", "evaluate", "add group", "times", "collect", "momentum", "drop layer"),
    *("grad scaled", "own grads kept", "deep copy", "reload", "new scheduler", "state value", "backward outside"),
)

OPTIMIZER_EVENTS = ("load optimizer", "lr", "clear state", "optimizer hook", "state value", "scale", "momentum")


class Draw:
    """Draws parts of one program."""

    def __init__(self, seed: int, pipeline: bool) -> None:
        self.random = random.Random(seed)
        self.seed, self.is_pipeline = seed, pipeline
        self.values: list[Value] = []

    def is_so(self, chance: float) -> bool:
        return self.random.random() < chance

    def one_of(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def value(self, *kinds: str) -> int:
        """The number of a value of one of these kinds: a new one, or one that is there."""
        there = [i for i, value in enumerate(self.values) if value.kind in kinds and value.holder != "layer"]
        if there and self.is_so(0.3):
            return int(self.one_of(there))
        self.values.append(self._new(self.one_of(kinds)))
        return len(self.values) - 1

    def _new(self, kind: str) -> Value:
        calls = sorted(self.random.sample(range(4, 20), self.random.randint(1, 3)))
        holder = self.one_of(HOLDERS if kind == "flag" else HOLDERS[:-1])
        if kind == "count":
            return Value(holder, "counts")
        schedule = self.one_of(FLAGS if kind == "flag" else NUMBERS)
        if schedule == "period":
            period = self.one_of(PERIODS)
            return Value(holder, schedule, (period, self.random.randrange(period)))
        return Value(holder, schedule, tuple(calls) if schedule in ("flips", "grows") else (calls[-1],))

    def condition(self, chance: float) -> Condition | None:
        if not self.is_so(chance):
            return None
        period = self.one_of(PERIODS)
        value = self.value("flag", "flag", "count", "number")
        return Condition(value, period, self.random.randrange(period), self.is_so(0.2))

    def layers(self) -> tuple[Layer, ...]:
        found = []
        for _ in range(2 if self.is_pipeline else self.random.randint(1, 3)):
            if self.is_so(0.2):
                kind = self.one_of(READING[:2] if self.is_pipeline else READING)
                found.append(Layer(kind, self.value("flag", "number", "count")))
            else:
                allowed = [kind for kind in LAYERS if not self.is_pipeline or kind not in STATEFUL]
                found.append(Layer(self.one_of(allowed)))
        return tuple(found)

    def optimizer(self, model: int) -> Optimizer:
        kind = self.one_of([*OPTIMIZERS, "sgd", "momentum", "adam", "adamw", "adam fused", "adamw fused"])
        schedule = self.one_of(list(SCHEDULES)) if self.is_so(0.15) else None
        return Optimizer(kind, model, self.is_so(0.2), schedule)

    def backward(self, which: int) -> Line:
        weight = self.value("number", "flag", "count") if self.is_so(0.25) else None
        form = self.one_of(("square", "square", "smooth", "log softmax", "penalty"))
        if self.is_so(0.06):
            form = self.one_of(("autograd.grad", "inputs", "retain"))
        return Line("backward", which, self.condition(0.1), weight, form)

    def lines(self, form: str, models: int, scaler: str | None, average: str | None, outside: bool) -> tuple[Line, ...]:
        """The lines of a whole step; `outside` leaves optimizers to the loop."""
        found: list[Line] = []
        if self.is_so(0.15):  # reads a count without effect
            found.append(Line("times", 0, Condition(self.value("count"), 1000, 999)))
        scaled = "scaled " if scaler is not None else ""
        for which in range(models if form == "both" else 1):
            zero = Line(self.one_of(("zero", "zero", "zero in place", "zero model")), which, self.condition(0.2))
            place = 1.0 if outside else self.random.random()
            found += [zero] if place < 0.55 else []
            found += [self.backward(which) for _ in range(2 if self.is_so(0.15) else 1)]
            found += [Line("unscale", which)] if scaled and self.is_so(0.3) else []
            found += [Line(self.one_of(("clip", "clip value")), which, self.condition(0.2))] if self.is_so(0.25) else []
            found += self.applied(which, scaled) if not outside else []
            found += [zero] if 0.55 <= place < 0.85 else []
            found += [Line("average", which, self.condition(0.2))] if average is not None else []
        for _ in range(0 if outside else self.random.choice((0, 0, 0, 0, 1, 1, 2))):
            kind = self.one_of(RARE_LINES)
            which = self.random.randrange(models if form == "both" else 1)
            line = Line(kind if kind != "step" else f"{scaled}step", which, self.condition(0.7))
            found.insert(0 if kind == "times" else self.random.randint(0, len(found)), line)
        return tuple(found)

    def applied(self, which: int, scaled: str) -> list[Line]:
        """How gradients are applied."""
        condition = self.condition(0.25)
        step = Line("closure" if not scaled and self.is_so(0.04) else f"{scaled}step", which, condition)
        if self.is_so(0.08):
            order = self.condition(1.0)
            assert order is not None
            other = Condition(order.value, order.period, order.phase, not order.negated)
            return [Line("decay", which, order), step, Line("decay", which, other)]
        if condition is not None and self.is_so(0.5):
            return [step, Line("zero", which, condition)]
        return [step] if self.is_so(0.93) else []

    def applied_outside(self, models: int) -> tuple[Event, ...]:
        """The loop applies gradients, every few calls."""
        when, zero = ("every", self.one_of((1, 2, 2, 3)), 0), self.one_of(("zero", "zero", "zero in place"))
        return tuple(Event(kind, when, which) for which in range(models) for kind in ("step", zero))

    def events(self, models: int, calls: int) -> tuple[Event, ...]:
        found: list[Event] = []
        for _ in range(self.random.choice((0, 1, 1, 2, 2, 3, 4, 6))):
            when: tuple[str, int, int] = ("at", self.random.randint(1, calls - 2), 0)
            if found and self.is_so(0.4):
                when = found[-1].when
            elif self.is_so(0.25):
                period = self.one_of(PERIODS[:-1])
                when = ("every", period, self.random.randrange(period))
            kind = self.one_of(OPTIMIZER_EVENTS if self.is_so(0.25) else EVENTS)
            found.append(Event(kind, when, self.random.randrange(models), self.random.randrange(12)))
        return tuple(found)

    def calls_of(self, form: str) -> tuple[int, ...]:
        periods = [value.at[0] for value in self.values if value.schedule == "period"]
        calls = min(MOST_CALLS, max([self.one_of((14, 20, 28)), *(2 * period + 6 for period in periods)]))
        if form in ("given", "each"):
            if self.is_so(0.4):
                return tuple(self.random.randrange(2) for _ in range(calls))
            pairs = [self.random.sample((0, 1), 2) for _ in range(calls // 2)]
            return tuple(which for pair in pairs for which in pair)
        if form == "split":
            period = self.one_of((2, 2, 2, 3))
            return tuple(int(i % period == period - 1) for i in range(calls))
        return (0,) * calls

    def options(self) -> tuple[tuple[str, Any], ...]:
        found: dict[str, Any] = {}
        if self.is_so(0.3):
            found["warmup"] = self.one_of((1, 2, 2))
        if self.is_so(0.2):
            found["audit"] = self.one_of((1, 3, 7))
        if self.is_so(0.2):
            found["on_error"] = self.one_of(("eager", "modules"))
        return tuple(found.items())

    def program(self) -> Program:
        form = "pipeline" if self.is_pipeline else self.one_of(FORMS)
        models = 2 if form in ("given", "each", "both") else 1
        scaler = None if self.is_pipeline or not self.is_so(0.2) else self.one_of(("enabled", "enabled", "disabled"))
        average = self.one_of(("lerp", "swa")) if form in ("one", "both") and self.is_so(0.12) else None
        layers = self.layers()
        nets = (layers,) * models if form in ("given", "each") else tuple([layers, self.layers()][:models])
        optimizer = self.optimizer(0)
        optimizers = tuple(
            optimizer if i == 0 else Optimizer(optimizer.kind, i, optimizer.grouped, optimizer.schedule)
            for i in range(models)
        )
        outside = scaler is None and form != "split" and self.is_so(0.5 if form in ("given", "each") else 0.15)
        lines = self.lines(form, models, scaler, average, outside)
        steps = (lines,)
        if form == "split":
            cut = next((i for i, line in enumerate(lines) if "backward" in line.kind), 0) + 1
            steps = (lines[:cut], lines[cut:])
        result = self.one_of(RESULTS)
        needs = result in ("either", "keys", "none", "output")
        condition = self.condition(0.8 if needs else 0.0)
        order = self.calls_of(form)
        small, other = [
            tuple(sorted(self.random.sample(range(len(order)), self.random.randint(1, 5))))
            if self.is_so(chance)
            else ()
            for chance in (0.1, 0.04)
        ]
        return Program(
            form,
            nets,
            optimizers,
            steps,
            order,
            result,
            condition,
            tuple(self.values),
            (self.applied_outside(models) if outside else ()) + self.events(models, len(order)),
            small,
            other,
            scaler,
            not self.is_pipeline and self.is_so(0.05),
            average,
            self.options(),
            self.is_so(0.7) if form in ("each", "split") else False,
            self.one_of(("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")),
            self.seed,
        )


USED_OFTEN = ("Twice", "Tied", "Recurrent", "Spectral", "Weighted", "Attention")
"""Layers that use a parameter several times."""


def draw(seed: int, engine: str = "capture") -> Program:
    """The program of a seed, of a form that the engine takes, and within its documented limits.

    A penalty on weights is a use outside of graphed parts. Where a part uses a weight several times, or a backward
    comes without the penalty, the last bits of its gradient may differ: docs/modules.md says so.
    """
    program = Draw(seed, engine == "stage").program()
    if engine == "capture":
        return program
    lines = [line for step in program.steps for line in step]
    often = any(layer.kind in USED_OFTEN for net in program.models for layer in net)
    late = any(line.condition is not None or line.form != "penalty" for line in lines if line.kind == "backward")
    if often or late:
        plain = {line: replace(line, form="square") for line in lines if line.form == "penalty"}
        return replace(program, steps=tuple(tuple(plain.get(line, line) for line in step) for step in program.steps))
    return program


def literal(part: Any) -> str:
    """A program as Python, without what is so by default."""
    if is_dataclass(part):
        words = [
            f"{field.name}={literal(getattr(part, field.name))}"
            for field in fields(part)
            if field.default is MISSING or getattr(part, field.name) != field.default
        ]
        return f"{type(part).__name__}({', '.join(words)})"
    if isinstance(part, tuple):
        if len(part) > 3 and len(set(part)) == 1:
            return f"({literal(part[0])},) * {len(part)}"
        return f"({', '.join(map(literal, part))}{',' if len(part) == 1 else ''})"
    return repr(part)
