"""Lays out report.html: one self-contained file without scripts or outside references.

Owner: `launch/report`.
"""

from __future__ import annotations

import os
from pathlib import Path

import jinja2

from launch.report import figures
from launch.report.data import RunData, load_run

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>swe_rl run {{ data.name }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; margin: 0 auto; max-width: 1120px; padding: 1.5rem; }
 h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
 table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem .9rem .25rem 0; }
 th { border-bottom: 1px solid #9aa5b1; font-weight: 600; } td { border-bottom: 1px solid #e4e7eb; }
 td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
 .figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 1rem; }
 .figures svg { width: 100%; height: auto; }
 .bad { color: #b91c1c; font-weight: 600; } .good { color: #047857; } pre { overflow-x: auto; font-size: 12px; }
</style>
</head>
<body>
<h1>swe_rl run {{ data.name }}</h1>

<h2>pass@1 on held-out tasks</h2>
{% if data.evaluations %}
<table>
<tr><th>stage</th><th>sampling</th><th class="number">weight_version</th><th>pass@1 [95 %]</th>
<th>gain on the stage before</th><th class="number">tasks</th><th class="number">attempts</th><th>causes</th></tr>
{% for row in data.evaluations %}
<tr><td>{{ row.stage }}</td><td>{{ row.sampling }}</td><td class="number">{{ row.weight_version }}</td>
<td>{{ row.interval.percent() if row.interval else "not scored" }}</td>
<td>{{ row.gain.percent() if row.gain else "" }}</td>
<td class="number">{{ row.interval.num_tasks if row.interval else 0 }}</td>
<td class="number">{{ row.num_attempts }}</td>
<td>{% for cause, count in row.causes.items() %}{{ cause }} {{ count }}{{ ", " if not loop.last }}{% endfor %}</td></tr>
{% endfor %}
</table>
<div class="figures">{{ stages_figure | safe }}</div>
{% else %}<p>No evaluation has finished.</p>{% endif %}

{% if data.probe %}
<h2>Probe: engine against trainer at one weight_version</h2>
<p>{{ data.probe.num_tokens }} tokens of weight_version {{ data.probe.weight_version }}, sampled after a flush:
mean |rollout_logprob - trainer_logprob| = <b>{{ "%.2e" | format(data.probe.mean_abs_nats) }}</b> nats,
max {{ "%.2e" | format(data.probe.max_abs_nats) }}.</p>
{% endif %}

{% if data.counters %}
<h2>Nothing is bypassed: each side's own count</h2>
<table>
<tr><th>what</th><th>counts</th><th></th></tr>
{% for row in data.counters %}
<tr><td>{{ row.what }}</td>
<td>{% for side, count in row.sides.items() %}{{ side }} {{ count }}{{ ", " if not loop.last }}{% endfor %}</td>
<td><span class="{{ "good" if row.agree else "bad" }}">{{ row.verdict }}</span></td></tr>
{% endfor %}
</table>
{% endif %}

{% for title, drawn in sections.items() if drawn %}
<h2>{{ title }}</h2>
<div class="figures">{% for svg in drawn %}<div>{{ svg | safe }}</div>{% endfor %}</div>
{% endfor %}

{% if data.stages %}
<h2>Stages of the job</h2>
<table><tr><th>stage</th><th class="number">s</th></tr>
{% for stage in data.stages %}
<tr><td>{{ stage.name }}</td><td class="number">{{ "%.1f" | format(stage.duration_s) }}</td></tr>
{% endfor %}</table>
{% endif %}

<h2>Configuration</h2>
<details><summary>config.toml</summary><pre>{{ data.config_text }}</pre></details>
</body>
</html>
"""


def render(data: RunData) -> str:
    """The page as text."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_PAGE).render(
        data=data,
        sections=figures.all_figures(data),
        stages_figure=figures.pass_at_1_by_stage(data.evaluations),
    )


def write_report(root: Path) -> Path:
    """Writes root/report.html from root/metrics and returns its path. Raises OSError."""
    path = root / "report.html"
    temporary = path.with_name(".report.html.new")
    temporary.write_text(render(load_run(root)))
    os.replace(temporary, path)
    return path
