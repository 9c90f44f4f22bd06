"""Procedural bugs: one small, plausible mistake put into one function of real source.

Owner: rollout/tasks. Sites are found in the syntax tree, the change is made in the text, so
that everything else keeps its form and the diff is a line or two (the idea of SWE-smith's
procedural modifiers, arXiv:2504.21798; written anew).

Invariants: the result parses and its syntax tree differs; candidates come in the order of
the source, so that a seed names the same bug for ever; docstrings are never touched.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_BINARY = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//"}
_COMPARE = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_MAX_SHIFTED_INT = 64


@dataclass(frozen=True)
class Bug:
    """A mistake and where it stands."""

    strategy: str
    function: str
    """Qualified name, `Class.method`."""
    line: int
    """First changed line, from 1."""
    source: str
    """The whole file with the mistake."""


@dataclass(frozen=True)
class _Edit:
    start: tuple[int, int]
    """(line from 1, column in UTF-8 bytes), as the syntax tree counts."""
    end: tuple[int, int]
    text: str


_Strategy = Callable[[ast.AST, "_Source"], Iterator[_Edit]]


class _Source:
    """A file's text by syntax-tree positions."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()
        self._line_starts = [0]
        # Lines end as Python's do; form feeds and the like end none.
        for line in self._data.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def segment(self, start: tuple[int, int], end: tuple[int, int]) -> str:
        return self._data[self._offset(start) : self._offset(end)].decode()

    def of(self, node: ast.expr | ast.stmt) -> str:
        return self.segment(_start(node), _end(node))

    def edited(self, edit: _Edit) -> str:
        before = self._data[: self._offset(edit.start)]
        after = self._data[self._offset(edit.end) :]
        return (before + edit.text.encode() + after).decode()

    def _offset(self, position: tuple[int, int]) -> int:
        return self._line_starts[position[0] - 1] + position[1]


def candidates(text: str) -> list[Bug]:
    """Every bug that the strategies can put into `text`, in source order.

    Raises SyntaxError when `text` itself does not parse.
    """
    source, found = _Source(text), []
    tree = ast.parse(text)
    original = ast.dump(tree)
    for qualified_name, function in _functions(tree, ""):
        for name, strategy in _STRATEGIES.items():
            for node in _own_nodes(function):
                for edit in strategy(node, source):
                    changed = source.edited(edit)
                    if _is_other_program(changed, original):
                        found.append(Bug(name, qualified_name, edit.start[0], changed))
    return found


def inject(text: str, seed: int, strategy: str | None = None) -> Bug | None:
    """One bug chosen by `seed`, of `strategy` if given; None where there is no site."""
    choices = [bug for bug in candidates(text) if strategy in (None, bug.strategy)]
    return random.Random(seed).choice(choices) if choices else None


def _is_other_program(changed: str, original: str) -> bool:
    try:
        return ast.dump(ast.parse(changed)) != original
    except SyntaxError:
        return False


def _functions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The function and what is inside it, nested functions and classes left out."""
    yield function
    stack = list(reversed(list(ast.iter_child_nodes(function))))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield node
        stack.extend(reversed(list(ast.iter_child_nodes(node))))


def _start(node: ast.expr | ast.stmt | ast.arg) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt | ast.arg) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _replace(node: ast.expr | ast.stmt, text: str) -> _Edit:
    return _Edit(_start(node), _end(node), text)


def _operator_swap(node: ast.AST, source: _Source) -> Iterator[_Edit]:
    """`a + b` -> `a - b`."""
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        between = source.segment(_end(node.left), _start(node.right))
        # Parentheses or comments around the operator would make the cut unsafe.
        if set(between) <= set(" +-*/%"):
            yield _Edit(_end(node.left), _start(node.right), f" {_BINARY[type(node.op)]} ")


def _comparison_swap(node: ast.AST, source: _Source) -> Iterator[_Edit]:
    """`a < b` -> `a <= b`, `==` -> `!=`, `in` -> `not in`."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        start, end = _end(node.left), _start(node.comparators[0])
        if set(source.segment(start, end)) <= set(" <>=!isnot"):
            yield _Edit(start, end, f" {_COMPARE[type(node.ops[0])]} ")


def _off_by_one(node: ast.AST, _source: _Source) -> Iterator[_Edit]:
    """`n` -> `n + 1` for a small integer that is no default."""
    if isinstance(node, ast.Subscript | ast.BinOp | ast.Compare | ast.Call | ast.Slice):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and type(child.value) is int:
                if 0 <= child.value <= _MAX_SHIFTED_INT:
                    yield _replace(child, str(child.value + 1))


def _condition_inversion(node: ast.AST, source: _Source) -> Iterator[_Edit]:
    """`if c:` -> `if not c:`, and back."""
    if isinstance(node, ast.If | ast.IfExp):
        test = node.test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield _replace(test, source.of(test.operand))
        elif isinstance(test, ast.Name | ast.Attribute | ast.Call):
            yield _replace(test, f"not {source.of(test)}")


def _boolean_swap(node: ast.AST, source: _Source) -> Iterator[_Edit]:
    """`a and b` -> `a or b`."""
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        start, end = _end(node.values[0]), _start(node.values[1])
        between = source.segment(start, end)
        if between.strip() in ("and", "or"):
            other = "or" if isinstance(node.op, ast.And) else "and"
            yield _Edit(start, end, between.replace(between.strip(), other))


def _lost_return(node: ast.AST, _source: _Source) -> Iterator[_Edit]:
    """`return value` -> `return None`."""
    if isinstance(node, ast.Return) and node.value is not None:
        yield _replace(node, "return None")


def _removed_line(node: ast.AST, _source: _Source) -> Iterator[_Edit]:
    """An augmented assignment, a call or a reassignment is forgotten: `pass`."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call or isinstance(node, ast.AugAssign | ast.Continue | ast.Break | ast.Raise):
        assert isinstance(node, ast.stmt)
        yield _replace(node, "pass")


def _wrong_default(node: ast.AST, _source: _Source) -> Iterator[_Edit]:
    """A default of True becomes False, 1 becomes 2, "x" becomes ""."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if isinstance(default, ast.Constant):
                wrong = _wrong_constant(default.value)
                if wrong is not None:
                    yield _replace(default, wrong)


def _wrong_constant(value: object) -> str | None:
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1)
    if isinstance(value, str):
        return '""' if value else '" "'
    return None


def _swapped_arguments(node: ast.AST, source: _Source) -> Iterator[_Edit]:
    """`f(a, b)` -> `f(b, a)`."""
    if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        first, second = node.args
        if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            between = source.segment(_end(first), _start(second))
            if between.strip() == ",":
                swapped = source.of(second) + between + source.of(first)
                yield _Edit(_start(first), _end(second), swapped)


_STRATEGIES: dict[str, _Strategy] = {
    "operator_swap": _operator_swap,
    "comparison_swap": _comparison_swap,
    "off_by_one": _off_by_one,
    "condition_inversion": _condition_inversion,
    "boolean_swap": _boolean_swap,
    "lost_return": _lost_return,
    "removed_line": _removed_line,
    "wrong_default": _wrong_default,
    "swapped_arguments": _swapped_arguments,
}
STRATEGIES = tuple(_STRATEGIES)
