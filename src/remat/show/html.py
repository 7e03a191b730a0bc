"""The report as one HTML file that works offline: facts as JSON, a chart library, and a script that draws.

Names come from the user's code, so nothing of the facts is ever part of the markup: they travel as JSON with
every `<` escaped, and the script turns them into text nodes. The page's own policy allows exactly the two
scripts that are in it, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from remat.show.decisions import explained
from remat.show.facts import facts, trade_off

if TYPE_CHECKING:
    from remat.show.text import Report

__all__ = ["page"]

_LIBRARY = "echarts.common.min.js"  # Apache ECharts, see assets/README.md


def page(report: Report) -> str:
    """The whole file as text."""
    library, script = _asset(_LIBRARY), _asset("report.js")
    shown = {
        **facts(report),
        "trade_off": trade_off(report.plan),
        "tensors": explained(report.plan)["tensors"],
    }
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return Template(_asset("report.html")).substitute(
        policy=policy,
        title=escape(f"{report.plan.profile.model}: remat"),
        style=_asset("report.css"),
        text=escape(str(report)),
        facts=_inside_script(shown),
        library=library,
        script=script,
    )


def _asset(name: str) -> str:
    return (files("remat.show") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _inside_script(value: Any) -> str:
    """JSON in which no text can end the script element or start a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
