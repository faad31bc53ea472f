"""What does the environment answer to a turn?

An environment is a function `(prompt_text, texts, metadata) -> str | None`, named by `rollout.environment`, and runs in a
reward worker: killed when it is late, without network, bounded in memory. `texts` is turn, answer, turn, ..., the model's last
turn at its end; the answer is the text that comes next, None where the trajectory is done. It keeps nothing between two calls:
the next one may find another process. Built in is one, small enough to be learned by a small model.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

_ASKED = re.compile(r"<<([^<>]{1,100})>>\s*$")
_MOST = 10**12  # of any number in between: a power or a product of large ones takes for ever
_OPERATORS: dict[type[Any], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(prompt: str, texts: list[str], metadata: Mapping[str, Any]) -> str | None:
    """A turn that ends with <<12+30*2>> is answered by [72]; integers, + - * // % and brackets. Any other turn was the last."""
    asked = _ASKED.search(texts[-1])
    if asked is None:
        return None
    try:
        return f"[{_value(ast.parse(asked[1].strip(), mode='eval').body)}]"
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return "[?]"


def _value(node: ast.expr) -> int:
    """Raises ValueError on what is no such expression."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            found = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            found = _OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError(ast.dump(node))
    if abs(found) > _MOST:
        raise ValueError(found)
    return found
