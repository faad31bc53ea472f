"""How does a run, or two side by side, become one HTML file that opens anywhere?

The page carries everything it needs: styles, scripts (web/, hand-written, no library) and the data as JSON. Its content
security policy forbids the network, so it shows the same from file:// on a laptop in a train.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WEB = Path(__file__).parent / "web"
SCRIPTS = ("base.js", "charts.js", "timeline.js", "words.js", "gantt.js", "figures.js", "page.js")


def write(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """`runs`: one or two of page_data.of_run. The file is whole or not there. Raises OSError."""
    parts = {
        "TITLE": _escape(" against ".join(str(run["name"]) for run in runs)),
        "STYLE": (WEB / "page.css").read_text(),
        "DATA": _embed({"runs": list(runs)}),
        "SCRIPT": "\n".join((WEB / name).read_text() for name in SCRIPTS),
    }
    text = re.sub(r"@@([A-Z]+)@@", lambda found: parts[found[1]], (WEB / "page.html").read_text())
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _embed(data: Any) -> str:
    """JSON that no text in it can end: a script element ends at </script whatever it holds. Not a number reads null."""
    return json.dumps(_finite(data), separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value
