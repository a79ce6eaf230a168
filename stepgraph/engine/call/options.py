"""`Options` has the options that all entry points share; each entry point adds its own in a subclass.

An option is declared once, as a field: its type, its default, and the sentence that `help()` shows. `checked` refuses
a value of another type. `reads_options` adds the options to a public function: `help()` lists them, the error for a
misspelt name suggests the nearest one, and an older name is accepted with a warning.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import torch

from stepgraph.core.errors import InvalidArgument, nearest
from stepgraph.core.frames import warn_user
from stepgraph.core.tracebacks import entry_point
from stepgraph.core.wording import with_article
from stepgraph.engine.backends import Backend, refuse_unknown_backend
from stepgraph.engine.call.session import Session

Audit = Literal["auto", False] | int
OnError = Literal["raise", "eager", "modules"]
PairOnError = Literal["raise", "eager"]
Outputs = Literal["copy", "static"]
Hook = Callable[..., Any] | str
_Function = TypeVar("_Function", bound=Callable[..., Any])

_SHARED = {
    "session": "The `stepgraph.Session` whose memory and stream to share; by default a new session.",
    "backend": '"cuda" or "tape"; by default the one for the device of the tensors in use.',
}
"""The sentences of keywords that are not fields."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options that `capture`, `graph_modules` and `graph_stage` share, with one meaning."""

    warmup: Annotated[int, "Eager calls (of modules rounds, of stages steps) before the capture, at least 1."] = 3
    max_graphs: Annotated[int, "Signatures that get graphs, of each module or step; further ones run eagerly."] = 8
    strict: Annotated[bool, "Raise wherever a call would run eagerly after warm-up; overrides `on_error`."] = False
    on_error: Annotated[
        OnError, 'If a capture fails: "raise", or go on with a warning: "eager", or "modules" with graphs for modules.'
    ] = "raise"
    outputs: Annotated[Outputs, 'Results: "copy" is safe to keep, "static" is overwritten by the next call.'] = "copy"
    generators: Annotated[Sequence[torch.Generator], "Random generators used besides the device's default one."] = ()
    ignore: Annotated[Sequence[str], 'Host values that may change without harm, by name: ["self.steps"].'] = ()
    safe_hooks: Annotated[Sequence[Hook], "Module hooks that may be recorded, as functions or names."] = ()
    audit: Annotated[
        Audit, 'When to record again and compare: "auto" (after 1, 2, 4, ... replays), every N replays, or False.'
    ] = "auto"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), hint))

    @property
    def goes_on_eagerly(self) -> bool:
        """True if a step goes on after a failed capture, in eager or with graphs for modules; otherwise it raises."""
        return self.on_error != "raise" and not self.strict


@dataclass(frozen=True, slots=True)
class PairOptions(Options):
    """The options of what is captured as pairs of forward and backward."""

    on_error: Annotated[PairOnError, 'If a capture fails: "eager" to go on eagerly, with a warning, or "raise".'] = (
        "eager"
    )


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return the value of an option of this type, a list as a tuple. Refuse any other value."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    expected = ""
    if hint == Audit and not (is_count or value is False or value == "auto"):
        expected = "'auto', a whole number of at least 1, or False"
        why = "it sets after how many replays the step is recorded again and compared."
        fix = "audit='auto' is the default; audit=1000 compares every thousand replays, audit=False never."
    elif hint is int and not is_count:
        expected = "a whole number of at least 1"
        why, fix = "it is a count of at least one.", f"pass {name}=3, for example."
    elif hint is bool and not isinstance(value, bool):
        expected = "True or False"
        why, fix = "in Python any text counts as true, even 'no'.", f"pass {name}=True, or leave it out."
    elif get_origin(hint) is Literal and value not in get_args(hint):
        words: tuple[str, ...] = get_args(hint)
        expected, near = f"one of {', '.join(map(repr, words))}", nearest(str(value), words)
        why = "a misspelt option must not be taken for another one."
        fix = f"did you mean {near!r}?" if near else f"pass {name}={words[0]!r}, for example."
    elif get_origin(hint) is Sequence:
        return _listed(name, value, get_args(hint)[0])
    if expected:
        raise InvalidArgument(f"{name}={value!r} is not {expected}", rule="option", why=why, fix=fix)
    return value


