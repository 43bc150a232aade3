"""Following names through one method of TensorRT-LLM: enough to see a multiplication and a cast.

The answer errs towards "reaches": every assignment of a name counts, in whatever branch, and a
helper's parameters stand for whatever it is called with. Sizes cannot be taken for scales, because
a multiplication counts only where one side comes from a block scale.

What is to be told intact errs the other way: :meth:`HookCode.is_view` and :meth:`HookCode.changes`
know a few ways to look at a block scale, and take any other for a change of it.
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
#: Methods that keep every byte, in whatever shape and order.
_VIEWS = frozenset(
    [
        "view",
        "reshape",
        "contiguous",
        "detach",
        "unsqueeze",
        "squeeze",
        "permute",
        "transpose",
        "flatten",
        "clone",
    ]
)
#: FlashInfer's, which returns a view.
_LAYOUT = "convert_sf_to_mma_layout"
#: Functions that change no tensor they are given.
_LOOKS = frozenset(
    [
        "dict",
        "getattr",
        "hasattr",
        "isinstance",
        "len",
        "list",
        "print",
        "repr",
        "str",
        "tuple",
        "type",
    ]
)

Predicate = Callable[[ast.AST], bool]
_Function = ast.FunctionDef


class HookCode:
    """A hook, the helpers of its file that it calls, and where their names come from."""

    def __init__(self, tree: ast.Module, owner: ast.ClassDef, hook: _Function) -> None:
        self.name = f"{owner.name}.{hook.name}"
        self._helpers = _helpers(tree, owner)
        self._layer = hook.args.args[1].arg if len(hook.args.args) > 1 else ""
        self._imports_layout = any(
            _LAYOUT in (alias.name for alias in node.names if alias.asname is None)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashinfer")
        )
        self._functions: list[_Function] = []
        self._values: dict[str, list[ast.AST]] = {}
        self._recorded: set[int] = set()
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
        """As a string or the name of an argument, but for those that stand for None."""
        nothing = {
            id(key)
            for node in self._nodes()
            if isinstance(node, ast.Dict)
            for key, value in zip(node.keys, node.values, strict=True)
            if _is_none(value)
        }
        return any(
            (isinstance(node, ast.Constant) and node.value == text and id(node) not in nothing)
            or (isinstance(node, ast.keyword) and node.arg == text and not _is_none(node.value))
            for node in self._nodes()
        )

    def entries_of(self, attribute: str) -> dict[str, ast.AST] | None:
        """What the dictionary holds that is assigned to an attribute of that name.

        ``None`` where that is not one literal, or the attribute is used in any other way.
        """
        uses = [node for node in self._nodes() if names_attribute(node, attribute)]
        if len(uses) != 1:
            return None
        statement = self._parents[uses[0]]
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return None
        return _literal_entries(statement.value)

    def is_view(self, expression: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
        """Whether an expression is certainly a block scale with all bytes as they are."""
        if isinstance(expression, ast.Attribute):
            if expression.attr == "data":
                return self.is_view(expression.value, seen)
            return _is_block_scale(expression) and isinstance(expression.value, ast.Name)
        if isinstance(expression, ast.Name):
            if expression.id in seen:
                return True  # no other value than those being looked at
            values = self._all_values(expression.id)
            seen = seen | {expression.id}
            return bool(values) and all(self.is_view(value, seen) for value in values)
        if isinstance(expression, ast.Call):
            return self._is_view_call(expression, seen)
        if isinstance(expression, (ast.Tuple, ast.List)):
            return bool(expression.elts) and all(self.is_view(e, seen) for e in expression.elts)
        if isinstance(expression, (ast.ListComp, ast.GeneratorExp)):
            return self.is_view(expression.elt, seen)
        if isinstance(expression, ast.IfExp):
            return self.is_view(expression.body, seen) and self.is_view(expression.orelse, seen)
        return isinstance(expression, ast.Subscript) and self.is_view(expression.value, seen)

    def may_be_none(self, expression: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
        """Whether a branch leads to None, or to a name whose values are not known."""
        if isinstance(expression, ast.Name):
            if expression.id in seen:
                return False
            values = self._all_values(expression.id)
            seen = seen | {expression.id}
            return not values or any(self.may_be_none(value, seen) for value in values)
        if isinstance(expression, (ast.IfExp, ast.BoolOp, ast.Tuple, ast.List)):
            return any(self.may_be_none(part, seen) for part in ast.iter_child_nodes(expression))
        return _is_none(expression)

    def changes(self) -> ast.AST | None:
        """The first place that may change a block scale, or the layer behind our back."""
        return next((node for node in self._nodes() if self._may_change(node)), None)

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

    def _all_values(self, name: str) -> list[ast.AST]:
        """Of a name; empty where it is also bound in a way that is not followed."""
        bound = [
            node
            for node in self._nodes()
            if (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
            if node.id == name and id(node) not in self._recorded
        ]
        return [] if bound else self._values.get(name, [])

    def _is_view_call(self, call: ast.Call, seen: frozenset[str]) -> bool:
        if isinstance(call.func, ast.Attribute) and call.func.attr in _VIEWS:
            return self.is_view(call.func.value, seen)
        return self._is_layout_call(call) and bool(call.args) and self.is_view(call.args[0], seen)

    def _is_layout_call(self, call: ast.Call) -> bool:
        if not isinstance(call.func, ast.Name) or call.func.id != _LAYOUT:
            return False
        return self._imports_layout and _LAYOUT not in (*self._helpers, *self._values)

    def _may_change(self, node: ast.AST) -> bool:
        if isinstance(node, ast.AugAssign):
            return self.reaches(node.target, _is_block_scale)
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            stored = not isinstance(node.ctx, ast.Load)
            return stored and self.reaches(node, _is_block_scale)
        return isinstance(node, ast.Call) and self._call_may_change(node)

    def _call_may_change(self, call: ast.Call) -> bool:
        if isinstance(call.func, ast.Attribute):
            in_place = call.func.attr.endswith("_") and not call.func.attr.endswith("__")
            if in_place and self.reaches(call.func.value, _is_block_scale):
                return True
        if self._is_layout_call(call) or self._helper_called(call) or _is_super_call(call):
            return False
        if isinstance(call.func, ast.Name) and call.func.id in _LOOKS:
            return False
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(isinstance(one, ast.Name) and one.id == self._layer for one in given):
            return True
        return any(self.reaches(one, _is_block_scale) for one in given)

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
                    self._recorded.add(id(part))


def names_attribute(node: ast.AST, attribute: str) -> bool:
    """As an attribute, or as the text that getattr and its like take."""
    if isinstance(node, ast.Attribute):
        return node.attr == attribute
    return isinstance(node, ast.Constant) and node.value == attribute


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _literal_entries(value: ast.AST) -> dict[str, ast.AST] | None:
    found: dict[str, ast.AST] = {}
    if isinstance(value, ast.Dict):
        for key, one in zip(value.keys, value.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                return None
            found[key.value] = one
        return found
    if isinstance(value, ast.Call) and _last_name(value.func) == "dict" and not value.args:
        for keyword in value.keywords:
            if keyword.arg is None:
                return None
            found[keyword.arg] = keyword.value
        return found
    return None


def _is_super_call(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Call) and _last_name(owner.func) == "super"


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
