"""The mutants of a file: one small change each, found in its syntax tree and applied to its text.

Nothing that only types or explains is changed: annotations, decorators, docstrings, error texts, `__repr__`, imports, protocols.
A `return` of None is left out as well: nearly every test notices it.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}
TWINS = [("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("minimum", "maximum"), ("sum", "mean"), ("all", "any"),
         ("floor", "ceil"), ("zeros", "ones"), ("zeros_like", "ones_like")]
RENAMED = {a: b for pair in TWINS for a, b in (pair, pair[::-1])}
BUILTINS = {"min": "max", "max": "min", "all": "any", "any": "all"}        # as plain names; `mean` is none
CLAMPS = {"clamp", "clip", "clamp_min", "clamp_max", "nan_to_num"}
UNINTERESTING_KEYWORDS = {"strict", "stacklevel"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: bytes `start` to `end` become `text`. The identity outlives changes elsewhere in the file."""

    path: str                       # relative to the source folder
    function: str                   # qualified name, "" at module level
    operator: str
    line: str                       # the original line, stripped
    number: int                     # the line's number, for people; no part of the identity
    occurrence: int                 # among mutants that agree in all of the above
    start: int
    end: int
    before: str
    after: str
    lines: tuple[int, int]          # first and last line of code whose execution means that the mutant ran

    @property
    def identity(self) -> str:
        return _digest(self.path, self.function, self.operator, self.line, self.occurrence)

    def rank(self, seed: int) -> str:
        """Its place in the sample of this seed: the smallest are drawn."""
        return _digest(seed, self.identity)

    def applied(self, source: bytes) -> bytes:
        return source[:self.start] + self.after.encode() + source[self.end:]


def mutants(folder: Path, path: str) -> list[Mutant]:
    """All mutants of one file, in the order of the text."""
    source = (folder / path).read_bytes()
    found = _Finder(source)
    found.visit(ast.parse(source))
    texts, seen, counts, result = source.decode().splitlines(), set(), Counter[tuple[str, str, str]](), []
    for change in sorted(found.changes, key=lambda change: (change.start, change.end, change.operator)):
        if (change.start, change.end, change.after) in seen:
            continue
        seen.add((change.start, change.end, change.after))
        line = texts[change.number - 1].strip()
        key = (change.function, change.operator, line)
        result.append(Mutant(path, change.function, change.operator, line, change.number, counts[key], change.start, change.end,
                             source[change.start:change.end].decode(), change.after, change.lines))
        counts[key] += 1
    return result


@dataclass(frozen=True)
class _Change:
    function: str
    operator: str
    number: int
    start: int
    end: int
    after: str
    lines: tuple[int, int]


