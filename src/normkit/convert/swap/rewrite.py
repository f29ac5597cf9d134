"""A forward in which ``s = a + b`` and the norm of ``s`` behind it are one call, made from the forward's own source.

Only these two expressions change, and only where nothing but names stands between them; what replaces them, given the
same operands, may always add and call the norm as the source does. So every other path, argument and state of the
block is served as before: no run is recorded, and none is assumed.

    s = a + b                        y, s = add(a, b, self.norm)
    r = s                            r = s
    t = self.norm(s)                 t = y

A sum written in the call itself, ``self.norm(a + b)``, becomes ``add(a, b, self.norm)[0]``. An ``if x is not None:``
between sum and norm is left in its place, and the two are fused where its body does not run.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

_ADD = "normkit_add"
_FLAGS = functools.reduce(
    lambda a, b: a | b, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
)
_ODD = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Unreadable(Exception):
    """The forward cannot be rewritten; the message says why."""


def rewrite(
    forward: Callable[..., Any], norms: Collection[str], add: Callable[..., Any]
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """A forward with its sums fused, and the attributes whose norms are (once for each place); see the module.

    Args:
        forward: a class's forward; decorators are looked through where they hold it in a closure.
        norms: attributes of self that may be fused.
        add: called as ``add(a, b, norm)``, returns ``(norm(a + b), a + b)``.

    Raises:
        Unreadable: there is no source, or it is not what runs, or it does what cannot be followed.
    """
    inner = getattr(forward, "__wrapped__", None)
    if inner is not None:
        made, places = rewrite(inner, norms, add)
        return _wrapped(forward, inner, made), places
    if not isinstance(forward, FunctionType):
        raise Unreadable("its forward is no plain function")
    code, places = _compiled(forward.__code__, frozenset(norms))
    own = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    own[_ADD] = CellType(add)
    return _like(forward, code, tuple(own[name] for name in code.co_freevars)), places


def _wrapped(wrapper: Any, inner: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator's function around another one."""
    cells = getattr(wrapper, "__closure__", None) or ()
    holding = [c for c in cells if _content(c) is inner]
    if not isinstance(wrapper, FunctionType) or len(holding) != 1:
        raise Unreadable("its forward is wrapped by a decorator that cannot be looked through")
    itself = CellType()  # some ask whether they are the class's forward
    own = (CellType(made) if c is holding[0] else itself if _content(c) is wrapper else c for c in cells)
    again = itself.cell_contents = _like(wrapper, wrapper.__code__, tuple(own))
    again.__wrapped__ = made  # type: ignore[attr-defined]
    return again


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _like(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(made, name, getattr(function, name))
    return made


@functools.lru_cache(maxsize=1024)
def _compiled(code: CodeType, norms: frozenset[str]) -> tuple[CodeType, tuple[str, ...]]:
    if code.co_flags & _ODD or not code.co_argcount:
        raise Unreadable("its forward is no plain function of self")
    try:
        lines, _ = inspect.findsource(code)
        tree = ast.parse("".join(lines))
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise Unreadable("the source of its forward is not at hand") from error
    found = _find(tree, code)
    whole = compile(tree, code.co_filename, "exec", flags=code.co_flags & _FLAGS, dont_inherit=True)
    if found is None or not any(_same(c, code) for c in _codes_in(whole)):
        raise Unreadable("the source of its forward is not what runs: it was changed, or made by a program")
    function, owner = found
    editor = _Editor(function, norms)
    editor.edit()
    return _compile(function, owner, code), tuple(editor.places)


def _find(tree: ast.Module, code: CodeType) -> tuple[ast.FunctionDef, str | None] | None:
    """(the definition that a code object was compiled from, the class around it)."""
    pending: list[tuple[ast.AST, str | None]] = [(tree, None)]
    while pending:
        node, owner = pending.pop()
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node, owner
        if isinstance(node, ast.ClassDef):
            owner = node.name
        pending.extend((child, owner) for child in ast.iter_child_nodes(node))
    return None


def _compile(function: ast.FunctionDef, owner: str | None, code: CodeType) -> CodeType:
    """A definition as it would be compiled where it stands: free names, and private ones of its class."""
    body: ast.stmt = ast.FunctionDef(
        name=function.name, args=_bare(function.args), body=function.body, decorator_list=[], returns=None
    )
    ast.copy_location(body, function)
    if owner is not None:
        body = ast.ClassDef(name=owner, bases=[], keywords=[], body=[body], decorator_list=[])
    free = [ast.arg(arg=n) for n in (*code.co_freevars, _ADD) if n != "__class__"]
    empty = ast.arguments(posonlyargs=[], args=free, kwonlyargs=[], kw_defaults=[], defaults=[])
    outer = ast.FunctionDef(name="outer", args=empty, body=[body], decorator_list=[], returns=None)
    module = ast.fix_missing_locations(ast.Module(body=[outer], type_ignores=[]))
    made = compile(module, code.co_filename, "exec", flags=code.co_flags & _FLAGS, dont_inherit=True)
    for name in ["outer", *([owner] if owner is not None else []), code.co_name]:
        made = next(c for c in made.co_consts if isinstance(c, CodeType) and c.co_name == name)
    named = {"co_qualname": code.co_qualname} if hasattr(code, "co_qualname") else {}
    return made.replace(co_firstlineno=code.co_firstlineno, **named)  # type: ignore[arg-type]


def _bare(given: ast.arguments) -> ast.arguments:
    """Arguments without defaults' and annotations' code, which belong to the definition and not to the function."""
    bare = copy.deepcopy(given)
    for arg in (*bare.posonlyargs, *bare.args, *bare.kwonlyargs, bare.vararg, bare.kwarg):
        if arg is not None:
            arg.annotation = None
    bare.defaults = [ast.Constant(None) for _ in bare.defaults]
    bare.kw_defaults = [None if d is None else ast.Constant(None) for d in bare.kw_defaults]
    return bare


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)


