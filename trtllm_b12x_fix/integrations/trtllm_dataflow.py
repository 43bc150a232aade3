"""Following names through one method of TensorRT-LLM: enough to see a multiplication and a cast.

The answer errs towards "reaches": every assignment of a name counts, in whatever branch, and a
helper's parameters stand for whatever it is called with. Sizes cannot be taken for scales, because
a multiplication counts only where one side comes from a block scale.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

BLOCK_SCALES = frozenset({"w3_w1_weight_scale", "w2_weight_scale"})
FP8 = "float8_e4m3fn"
INPUT_GLOBAL_SCALE = "input_global_scale"
_CASTS = frozenset({"to", "type"})
_PRODUCTS = frozenset({"mul", "mul_", "multiply", "multiply_"})
_W4A16 = "w4a16"

Predicate = Callable[[ast.AST], bool]
_Function = ast.FunctionDef


class HookCode:
    """A hook, the helpers of its file that it calls, and where their names come from."""

    def __init__(self, tree: ast.Module, owner: ast.ClassDef, hook: _Function) -> None:
        self.name = f"{owner.name}.{hook.name}"
        self._helpers = _helpers(tree, owner)
        self._functions: list[_Function] = []
        self._values: dict[str, list[ast.AST]] = {}
        self._parents: dict[ast.AST, ast.AST] = {}
        for statement in tree.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                self._record(statement)
        self._follow(hook)

    def baking_casts(self) -> list[ast.Call]:
        """Casts to E4M3 of something that a block scale was multiplied into."""
        return [
            node
            for node in self._nodes()
            if isinstance(node, ast.Call)
            and self._is_fp8_cast(node)
            and self.reaches(node.func, self._is_scaled)
        ]

    def is_w4a16_exempt(self, node: ast.AST) -> bool:
        """Whether a condition on W4A16 stands before the node, or returned before it."""
        function = self._function_of(node)
        if any(self.reaches(test, _names_w4a16) for test in self._conditions(node)):
            return True
        returns = (
            other
            for other in ast.walk(function)
            if isinstance(other, ast.If)
            and other.lineno < getattr(node, "lineno", 0)
            and isinstance(other.body[-1], ast.Return)
        )
        if any(self.reaches(other.test, _names_w4a16) for other in returns):
            return True
        calls = [call for call in self._nodes() if self._helper_called(call) is function]
        return bool(calls) and all(self.is_w4a16_exempt(call) for call in calls)

    def call_of(self, name: str) -> ast.Call | None:
        """The first call of a name."""
        for node in self._nodes():
            if isinstance(node, ast.Call) and _last_name(node.func) == name:
                return node
        return None

    def mentions_text(self, text: str) -> bool:
        """As a string, or the name of an argument."""
        return any(
            (isinstance(node, ast.Constant) and node.value == text)
            or (isinstance(node, ast.keyword) and node.arg == text)
            for node in self._nodes()
        )

    def reaches_attribute(self, expression: ast.AST, name: str) -> bool:
        """Whether the expression, names followed, reads an attribute of that name."""
        return self.reaches(expression, lambda n: isinstance(n, ast.Attribute) and n.attr == name)

    def reaches(self, expression: ast.AST, predicate: Predicate) -> bool:
        """Whether a node of the expression, or of what its names were assigned, fits."""
        seen: set[str] = set()
        waiting = [expression]
        while waiting:
            for node in ast.walk(waiting.pop()):
                if predicate(node):
                    return True
                if isinstance(node, ast.Name) and node.id not in seen:
                    seen.add(node.id)
                    waiting += self._values.get(node.id, [])
        return False

    def _is_scaled(self, node: ast.AST) -> bool:
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Mult):
            return self.reaches(node, _is_block_scale)
        if isinstance(node, ast.Call) and _last_name(node.func) in _PRODUCTS:
            return self.reaches(node, _is_block_scale)
        return False

    def _is_fp8_cast(self, call: ast.Call) -> bool:
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in _CASTS:
            return False
        given = [*call.args, *(k.value for k in call.keywords if k.arg == "dtype")]
        return any(self.reaches_attribute(argument, FP8) for argument in given)

    def _nodes(self) -> Iterator[ast.AST]:
        for function in self._functions:
            yield from ast.walk(function)

    def _function_of(self, node: ast.AST) -> _Function:
        while node not in self._functions:
            node = self._parents[node]
        assert isinstance(node, ast.FunctionDef)
        return node

    def _conditions(self, node: ast.AST) -> Iterator[ast.AST]:
        while node not in self._functions:
            node = self._parents[node]
            if isinstance(node, (ast.If, ast.IfExp)):
                yield node.test

    def _follow(self, function: _Function) -> None:
        if function in self._functions:
            return
        self._functions.append(function)
        for parent in ast.walk(function):
            for child in ast.iter_child_nodes(parent):
                self._parents[child] = parent
        for node in ast.walk(function):
            self._record(node)
            helper = self._helper_called(node)
            if helper is not None and isinstance(node, ast.Call):
                self._bind(helper, node)
                self._follow(helper)

    def _helper_called(self, node: ast.AST) -> _Function | None:
        if not isinstance(node, ast.Call):
            return None
        function = node.func
        if isinstance(function, ast.Attribute) and not isinstance(function.value, ast.Name):
            return None  # super().hook(...) is another class's
        name = _last_name(function)
        return self._helpers.get(name) if name else None

    def _bind(self, helper: _Function, call: ast.Call) -> None:
        """Parameters stand for arguments; by position it may be one off for methods: all count."""
        names = [argument.arg for argument in (*helper.args.posonlyargs, *helper.args.args)]
        for name in (*names, *(argument.arg for argument in helper.args.kwonlyargs)):
            if name not in ("self", "cls"):
                given = [k.value for k in call.keywords if k.arg == name] or list(call.args)
                self._values.setdefault(name, []).extend(given)

    def _record(self, node: ast.AST) -> None:
        for target, value in _assignments(node):
            for part in ast.walk(target):
                # Storing an attribute leaves its owner's name what it was.
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    self._values.setdefault(part.id, []).append(value)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.AugAssign):
        yield node.target, node
    elif isinstance(node, (ast.For, ast.comprehension)):
        yield node.target, node.iter


def _helpers(tree: ast.Module, owner: ast.ClassDef) -> dict[str, _Function]:
    found = [node for node in (*tree.body, *owner.body) if isinstance(node, ast.FunctionDef)]
    return {function.name: function for function in found}


def _last_name(function: ast.AST) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _is_block_scale(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in BLOCK_SCALES


def _names_w4a16(node: ast.AST) -> bool:
    word: object = None
    if isinstance(node, (ast.Attribute, ast.Name)):
        word = _last_name(node)
    elif isinstance(node, ast.Constant):
        word = node.value
    return isinstance(word, str) and _W4A16 in word.lower()
