"""Makes a program that fails smaller, as long as it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.generated.program import Condition, Event, Layer, Line, Optimizer, Program, Value

TRIES = 250
FAILED = ("different", "changed by a refusal", "foreign error", "killed", "timeout", "broken")
Judge = Callable[[Program], dict[str, Any]]


def is_same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Two failures of one kind."""
    return one["outcome"] == two["outcome"] and one.get("rule") == two.get("rule")


def shrink(
    program: Program, outcome: dict[str, Any], judge: Judge, tries: int = TRIES
) -> tuple[Program, dict[str, Any]]:
    """The smallest program found that fails as the given one does, and its outcome."""
    seen = {program}
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(program, outcome):
            if candidate in seen:
                continue
            seen.add(candidate)
            if tries == 0:
                return program, outcome
            tries -= 1
            try:
                found = judge(candidate)
            except (KeyError, IndexError):  # a program that cannot be written
                continue
            if is_same(found, outcome):
                program, outcome, smaller = candidate, found, True
                break
    return program, outcome


def candidates(program: Program, outcome: dict[str, Any]) -> Iterator[Program]:
    """Programs that are a little smaller, the boldest first."""
    yield from _fewer_calls(program, outcome)
    if len(program.events) > 1:
        half = len(program.events) // 2
        yield replace(program, events=())
        yield replace(program, events=program.events[:half])
        yield replace(program, events=program.events[half:])
    yield from _one_model(program)
    for i in range(len(program.events)):
        yield replace(program, events=_without(program.events, i))
    yield from _plainer(program)
    yield from _fewer_lines(program)
    yield from _fewer_layers(program)
    for i, optimizer in enumerate(program.optimizers):
        for kind in ("sgd", "momentum", "adam"):
            plain = Optimizer(kind, optimizer.model)
            if _rank(optimizer) > _rank(plain):
                yield replace(program, optimizers=_with(program.optimizers, i, plain))
        if optimizer.schedule is not None or optimizer.grouped:
            yield replace(program, optimizers=_with(program.optimizers, i, Optimizer(optimizer.kind, optimizer.model)))
    yield from _plainer_parts(program)


def _rank(optimizer: Optimizer) -> tuple[int, bool, bool]:
    kinds = ("sgd", "momentum", "adam")
    rank = kinds.index(optimizer.kind) if optimizer.kind in kinds else len(kinds)
    return rank, optimizer.grouped, optimizer.schedule is not None


def _without(parts: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    return (*parts[:i], *parts[i + 1 :])


def _with(parts: tuple[Any, ...], i: int, part: Any) -> tuple[Any, ...]:
    return (*parts[:i], part, *parts[i + 1 :])


def _fewer_calls(program: Program, outcome: dict[str, Any]) -> Iterator[Program]:
    found = re.match(r"after call (\d+)", outcome.get("detail", ""))
    last = int(found.group(1)) + 1 if found else len(program.order) - 1
    for count in (last, len(program.order) // 2, len(program.order) - 1):
        if 0 < count < len(program.order):
            yield replace(program, order=program.order[:count])


def _one_model(program: Program) -> Iterator[Program]:
    if program.form not in ("given", "each", "both"):
        if program.form == "split":
            lines = program.steps[0] + program.steps[1]
            yield replace(program, form="one", steps=(lines,), order=(0,) * len(program.order), shared=False)
        return
    for which in (0, 1):
        lines = tuple(
            replace(line, which=0) for line in program.steps[0] if program.form != "both" or line.which == which
        )
        events = tuple(replace(event, which=0) for event in program.events if event.which == which)
        yield replace(
            program,
            form="one",
            models=program.models[which : which + 1],
            optimizers=(replace(program.optimizers[which], model=0),),
            steps=(lines,),
            order=(0,) * len(program.order),
            events=events,
            shared=False,
        )


def _plainer(program: Program) -> Iterator[Program]:
    """Without what a program has once."""
    plain: dict[str, Any] = {"average": None, "autocast": False, "small": (), "other_dtype": (), "shared": False}
    plain |= {"result": "loss", "result_condition": None}
    for name, value in plain.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})
    for i in range(len(program.options)):
        yield replace(program, options=_without(program.options, i))
    if program.scaler is not None:
        kinds = {"scaled step": "step"}
        steps = tuple(
            tuple(replace(line, kind=kinds.get(line.kind, line.kind)) for line in lines if line.kind != "unscale")
            for lines in program.steps
        )
        yield replace(program, scaler=None, steps=steps)


def _fewer_lines(program: Program) -> Iterator[Program]:
    for s, lines in enumerate(program.steps):
        for i, line in enumerate(lines):
            yield replace(program, steps=_with(program.steps, s, _without(lines, i)))
            for plain in _plainer_lines(line):
                yield replace(program, steps=_with(program.steps, s, _with(lines, i, plain)))


def _plainer_lines(line: Line) -> Iterator[Line]:
    if line.condition is not None:
        yield replace(line, condition=None)
        c = line.condition
        for plain in (Condition(c.value, 2, 0), Condition(c.value, c.period, c.phase)):
            if plain != c and (c.negated or c.period > 2):
                yield replace(line, condition=plain)
    if line.weight is not None:
        yield replace(line, weight=None)
    if line.form not in ("", "square"):
        yield replace(line, form="square")


def _fewer_layers(program: Program) -> Iterator[Program]:
    is_one_kind = program.form in ("given", "each")
    for m, layers in enumerate(program.models):
        for i, layer in enumerate(layers):
            found = [_without(layers, i)] if len(layers) > 1 else []
            if layer != Layer("Dense"):
                found.append(_with(layers, i, Layer("Dense")))
            for fewer in found:
                models = (fewer,) * len(program.models) if is_one_kind else _with(program.models, m, fewer)
                yield replace(program, models=models)


def _plainer_parts(program: Program) -> Iterator[Program]:
    for i, event in enumerate(program.events):
        how, first, second = event.when
        if how == "every":
            for when in (("at", second, 0), ("at", first + second, 0)):
                yield replace(
                    program, events=_with(program.events, i, Event(event.kind, when, event.which, event.number))
                )
        if event.number > 1:
            yield replace(program, events=_with(program.events, i, replace(event, number=event.number % 2)))
    for i, value in enumerate(program.values):
        if value.holder != "space":
            yield replace(program, values=_with(program.values, i, replace(value, holder="space")))
        if len(value.at) > 1 and value.schedule in ("flips", "grows"):
            for k in range(len(value.at)):
                yield replace(program, values=_with(program.values, i, replace(value, at=_without(value.at, k))))
        if value.schedule == "ramps":
            yield replace(program, values=_with(program.values, i, Value(value.holder, "rests")))
