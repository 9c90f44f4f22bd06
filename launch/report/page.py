"""Lays out report.html: one self-contained file that asks the network for nothing.

Owner: `launch/report`. The page forbids itself every load by its Content-Security-Policy; its
script only shows values under the pointer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from launch.report.blocks import Section
from launch.report.data import RunData, load_run
from launch.report.sections import checks, failing, glance, learning, off_policy, throughput
from launch.report.svg import PALETTE, number

_HERE = Path(__file__).parent


def render(data: RunData) -> str:
    """The page of one run as text."""
    sections = [
        module.section(data) for module in (learning, throughput, off_policy, failing, checks)
    ]
    return render_page(
        title=f"swe_rl run {data.name}",
        subtitle=_subtitle(data),
        sections=sections,
        configurations={data.name: data.config_text},
        alerts=glance.alerts(data),
        tiles=glance.tiles(data),
    )


def render_page(
    *,
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    configurations: Mapping[str, str],
    **blocks: Any,
) -> str:
    """Fills the template. `blocks`: alerts and tiles."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html").render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        configurations=list(configurations.items()),
        css=Markup((_HERE / "page.css").read_text() + _palette_css()),
        js=Markup((_HERE / "page.js").read_text()),
        **{"alerts": [], "tiles": [], **blocks},
    )


def _palette_css() -> str:
    """Classes of each colour: f- fills, s- strokes, b- backgrounds, t- border colours."""
    light = "".join(f"--{name}:{colors[0]};" for name, colors in PALETTE.items())
    dark = "".join(f"--{name}:{colors[1]};" for name, colors in PALETTE.items())
    classes = "\n".join(
        f".f-{n}{{fill:var(--{n})}}.s-{n}{{stroke:var(--{n})}}.b-{n}{{background:var(--{n})}}"
        f".legend i.t-{n}{{border-color:var(--{n})}}"
        for n in PALETTE
    )
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{classes}\n"


def _subtitle(data: RunData) -> str:
    parts = ["finished" if data.is_finished else "not finished"]
    if data.stages:
        parts.append(f"{number(sum(s['duration_s'] for s in data.stages))} s in stages")
    if data.rl:
        parts.append(f"{len(data.rl):,} RL steps")
    if data.attempts:
        parts.append(f"{len(data.attempts):,} training attempts")
    return ", ".join(parts)


def write_report(root: Path) -> Path:
    """Writes root/report.html from root/metrics and returns its path. Raises OSError."""
    return write_page(root / "report.html", render(load_run(root)))


def write_page(path: Path, text: str) -> Path:
    """Writes a page whole and returns its path. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    os.replace(temporary, path)
    return path