def _listed(name: str, value: Any, kind: Any) -> tuple[Any, ...]:
    """Check a list option. A single string is refused: it would be read as a list of letters."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        called = str(getattr(value, "__name__", ""))
        one = repr(value) if isinstance(value, (str, bytes)) else called if called.isidentifier() else "..."
        raise InvalidArgument(
            f"{name}={value!r} is not a list",
            rule="option",
            why="it takes any number of items, and Python reads a single string as a list of letters.",
            fix=f"pass {name}=[{one}].",
        )
    items = tuple(value)
    expected, listed, why = _ITEMS[getattr(kind, "__name__", "Hook")]
    for item in items:
        if not (isinstance(item, kind) if isinstance(kind, type) else isinstance(item, str) or callable(item)):
            raise InvalidArgument(
                f"{name}: {item!r} is not {expected}", rule="option", why=why, fix=f"pass a list of {listed}."
            )
    return items


def reads_options(
    options: type[Any],
    *,
    older: Callable[[dict[str, Any]], None] = lambda given: None,
    **sentences: str,
) -> Callable[[_Function], _Function]:
    """Decorate a public function with options: its `help()` lists each with a sentence.

    `options` declares them. `older` replaces older names among the given keywords. `sentences` describe keywords that
    are not fields of `options`.
    """
    types = get_type_hints(options, include_extras=True)
    known = _SHARED | {name: hint.__metadata__[0] for name, hint in types.items() if get_origin(hint) is Annotated}

    def decorate(function: _Function) -> _Function:
        shown = _spelled_out(inspect.signature(function), options)
        names = [p.name for p in shown.parameters.values() if p.kind is not inspect.Parameter.POSITIONAL_ONLY]
        listed = [p for p in shown.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
        lines = [f"    {p.name} ({p.default!r}): {(known | sentences).get(p.name, '')}" for p in listed]

        @entry_point
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            older(given)
            refuse_unknown(function.__qualname__.removesuffix(".__init__"), given, names)
            for name in _PLACES.keys() & given.keys():
                expect(name, given[name], *_PLACES[name])
            if isinstance(given.get("backend"), str):
                refuse_unknown_backend(given["backend"])
            return function(*args, **given)

        cast(Any, call).__signature__ = shown
        call.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])
        return cast(_Function, call)

    return decorate


def _spelled_out(signature: inspect.Signature, options: type[Any]) -> inspect.Signature:
    """Replace `**options` in a signature by the options themselves."""
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(own) < len(signature.parameters):
        taken = {p.name for p in own}
        fields = [p for p in inspect.signature(options).parameters.values() if p.name not in taken]
        types = get_type_hints(options)
        fields = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[p.name]) for p in fields]
        first = [p for p in own if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        own = [*first, *fields, *own[len(first) :]]
    return signature.replace(parameters=own)


def refuse_unknown(function: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse a keyword that a function does not have; the error suggests the nearest one."""
    for name in given:
        if name not in known:
            near = nearest(name, known)
            raise InvalidArgument(
                f"{function} has no option `{name}`",
                rule="option",
                why="a misspelt option would silently stay at its default.",
                fix=f"did you mean `{near}`?" if near else f"its options are {', '.join(known)}.",
            )


def refuse_both(given: Mapping[str, Any], old: str, new: str) -> None:
    """Refuse an option that is given under both names."""
    if given.get(new) is not None:
        raise InvalidArgument(
            f"both `{new}` and `{old}` are given",
            rule="option",
            why="they are two spellings of one option.",
            fix=f"pass `{new}`.",
        )


def renamed(given: dict[str, Any], old: str, new: str) -> None:
    """Accept an option under its older name, with a warning."""
    if old in given:
        refuse_both(given, old, new)
        value = given.pop(old)
        warn_user(f"`{old}` is an older name of `{new}`   [option]\nFix: {new}={value!r}.")
        given[new] = value


def expect(name: str, value: Any, kinds: tuple[type, ...], why: str, fix: str) -> None:
    """Refuse an option that is given and is not of these classes."""
    if value is not None and not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidArgument(f"{name}={value!r} is not {with_article(expected)}", rule="option", why=why, fix=fix)


_PLACES: dict[str, tuple[tuple[type, ...], str, str]] = {
    "session": (
        *((Session,), "a session owns the pool and the stream that captures share."),
        "write `with stepgraph.Session() as session: ...` and pass session=session.",
    ),
    "pool": (
        *((Session,), "graphs that share memory also share a stream and an owner, which the handle of a pool lacks."),
        "pass a stepgraph.Session, the same one to all that share its pool.",
    ),
    "backend": (
        *((str, Backend), "it is a name, or an object returned by stepgraph.backend_for."),
        "pass backend='cuda' or backend='tape', or leave it out.",
    ),
}
"""Keywords that are not fields: their classes, why, and fix."""
_ITEMS = {
    "str": ("a name", "names", "ignore= takes the names that messages show."),
    "Generator": (
        *("a torch.Generator", "torch.Generator objects"),
        "each generator is registered with every graph, so that replays advance it.",
    ),
    "Hook": ("a function or name", "functions or names", "a hook is identified by the function that it runs."),
}
"""The items of list options, by the name of their class, which another one may stand for (`script.cuda_on_cpu`): one
item, several items, and why."""
