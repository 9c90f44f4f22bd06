"""The report's pages in a real headless browser: no error, every figure drawn, nothing fetched.

The run is a large invented one (made_run.py), so that the pages are as full as they get.
"""

from __future__ import annotations

import json
import shutil

import pytest

from launch.report.browser import Browser
from launch.report.compare import write_comparison
from launch.report.made_run import make_run
from launch.report.page import write_report

FIGURES = """
pass-by-stage pass-by-step reward length entropy grad-norm rl-loss groups loss-pretrain loss-sft
step-breakdown durations trajectory-time tokens-over-time kv-over-time in-flight long-tail
staleness staleness-by-step gap gap-max ess clipping masked-stale ends-over-time causes-by-task
fate-outcome-trajectories fate-outcome-tokens fate-length-trajectories fate-length-tokens
""".split()
TABLES = """
pass-table step-parts measured causes groups-ended outages evidence bias probe counters stages guards
""".split()
MAX_BYTES = 2_000_000

_DRAWN = """
[...document.querySelectorAll('figure')].map(figure => {
  const svg = figure.querySelector('svg'), box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll('path.line,path.band,rect[class^="f-"],circle,line.bar')];
  const seen = marks.filter(m => { const b = m.getBoundingClientRect(); return b.width + b.height > 0; });
  return {name: figure.id, marks: seen.length, width: box.width, height: box.height};
})
"""
_BROKEN_TEXT = """
[...document.querySelectorAll('figure')].flatMap(figure => {
  const svg = figure.querySelector('svg'), box = svg.getBoundingClientRect(), bad = [];
  const texts = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
  for (const [text, b] of texts)
    if (b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || b.bottom > box.bottom + 1)
      bad.push(`${figure.id}: "${text.textContent}" leaves the figure`);
  for (let i = 0; i < texts.length; i++)
    for (let j = i + 1; j < texts.length; j++) {
      const [a, b] = [texts[i][1], texts[j][1]];
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
        bad.push(`${figure.id}: "${texts[i][0].textContent}" covers "${texts[j][0].textContent}"`);
    }
  return bad;
})
"""


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module", name="browser")
def browser_fixture(folder):
    browser = Browser(folder / "browser")
    yield browser
    browser.close()
    assert browser.processes() == []


@pytest.fixture(scope="module", name="report")
def report_fixture(folder):
    return write_report(make_run(folder / "runs" / "made"))


def _names(page, selector: str) -> set[str]:
    return set(page.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.id)"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_figure_is_drawn_without_an_error(browser, report, dark):
    page = browser.open(report, dark=dark)
    assert page.errors == []
    assert page.requests == [report.as_uri()], "one file, and nothing else was asked for"
    drawn = {figure["name"]: figure for figure in page.evaluate(_DRAWN)}
    assert set(drawn) == set(FIGURES)
    assert [
        n for n, f in drawn.items() if not (f["marks"] and f["width"] > 300 and f["height"] > 40)
    ] == []
    assert _names(page, ".blocks > div") == set(TABLES)
    assert page.evaluate(_BROKEN_TEXT) == []
    scheme = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (scheme == "rgb(255, 255, 255)") is not dark
    assert report.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("width", [1440, 1280, 800, 390])
def test_nothing_is_wider_than_the_window(browser, report, width):
    page = browser.open(report, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(_BROKEN_TEXT) == []


def test_links_of_the_page_lead_somewhere(browser, report):
    page = browser.open(report)
    dead = page.evaluate(
        "[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))"
        ".filter(h => !h.startsWith('#') || !document.querySelector(h))"
    )
    assert dead == []


def test_the_pointer_is_told_the_nearest_value(browser, report):
    page = browser.open(report)
    box = page.evaluate(
        "(s => { s.scrollIntoView({block: 'center'}); const b = s.getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })(document.querySelector('#reward svg'))"
    )
    page.point_at(box[0] + 0.9 * box[2], box[1] + 0.5 * box[3])
    tip = page.evaluate("getComputedStyle(document.querySelector('#tip')).display === 'block'"
                        " && document.querySelector('#tip').textContent")  # fmt: skip
    lines = tip.splitlines()
    assert lines[0].startswith("step ")
    row = json.loads(
        (report.parent / "metrics" / "rl.jsonl").read_text().splitlines()[int(lines[0][5:]) - 1]
    )
    assert lines[1] == f"mean {row['reward_mean']:.3g}"
    page.point_at(2, 2)
    assert page.evaluate("document.querySelector('#tip').style.display") == "none"


def test_two_runs_side_by_side(browser, folder, report):
    other = make_run(folder / "runs" / "other", num_attempts=200, num_steps=20, seed=1)
    page = browser.open(write_comparison([report.parent, other]))
    assert page.errors == []
    assert len(page.requests) == 1
    drawn = page.evaluate(_DRAWN)
    assert len(drawn) >= 13
    assert [figure["name"] for figure in drawn if not figure["marks"]] == []
    assert page.evaluate(_BROKEN_TEXT) == []


@pytest.mark.parametrize("keep", ["pretraining", "nothing"])
def test_a_run_that_was_cut_short_has_a_page(browser, folder, report, keep):
    root = folder / "runs" / keep
    shutil.copytree(report.parent, root)
    for path in (root / "metrics").iterdir():
        if keep == "nothing" or path.name not in ("pretrain.jsonl", "status.jsonl"):
            path.unlink()
    (root / "state.json").write_text("{}")
    if keep == "pretraining":
        status = root / "metrics" / "status.jsonl"
        status.write_text("".join(status.read_text().splitlines(keepends=True)[:30]))
    page = browser.open(write_report(root))
    assert page.errors == []
    assert page.evaluate(_BROKEN_TEXT) == []
    want = {"loss-pretrain", "tokens-over-time", "kv-over-time", "in-flight"}
    assert _names(page, "figure") == (want if keep == "pretraining" else set())


def test_text_that_leaves_its_figure_or_covers_other_text_is_seen(browser, report):
    page = browser.open(report)
    page.evaluate(
        "(([first, second, third]) => { third.setAttribute('x', '5000');"
        " for (const at of ['x', 'y']) second.setAttribute(at, first.getAttribute(at)); })"
        "(document.querySelectorAll('#reward svg text'))"
    )
    left, covered = page.evaluate(_BROKEN_TEXT)
    assert left == 'reward: "0.4" leaves the figure'
    assert covered == 'reward: "0" covers "0.2"'


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ("<script>console.error('planted')</script>", "planted"),
        ("<script>undefined.planted()</script>", "TypeError"),
        ("<img src='https://example.invalid/x.png'>", "Content Security Policy"),
        ("<script src='missing.js'></script>", "Content Security Policy"),
    ],
    ids=["console", "exception", "network", "file"],
)
def test_what_the_test_looks_for_is_seen(browser, folder, report, planted, said):
    path = folder / "planted.html"
    path.write_text(report.read_text().replace("</body>", f"{planted}</body>"))
    assert any(said in error for error in browser.open(path).errors)