def _same(a: CodeType, b: CodeType) -> bool:
    """Whether two code objects do the same."""
    plain = (
        "co_name",
        "co_firstlineno",
        "co_code",
        "co_names",
        "co_varnames",
        "co_freevars",
        "co_cellvars",
        "co_flags",
    )
    if any(getattr(a, n, None) != getattr(b, n, None) for n in plain) or len(a.co_consts) != len(b.co_consts):
        return False
    return all(
        _same(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else type(x) is type(y) and x == y
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


class _Editor:
    """Finds the pairs in one definition, and changes it."""

    def __init__(self, function: ast.FunctionDef, norms: Collection[str]) -> None:
        self.function, self.norms = function, norms
        first = (*function.args.posonlyargs, *function.args.args)[0]
        self.self = first.arg
        self.places: list[str] = []
        self.ours: list[ast.stmt] = []
        """Deletions that were put in."""
        self.count = 0

    def edit(self) -> None:
        if any(isinstance(node, ast.Global | ast.Nonlocal) for node in ast.walk(self.function)):
            raise Unreadable("its forward declares names of other scopes")
        nodes = list(_within(self.function))
        for node in nodes:
            if isinstance(node, ast.Name) and node.id == self.self and not isinstance(node.ctx, ast.Load):
                raise Unreadable(f"its forward gives {self.self} another value")
            if isinstance(node, ast.Name) and node.id in ("locals", "vars", "exec", "eval", "dir"):
                raise Unreadable(f"its forward looks at its own names ({node.id})")
        for node in nodes:
            self._edit_call(node)
        if any(isinstance(node, ast.ExceptHandler) for node in nodes):
            return  # where the norm raises, it would find the sum not there yet
        for node in [self.function, *nodes]:
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list):
                    self._edit_block(block)

    def _edit_call(self, node: ast.AST) -> None:
        """``self.norm(a + b)`` anywhere in an expression."""
        for field, value in ast.iter_fields(node):
            several = isinstance(value, list)
            for i, child in enumerate(value if several else [value]):
                name = self._norm_called(child) if isinstance(child, ast.Call) else None
                if name is None or not _is_sum(child.args[0]):
                    continue
                both = self._added(child.args[0], name)
                first = ast.copy_location(ast.Subscript(both, ast.Constant(0), ast.Load()), child)
                if several:
                    value[i] = first
                else:
                    setattr(node, field, first)

    def _edit_block(self, block: list[ast.stmt]) -> None:
        i = 0
        while i < len(block):
            found = self._pair(block, i)
            if found is not None:
                call, use, tests = found
                i = self._edit_pair(block, i, call, use, tests)
            i += 1

    def _pair(self, block: list[ast.stmt], i: int) -> tuple[ast.Call, int, list[ast.expr]] | None:
        """(the norm's call, its statement, tests of what stands between) for a sum in statement i."""
        start = block[i]
        if not isinstance(start, ast.Assign) or not _is_sum(start.value) or _names(start.targets) is None:
            return None
        if len(start.targets) != 1 or any(isinstance(n, ast.NamedExpr) for n in ast.walk(start)):
            return None
        sums, tests = set(_names(start.targets) or ()), []
        written = set(sums)
        for k in range(i + 1, len(block)):
            statement = block[k]
            names = _names(statement.targets) if isinstance(statement, ast.Assign) else None
            if isinstance(statement, ast.Assign) and names and isinstance(statement.value, ast.Name | ast.Constant):
                same = isinstance(statement.value, ast.Name) and statement.value.id in sums
                sums = sums | set(names) if same else sums - set(names)
                written |= set(names)
            elif isinstance(statement, ast.If) and not statement.orelse and _is_none_test(statement.test):
                tests.append(statement.test)
            elif not any(statement is made for made in self.ours):
                call = _first_call(statement)
                if call is None or self._norm_called(call) is None:
                    return None
                x = call.args[0]
                if not isinstance(x, ast.Name) or x.id not in sums:
                    return None
                if any(n.id in written for t in tests for n in ast.walk(t) if isinstance(n, ast.Name)):
                    return None
                return call, k, tests
        return None

    def _edit_pair(self, block: list[ast.stmt], i: int, call: ast.Call, k: int, tests: list[ast.expr]) -> int:
        """Change one; the index before the statement that the norm was called in."""
        start = block[i]
        assert isinstance(start, ast.Assign) and isinstance(start.value, ast.BinOp)
        y = f"normkit_y{self.count}"
        self.count += 1
        name = self._norm_called(call)
        assert name is not None
        both = ast.Tuple([ast.Name(y, ast.Store()), *copy.deepcopy(start.targets)], ast.Store())
        fused: ast.stmt = ast.Assign([both], self._added(start.value, name))
        result: ast.expr = ast.Name(y, ast.Load())
        before: list[ast.stmt] = []
        if tests:
            none = ast.Assign([ast.Name(y, ast.Store())], ast.Constant(None))
            test = tests[0] if len(tests) == 1 else ast.BoolOp(ast.Or(), tests)
            fused = ast.If(copy.deepcopy(test), [start], [fused])
            before = [ast.copy_location(none, start)]
            absent = ast.Compare(ast.Name(y, ast.Load()), [ast.Is()], [ast.Constant(None)])
            result = ast.IfExp(absent, copy.copy(call), result)
        _replace(block[k], call, ast.copy_location(result, call))
        after: list[ast.stmt] = []
        if not isinstance(block[k], ast.Return):
            after = [ast.copy_location(ast.Delete([ast.Name(y, ast.Del())]), block[k])]  # else it would live on
            self.ours += after
        block[i : k + 1] = [*before, ast.copy_location(fused, start), *block[i + 1 : k + 1], *after]
        return k + len(before) - 1  # that statement may be a sum as well

    def _added(self, total: ast.expr, name: str) -> ast.Call:
        assert isinstance(total, ast.BinOp)
        self.places.append(name)
        norm = ast.Attribute(ast.Name(self.self, ast.Load()), name, ast.Load())
        made = ast.Call(ast.Name(_ADD, ast.Load()), [total.left, total.right, norm], [])
        return ast.fix_missing_locations(ast.copy_location(made, total))

    def _norm_called(self, call: ast.Call) -> str | None:
        """The attribute whose norm is called with one argument."""
        of = call.func
        mine = isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name) and of.value.id == self.self
        if not mine or len(call.args) != 1 or call.keywords or of.attr not in self.norms:  # type: ignore[union-attr]
            return None
        return of.attr  # type: ignore[union-attr]


