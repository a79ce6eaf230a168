"""Shows from source that all that code does with a number is to ask: compare it, test it, compute with it on the way.

A stand-in (`values.decisions`) hears comparisons, truth tests, arithmetic, conversions and formats. It does not hear
`flag is True`, `type(n) is int`, a pattern of `match`, or code in C that takes another path for an object that is no
number. So a number gets a stand-in only where the source of the code that ran shows that each use of its name ends in
something that is heard. Where that cannot be shown, the number itself counts: each change of it is a change.

`Uses` follows a name through expressions, local variables, parameters and results of functions that ran. Anything else
is no proof: a container, a function in C, a name that is looked up by another string, code without source.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import opcode
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stepgraph.core.executed_code import strings_in
from stepgraph.core.frames import is_engine, is_installed, is_users_code
from stepgraph.engine.guards.host_values.parts import Place, attribute_of, item_at

_ENDS = frozenset(
    ("bool", "int", "float", "complex", "str", "repr", "hash", "format", "range", "isinstance", "len", "print")
)
"""Functions whose result no longer depends on the stand-in: what they ask is heard."""
_PASSES = frozenset(("abs", "min", "max", "round", "divmod", "pow"))
"""Functions that may return the stand-in, or an expression of it."""
_AT_LARGE = frozenset(
    (
        *("vars", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "getmembers", "asdict", "astuple"),
        *("replace", "eval", "exec"),
    )
)
"""Names with which code reads attributes that it does not spell."""
_OF_ITEMS = frozenset(("values", "items", "copy", "update", "dict", "itemgetter"))
"""The same for items of a dict."""
_OPERATORS = frozenset(
    f"__{swapped}{name}__"
    for swapped in ("", "r", "i")
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor", "divmod"),
        *("eq", "ne", "lt", "le", "gt", "ge", "getitem", "contains"),
    )
)
"""Methods that are given the other side of an operation."""
_MAX_FOLLOWED = 256
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_IDENTITY = (ast.Is, ast.IsNot)
_ATTRIBUTE, _ITEM, _VARIABLE = "attribute", "item", "variable"


@dataclass(frozen=True, slots=True)
class _Followed:
    """What may be the number: a named value, a local variable of a function, or what functions of a name return."""

    name: str
    kind: str
    function: ast.AST | None = None


class _Unknown(Exception):
    """A use that a stand-in may not hear."""


class _Source:
    """A parsed file."""

    def __init__(self, tree: ast.Module) -> None:
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.functions: dict[tuple[str, int], list[ast.AST]] = {}
        for node in self.parents:
            if isinstance(node, _FUNCTIONS):
                line = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                self.functions.setdefault((node.name, line), []).append(node)
            elif isinstance(node, ast.Lambda):
                self.functions.setdefault(("<lambda>", node.lineno), []).append(node)


@functools.lru_cache(maxsize=256)
def _parsed(file: str, text: str) -> _Source | None:
    try:
        return _Source(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _source(file: str) -> _Source | None:
    lines = linecache.getlines(file)
    return _parsed(file, "".join(lines)) if lines else None


class Uses:
    """The uses of names in code that ran."""

    def __init__(self, codes: Iterable[types.CodeType]) -> None:
        self._codes = [code for code in codes if not is_engine(code.co_filename)]

    def only_ask(self, place: Place) -> bool:
        """Check that code does nothing with the number at a place but to ask something that a stand-in hears."""
        followed = _name_of(place)
        if followed is None:
            return False
        codes = self._codes if not place.is_users else [code for code in self._codes if _may_be_users(code)]
        try:
            _Search(codes).follow(followed)
        except _Unknown:
            return False
        return True


def _name_of(place: Place) -> _Followed | None:
    if place.read is attribute_of and type(place.where) is types.CellType:
        return _Followed(place.label.spelling.rpartition(".")[2], _VARIABLE)
    if place.read is not item_at or type(place.where) is not dict or type(place.key) is not str:
        return None
    if "__builtins__" in place.where or "__spec__" in place.where:
        return _Followed(place.key, _VARIABLE)
    return _Followed(place.key, _ITEM if place.label.spelling.endswith("]") else _ATTRIBUTE)


class _Search:
    """Follows a value through some code."""

    def __init__(self, codes: Sequence[types.CodeType]) -> None:
        self._codes = codes
        self._roots: list[tuple[ast.AST, _Source]] = []
        """The functions that spell the name, or may be called with the value."""
        self._read: set[types.CodeType] = set()
        self._parents: dict[ast.AST, ast.AST] = {}
        self._name = ""

    def follow(self, first: _Followed) -> None:
        """Raise `_Unknown` if a use may not be heard."""
        self._name = first.name
        for code in self._codes:
            if _spells(code, first.name):
                self._read_code(code)
        self._refuse_at_large(first)
        done: set[_Followed] = set()
        waiting = [first, *self._operators()]
        while waiting:
            one = waiting.pop()
            if one not in done:
                done.add(one)
                if len(done) > _MAX_FOLLOWED:
                    raise _Unknown
                for node in self._occurrences(one):
                    waiting += self._use(node)

    # -- code

    def _read_code(self, code: types.CodeType) -> None:
        """Add the function of some code."""
        if code in self._read:
            return
        self._read.add(code)
        if code.co_name.startswith("<") and code.co_name != "<lambda>" and code.co_name != "<module>":
            return  # a comprehension: a part of a function that ran
        source = _source(code.co_filename)
        found = source.functions.get((code.co_name, code.co_firstlineno), []) if source is not None else []
        if source is None or not found:
            raise _Unknown
        for node in found:
            self._roots.append((node, source))
            self._parents.update({child: source.parents[child] for child in ast.walk(node)})

    def _called(self, name: str) -> list[_Function]:
        """Return the functions that ran, of a name."""
        for code in self._codes:
            if code.co_name == name:
                self._read_code(code)
        return [node for node, _ in self._roots if isinstance(node, _FUNCTIONS) and node.name == name]

    def _operators(self) -> Iterator[_Followed]:
        """Yield the parameters of the user's own operators, which may be given the number."""
        for code in self._codes:
            is_own = is_users_code(code) and not is_installed(code.co_filename)
            if is_own and code.co_name in _OPERATORS and code.co_argcount == 2:
                for function in self._called(code.co_name):
                    parameters = [*function.args.posonlyargs, *function.args.args]
                    yield _Followed(parameters[-1].arg, "local", function)

    def _refuse_at_large(self, first: _Followed) -> None:
        if first.kind == _VARIABLE:
            return
        hidden = _AT_LARGE if first.kind == _ATTRIBUTE else _AT_LARGE | _OF_ITEMS
        for code in self._codes:
            if is_users_code(code) and not is_installed(code.co_filename):
                found = strings_in(code)
                if not hidden.isdisjoint(found) or _matches_classes(code):
                    raise _Unknown
                if "getattr" in found:
                    self._read_code(code)
        for node in self._nodes():
            if isinstance(node, ast.Call) and _last_name(node.func) == "getattr":
                if not isinstance(node.args[1], ast.Constant) and not self._passes_on(node):
                    raise _Unknown
            elif isinstance(node, ast.keyword) and node.arg is None and first.kind == _ITEM:
                raise _Unknown

    def _passes_on(self, node: ast.AST) -> bool:
        """Check for a `__getattr__`: who asks it spells the name."""
        function = self._function_of(node)
        return isinstance(function, _FUNCTIONS) and function.name == "__getattr__"

    def _nodes(self) -> Iterator[ast.AST]:
        for root, _ in self._roots:
            yield from ast.walk(root)

    # -- occurrences

    def _occurrences(self, one: _Followed) -> Iterator[ast.AST]:
        """Yield the expressions that may be the value."""
        if one.kind == "local":
            assert one.function is not None
            for node in ast.walk(one.function):
                if isinstance(node, ast.Name) and node.id == one.name and isinstance(node.ctx, ast.Load):
                    yield node
            return
        if one.kind == "returned":
            found = list(self._calls(one.name))
            if not found:
                raise _Unknown  # called by other code
            yield from found
            return
        for node in self._nodes():
            is_variable = isinstance(node, ast.Name) and node.id == one.name and one.kind == _VARIABLE
            if is_variable or (isinstance(node, ast.Attribute) and node.attr == one.name):
                yield node
            elif isinstance(node, ast.Constant) and node.value == one.name and type(node.value) is str:
                yield from self._spelled(node)

    def _calls(self, name: str) -> Iterator[ast.AST]:
        """Yield the calls of functions of a name, and the attributes of it, which may be properties."""
        for code in self._codes:
            if _spells(code, name):
                self._read_code(code)
        for node in self._nodes():
            if isinstance(node, (ast.Attribute, ast.Name)) and _last_name(node) == name:
                parent = self._parents[node]
                yield parent if isinstance(parent, ast.Call) and parent.func is node else node

    def _spelled(self, node: ast.Constant) -> Iterator[ast.AST]:
        """Yield what is read by a string, or raise if that is not known."""
        parent = self._parents[node]
        called = _last_name(parent.func) if isinstance(parent, ast.Call) else None
        if isinstance(parent, ast.Subscript) or called in ("getattr", "get"):
            yield parent
        elif called == "hasattr" or (isinstance(parent, ast.Dict) and node in parent.keys):
            return  # nothing is read
        elif not isinstance(parent, (ast.Compare, ast.JoinedStr, ast.Expr)):
            raise _Unknown

    # -- uses

    def _use(self, node: ast.AST) -> list[_Followed]:
        """Return what else may be the value because of this expression, or raise."""
        found: list[_Followed] = []
        while True:
            parent = self._parents[node]
            if self._goes_back(parent, node):
                return found
            if not isinstance(getattr(node, "ctx", None) or ast.Load(), ast.Load):
                raise _Unknown  # code writes it
            if _is_heard(parent, node):
                return found
            if isinstance(parent, (ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.IfExp)):
                node = parent
            elif isinstance(parent, (ast.Tuple, ast.List, ast.Set)) and _is_only_looked_at(
                self._parents[parent], parent
            ):
                return found
            elif isinstance(parent, ast.NamedExpr):
                found.append(self._local(parent.target))
                node = parent
            elif isinstance(parent, ast.Assign):
                return [*found, *(self._local(one) for one in parent.targets if not self._is_named(one))]
            elif isinstance(parent, (ast.AnnAssign, ast.AugAssign)):
                return [*found, self._local(parent.target)]
            elif isinstance(parent, ast.Return):
                function = self._function_of(parent)
                if not isinstance(function, _FUNCTIONS):
                    raise _Unknown
                return [*found, _Followed(function.name, "returned")]
            elif isinstance(parent, (ast.Call, ast.keyword)):
                call = parent if isinstance(parent, ast.Call) else self._parents[parent]
                assert isinstance(call, ast.Call)
                name = _last_name(call.func)
                is_math = isinstance(call.func, ast.Attribute) and _last_name(call.func.value) == "math"
                is_own = name is not None and bool(self._called(name))
                if (name in _ENDS or is_math) and not is_own:
                    return found
                if name in _PASSES and not is_own:
                    node = call
                else:
                    return [*found, *self._passed(call, parent if parent is not call else node)]
            else:
                raise _Unknown

    def _goes_back(self, parent: ast.AST, node: ast.AST) -> bool:
        """Check for `self.count += 1`, or `self.count = self.count + 1`: the number goes back to where it was."""
        if isinstance(parent, ast.AugAssign):
            return parent.target is node
        return (
            isinstance(parent, ast.Assign)
            and any(one is node for one in parent.targets)
            and any(map(self._is_named, ast.walk(parent.value)))
        )

    def _is_named(self, node: ast.AST) -> bool:
        """Check for the name that is followed, as an attribute or a key."""
        if isinstance(node, ast.Attribute):
            return node.attr == self._name
        return isinstance(node, ast.Constant) and node.value == self._name

    def _passed(self, call: ast.Call, given: ast.AST) -> list[_Followed]:
        """Return the parameters that get an argument, in all functions that may be meant."""
        functions = self._called(_last_name(call.func) or "")
        if not functions or any(isinstance(one, ast.Starred) for one in call.args):
            raise _Unknown
        found = []
        for function in functions:
            parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
            if parameters and parameters[0] in ("self", "cls") and isinstance(call.func, ast.Attribute):
                parameters = parameters[1:]
            if isinstance(given, ast.keyword):
                name = given.arg
                if name not in {*parameters, *(one.arg for one in function.args.kwonlyargs)}:
                    raise _Unknown
            else:
                place = [i for i, one in enumerate(call.args) if one is given]
                if not place or place[0] >= len(parameters):
                    raise _Unknown
                name = parameters[place[0]]
            assert name is not None
            found.append(_Followed(name, "local", function))
        return found

    def _local(self, target: ast.AST) -> _Followed:
        """Return the local variable that an assignment sets."""
        function = self._function_of(target)
        if not isinstance(target, ast.Name) or function is None:
            raise _Unknown
        declared = (node for node in ast.walk(function) if isinstance(node, (ast.Global, ast.Nonlocal)))
        if any(target.id in node.names for node in declared):
            raise _Unknown
        return _Followed(target.id, "local", function)

    def _function_of(self, node: ast.AST) -> ast.AST | None:
        """Return the function around a node."""
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
                return node
        return None


