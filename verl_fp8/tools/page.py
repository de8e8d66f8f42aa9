"""The HTML pages of ``verl-fp8 replay`` and ``verl-fp8 report``: one file, the plotting library inside, no network."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

LABELS = {
    "none": "none",
    "tis": "TIS",
    "tis_seq": "TIS, sequence",
    "icepop": "IcePop",
    "mis": "MIS",
    "geo_rs": "geo-RS",
    "k3_rs": "k3-RS",
    "ais": "AIS",
    "ais_auto": "AIS, delta auto",
}
# Okabe and Ito's palette, which stays apart for colour-blind readers; AIS has the strongest line.
_COLOURS = ("#7f7f7f", "#0072b2", "#56b4e9", "#e69f00", "#cc79a7", "#009e73", "#b8ad00", "#d55e00", "#8c2d04")
_MAX_POINTS = 600

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1b1f24; background: #f6f7f9; margin: 0; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 34px 0 4px; }
p { margin: 4px 0 10px; max-width: 900px; }
.facts { color: #57606a; overflow-wrap: anywhere; }
.note { background: #fff5d6; border-left: 4px solid #d4a017; padding: 8px 12px; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
@media (max-width: 900px) { .grid { grid-template-columns: minmax(0, 1fr); } }
.card { background: #fff; border: 1px solid #d8dee4; border-radius: 8px; padding: 8px; min-width: 0; overflow: hidden; }
.scroll { overflow-x: auto; background: #fff; border: 1px solid #d8dee4; border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: right; border-bottom: 1px solid #eaeef2; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th.small { text-align: left; }
td.small { color: #57606a; font-size: 13px; text-align: left; white-space: normal; }
thead th { background: #eef1f4; }
tbody tr:last-child td { border-bottom: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; max-width: 1000px; }
dt { font-weight: 600; } dd { margin: 0; }
"""


def page(title: str, facts: str, sections: Iterable[tuple[str, str, Sequence[go.Figure | str]]]) -> str:
    """A complete page.

    Args:
        title, facts: its head, plain text.
        sections: heading, an introduction as HTML, and figures or ready HTML.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", f'<p class="facts">{html.escape(facts)}</p>']
    for heading, introduction, contents in sections:
        parts += [f"<h2>{html.escape(heading)}</h2>", introduction]
        figures = [c for c in contents if not isinstance(c, str)]
        parts += [c for c in contents if isinstance(c, str)]
        if figures:
            options = {"displayModeBar": False, "responsive": True}
            cards = (
                f.to_html(full_html=False, include_plotlyjs=False, include_mathjax=False, config=options)
                for f in figures
            )
            parts.append('<div class="grid">' + "".join(f'<div class="card">{card}</div>' for card in cards) + "</div>")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    script = f"<script>{get_plotlyjs()}</script>"
    body = "\n".join(parts)
    head += f"<style>{_STYLE}</style>{script}"
    return f"<!doctype html><html lang=en><head>{head}</head><body><main>{body}</main></body></html>"


def figure(title: str, x: str, y: str, *, log: bool = False, percent: bool = False) -> go.Figure:
    """An empty figure in the pages' style."""
    out = go.Figure()
    axis = {
        "gridcolor": "#e6e9ed",
        "zeroline": False,
        "linecolor": "#8c959f",
        "ticks": "outside",
        "tickcolor": "#8c959f",
    }
    scale = {"type": "log" if log else "linear", "exponentformat": "power"}
    out.update_layout(
        title={"text": title, "x": 0.01, "y": 0.97, "yanchor": "top", "font": {"size": 15}},
        height=360,
        margin={"l": 64, "r": 16, "t": 44, "b": 100},
        paper_bgcolor="#fff",
        plot_bgcolor="#fff",
        font={"size": 12, "color": "#1b1f24"},
        legend={"orientation": "h", "yanchor": "top", "y": -0.24, "x": 0},
        xaxis=axis | {"title": {"text": x, "standoff": 6}},
        yaxis=axis | scale | {"title": {"text": y, "standoff": 6}},
        hovermode="x unified",
    )
    if percent:
        out.update_yaxes(tickformat=".1%", rangemode="tozero")
    return out


def thin(x: Sequence[Any], y: Sequence[float | None]) -> tuple[list[Any], list[float | None]]:
    """At most `_MAX_POINTS` points: means over equal windows."""
    if len(x) <= _MAX_POINTS:
        return list(x), list(y)
    size = math.ceil(len(x) / _MAX_POINTS)
    out_x, out_y = [], []
    for start in range(0, len(x), size):
        window = [v for v in y[start : start + size] if v is not None]
        out_x.append(x[start])
        out_y.append(sum(window) / len(window) if window else None)
    return out_x, out_y


def line(
    to: go.Figure,
    name: str,
    x: Sequence[Any],
    y: Sequence[float | None],
    colour: str | None = None,
    width: int = 2,
    **style: Any,
) -> None:
    """Add a series; values that are not finite, and those a logarithmic axis cannot show, become gaps."""
    positive = to.layout.yaxis.type == "log"
    y = [v if v is not None and math.isfinite(v) and not (positive and v <= 0) else None for v in y]
    if any(v is not None for v in y):
        x, y = thin(x, y)
        mode = "lines" if len(x) > 40 else "lines+markers"
        line_style = {"color": colour, "width": width, **style}
        to.add_scatter(x=x, y=y, name=name, mode=mode, line=line_style, marker={"size": 4 + width // 2})


def colour_of(index: int) -> str:
    """The index-th colour of the palette."""
    return _COLOURS[index % len(_COLOURS)]


def colour_of_run(index: int) -> str:
    """The index-th of the palette's colours in the order in which neighbours differ most."""
    return _COLOURS[(1, 7, 5, 3, 4, 2, 8, 6)[index % 8]]


def table(header: Sequence[str], rows: Iterable[Sequence[str]], small: int | None = None) -> str:
    """An HTML table; column `small` holds running text."""
    out = [
        "<div class=scroll><table><thead><tr>",
        *(f"<th{_class(i == small)}>{html.escape(h)}</th>" for i, h in enumerate(header)),
        "</tr></thead><tbody>",
    ]
    for row in rows:
        cells = (f"<td{_class(i == small)}>{html.escape(cell)}</td>" for i, cell in enumerate(row))
        out.append("<tr>" + "".join(cells) + "</tr>")
    return "".join(out) + "</tbody></table></div>"


def _class(small: bool) -> str:
    return " class=small" if small else ""


def definitions(items: Mapping[str, str]) -> str:
    """A list of terms and their meanings."""
    return "<dl>" + "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in items.items()) + "</dl>"
