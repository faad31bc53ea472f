"""Writes docs/configuration.md from rpipe/config.py: keys, types, defaults and the comments beside them.

python -m tests.unit.config_page
"""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path

from rpipe import config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

Written from `rpipe/config.py` by `python -m tests.unit.config_page`. A run file holds these sections. `include: [file, ...]`
merges fragments below it, `section.key=value` on the command line goes on top.

`R x K` must be a whole number of steps of `B`; `cluster.training_ranks` a multiple of `tp x pp x cp x ep`;
`cluster.rollout_ranks` a multiple of `engine.tp`.
"""


def page() -> str:
    parts = [HEAD]
    for name, field in config.Config.model_fields.items():
        parts.append(section(name, _class(field.annotation)))
    return "\n".join(parts)


def section(name: str, owner: type) -> str:
    """One table; sections inside it follow."""
    comments = _comments(owner)
    doc = inspect.cleandoc(owner.__doc__) if owner.__doc__ and "BaseModel" not in owner.__doc__ else ""
    lines = [f"\n## {name}\n", *([doc + "\n"] if doc else []), "| key | default | |", "|---|---|---|"]
    inner = []
    for key, field in owner.model_fields.items():
        below = _class(field.annotation)
        if below is not None:
            inner.append(section(f"{name}.{key}", below))
            about = "; ".join(filter(None, ["a section, below", comments.get(key, "")]))
            lines.append(f"| `{key}` | {_default(field)} | {about} |")
        else:
            kind = _kind(field.annotation)
            lines.append(f"| `{key}` | {_default(field)} | {'; '.join(filter(None, [kind, comments.get(key, '')]))} |")
    return "\n".join(lines) + "\n" + "".join(inner)


def _class(annotation: typing.Any) -> typing.Any:
    options = [annotation, *typing.get_args(annotation)]
    return next((o for o in options if isinstance(o, type) and issubclass(o, config.Section)), None)


def _kind(annotation: typing.Any) -> str:
    options = [annotation, *typing.get_args(annotation)]
    literal = next((o for o in options if typing.get_origin(o) is typing.Literal), None)
    return " \\| ".join(f"`{value}`" for value in typing.get_args(literal)) if literal else ""


def _default(field: typing.Any) -> str:
    if field.is_required():
        return "**needed**"
    if isinstance(field.default, config.Section):
        return ""
    value = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{value}`"


def _comments(owner: type) -> dict[str, str]:
    found = re.findall(r"^    (\w+): .*?#\s(.*)$", inspect.getsource(owner), re.M)
    return {key: text.replace("|", "\\|") for key, text in found}


if __name__ == "__main__":
    PAGE.write_text(page())