def _is_heard(parent: ast.AST, node: ast.AST) -> bool:
    """Check whether a stand-in at `node` hears what its parent asks, so that nothing else depends on it."""
    if isinstance(parent, ast.Compare):
        return _is_compared(parent, node)
    if isinstance(parent, (ast.IfExp, ast.If, ast.While, ast.Assert)):
        return parent.test is node
    if isinstance(parent, ast.comprehension):
        return any(one is node for one in parent.ifs)
    if isinstance(parent, ast.UnaryOp):
        return isinstance(parent.op, ast.Not)
    if isinstance(parent, ast.Call):
        return parent.func is node  # a number is not called
    if isinstance(parent, ast.Match):
        return all(_is_compared_by(case.pattern) for case in parent.cases)
    return isinstance(parent, (ast.FormattedValue, ast.Slice, ast.Subscript, ast.Attribute, ast.Expr))


def _is_only_looked_at(parent: ast.AST, group: ast.AST) -> bool:
    """Check whether a tuple of numbers is compared, or is an index."""
    if isinstance(parent, ast.Compare):
        return _is_compared(parent, group)
    return isinstance(parent, ast.Subscript) and parent.slice is group


def _is_compared(parent: ast.Compare, node: ast.AST) -> bool:
    """Check a comparison: `is` is heard for None only, which no number is."""
    operands = [parent.left, *parent.comparators]
    for operator, left, right in zip(parent.ops, operands, operands[1:], strict=False):
        other = right if left is node else left
        is_none = isinstance(other, ast.Constant) and other.value is None
        if node in (left, right) and isinstance(operator, _IDENTITY) and not is_none:
            return False
    return True


def _is_compared_by(pattern: ast.pattern) -> bool:
    if isinstance(pattern, ast.MatchOr):
        return all(map(_is_compared_by, pattern.patterns))
    is_wildcard = isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None
    return isinstance(pattern, ast.MatchValue) or is_wildcard


def _may_be_users(code: types.CodeType) -> bool:
    """Check for the user's code, or code that was made from a string."""
    return is_users_code(code) or code.co_filename.startswith("<")


def _matches_classes(code: types.CodeType) -> bool:
    """Check for `case State(True)`, which reads attributes without spelling them."""
    operation = opcode.opmap["MATCH_CLASS"]
    if operation not in code.co_code[::2]:  # which has other bytes, too
        return False
    return any(instruction.opcode == operation for instruction in dis.get_instructions(code))


def _spells(code: types.CodeType, name: str) -> bool:
    variables = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    return name in variables or name in strings_in(code)


def _last_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