def _within(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body, without those of functions and classes inside it."""
    pending = list(getattr(function, "body", []))
    while pending:
        node = pending.pop()
        yield node
        scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        if not isinstance(node, scopes):
            pending.extend(ast.iter_child_nodes(node))


def _is_sum(node: ast.AST | None) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _names(targets: Sequence[ast.expr]) -> list[str] | None:
    """The plain names that are assigned to; None where something else is."""
    return [t.id for t in targets if isinstance(t, ast.Name)] if all(isinstance(t, ast.Name) for t in targets) else None


def _is_none_test(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and isinstance(test.ops[0], ast.Is | ast.IsNot)
        and len(test.ops) == 1
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )


def _first_call(statement: ast.stmt) -> ast.Call | None:
    """The call that a statement starts with: before it, names and attributes are read at most."""
    plain = isinstance(statement, ast.Assign | ast.Return | ast.Expr) or (
        isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name)
    )
    value = getattr(statement, "value", None) if plain else None
    found = None if value is None else _first(value)
    return found if isinstance(found, ast.Call) else None


def _first(node: ast.AST) -> ast.AST | None:
    """What an expression does first, past reading names and attributes; None where it does no more than that."""
    if isinstance(node, ast.Name | ast.Constant):
        return None
    if isinstance(node, ast.Attribute):
        return _first(node.value)
    parts: list[ast.AST] = []
    if isinstance(node, ast.Call):
        parts = [node.func, *node.args, *(k.value for k in node.keywords)]
        if any(k.arg is None for k in node.keywords):
            parts = [node.func, *node.args, node]
    elif isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Tuple | ast.List):
        parts = list(node.elts)
    for part in parts:
        found = node if part is node else _first(part)
        if found is not None:
            return found
    return node


def _replace(root: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Put a node in another's place."""
    for node in ast.walk(root):
        for field, value in ast.iter_fields(node):
            if value is old:
                setattr(node, field, new)
                return
            if isinstance(value, list):
                for i, child in enumerate(value):
                    if child is old:
                        value[i] = new
                        return