class _Finder(ast.NodeVisitor):
    """Walks a file and notes every change worth trying, with the lines that have to run for it to matter."""

    def __init__(self, source: bytes) -> None:
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        self.changes: list[_Change] = []
        self.names: list[str] = []
        self.at_import: list[tuple[int, int]] = [(1, len(self.offsets))]       # lines of what encloses code that runs at import
        self.lines: tuple[int, int] | None = None                              # lines of the statement, inside a function

    # Where it is, and what is left alone.

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        outer, self.lines = self.lines, None
        self.names.append(node.name)
        self.at_import.append((node.body[0].lineno, node.end_lineno or node.lineno))
        for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]:
            self.visit(default)
        self._body(node.body, inside=True)
        self.at_import.pop()
        self.names.pop()
        self.lines = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(isinstance(base, ast.Name) and base.id in ("Protocol", "TypedDict") for base in node.bases):
            return
        outer, self.lines = self.lines, None
        self.names.append(node.name)
        self.at_import.append((node.lineno, node.end_lineno or node.lineno))
        self._body(node.body, inside=False)
        self.at_import.pop()
        self.names.pop()
        self.lines = outer

    def visit_Module(self, node: ast.Module) -> None:
        self._body(node.body, inside=False)

    def _body(self, body: list[ast.stmt], inside: bool) -> None:
        for statement in body:
            self._statement(statement, inside)

    def _statement(self, node: ast.stmt, inside: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.visit(node)
            return
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.Global, ast.Nonlocal)) or _docstring(node):
            return
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        inner = [statement for block in blocks for statement in block]
        inner += [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
        first = min((statement.lineno for statement in inner), default=None)
        last = max(node.lineno, first - 1) if first is not None else node.end_lineno or node.lineno
        self.lines = (node.lineno, last) if inside else None
        self._removal(node)
        if not isinstance(node, ast.Raise):
            self._own_expressions(node, inside)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._body(inner, inside)

    def _own_expressions(self, node: ast.stmt, inside: bool) -> None:
        """The expressions of a statement itself, not those of the statements within, nor annotations."""
        if isinstance(node, (ast.If, ast.While)):
            self._negation(node.test)
        if not inside and isinstance(node, ast.Assign) and isinstance(node.value, (ast.BinOp, ast.Subscript)) and _type_like(node.value):
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "body", "orelse", "finalbody", "handlers", "targets", "target", "decorator_list"):
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    self.visit(part)
        for target in [*getattr(node, "targets", []), getattr(node, "target", None)]:
            if isinstance(target, ast.Subscript):
                self.visit(target.slice)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text for people."""

    # The changes.

    def _note(self, node: ast.AST, operator: str, after: str) -> None:
        start = self.offsets[node.lineno - 1] + node.col_offset                              # type: ignore[attr-defined]
        end = self.offsets[node.end_lineno - 1] + node.end_col_offset                        # type: ignore[attr-defined]
        self.changes.append(_Change(".".join(self.names), operator, node.lineno, start, end, after,      # type: ignore[attr-defined]
                                    self.lines or self.at_import[-1]))

    def _replace(self, node: ast.expr, operator: str, other: ast.expr) -> None:
        self._note(node, operator, f"({ast.unparse(other)})" if not isinstance(other, (ast.Constant, ast.Name)) else ast.unparse(other))

    def _removal(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._note(node, "call removed", "pass")
        elif isinstance(node, ast.Raise):
            self._note(node, "raise removed", "pass")
        elif isinstance(node, ast.AugAssign):
            self._note(node, "update removed", "pass")
            other = ARITHMETIC.get(type(node.op))
            if other is not None:
                changed = copy.copy(node)
                changed.op = other()
                self._note(node, f"{type(node.op).__name__}= to {other.__name__}=", ast.unparse(changed))
        elif isinstance(node, ast.Assign) and all(isinstance(t, (ast.Subscript, ast.Attribute)) for t in node.targets):
            self._note(node, "assignment removed", "pass")
        elif isinstance(node, (ast.Break, ast.Continue)):
            self._note(node, f"{type(node).__name__.lower()} removed", "pass")

    def _negation(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare) and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._replace(test, "condition negated", ast.UnaryOp(ast.Not(), test))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negation(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negation(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for position, operation in enumerate(node.ops):
            for other in COMPARISONS[type(operation)]:
                changed = ast.Compare(node.left, [other() if at == position else op for at, op in enumerate(node.ops)], node.comparators)
                place = f" ({position})" if len(node.ops) > 1 else ""
                self._replace(node, f"{type(operation).__name__} to {other.__name__}{place}", changed)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = ARITHMETIC.get(type(node.op))
        if other is not None and not (_text(node.left) or _text(node.right)):
            self._replace(node, f"{type(node.op).__name__} to {other.__name__}", ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.op, ast.UAdd):
            self._replace(node, f"{type(node.op).__name__} dropped", node.operand)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._replace(node, f"{type(node.op).__name__} to {type(other).__name__}", ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        for value in _neighbours(node.value):
            self._replace(node, f"constant to {value!r}", ast.Constant(value))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("cast", "TypeVar", "warn"):
            return
        if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            self._replace(node, "twin", ast.Call(ast.Name(BUILTINS[node.func.id]), node.args, node.keywords))
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in RENAMED:
                self._replace(node, "twin", ast.Call(ast.Attribute(node.func.value, RENAMED[node.func.attr]), node.args, node.keywords))
            if node.func.attr in CLAMPS:
                self._replace(node, "clamp dropped", node.args[0] if _library(node.func.value) else node.func.value)
                if len(node.args) == 2 and not _library(node.func.value):
                    self._replace(node, "upper clamp dropped", ast.Call(node.func, node.args[:1], node.keywords))
            if node.func.attr == "warn":
                return
        for position, keyword in enumerate(node.keywords):
            alone = len(node.keywords) == 1 and isinstance(node.func, ast.Attribute) and node.func.attr in CLAMPS
            if keyword.arg is not None and keyword.arg not in UNINTERESTING_KEYWORDS and not alone:
                others = node.keywords[:position] + node.keywords[position + 1:]
                self._replace(node, f"{keyword.arg}= dropped", ast.Call(node.func, node.args, others))
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        flag = isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool)       # turned round by dropping it
        if node.arg not in UNINTERESTING_KEYWORDS and not flag:
            self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for end in ("lower", "upper"):
            if getattr(node, end) is not None:
                changed = copy.copy(node)
                setattr(changed, end, None)
                self._note(node, f"slice's {end} end dropped", ast.unparse(changed))
        self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)


def _neighbours(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        if value == 1:
            yield 0
    elif isinstance(value, float):
        if 0 < abs(value) < 1e-6:
            yield 0.0                          # a guard against rounding: twice as much of it is no other guard
        elif value in (0.0, float("inf")):
            yield 1.0
        else:
            yield 2 * value


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:16]


def _docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _library(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "np")


def _type_like(node: ast.expr) -> bool:
    """A union or a subscripted alias at module level, such as `Key = int | str`."""
    names = [part for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript))]
    return isinstance(node, ast.Subscript) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and bool(names))
