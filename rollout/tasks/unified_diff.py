"""Unified diffs of one text file: made, applied and reversed without outside tools.

Owner: rollout/tasks. Strict on purpose: a hunk applies at its line with its exact context, or
not at all, since both sides are pinned by hash.
"""

from __future__ import annotations

import difflib
import re

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(ValueError):
    """A diff is malformed or does not fit the text; the message says where."""


def make_diff(path: str, old: str, new: str) -> str:
    """The diff that turns `old` into `new`, with `a/` and `b/` before `path`."""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(lines)


def diff_path(diff: str) -> str:
    """The path that a diff of one file changes. Raises DiffError."""
    lines = diff.splitlines()
    if len(lines) < 3 or not lines[0].startswith("--- a/") or not lines[1].startswith("+++ b/"):
        raise DiffError(f"a diff starts with '--- a/PATH' and '+++ b/PATH'; got {diff[:60]!r}")
    return lines[1].removeprefix("+++ b/")


def apply_diff(text: str, diff: str, *, reverse: bool = False) -> str:
    """`text` after `diff`, or before it with `reverse`. Raises DiffError."""
    path = diff_path(diff)
    source = text.splitlines(keepends=True)
    result: list[str] = []
    position = 0
    drop, add = ("+", "-") if reverse else ("-", "+")
    for line in diff.splitlines(keepends=True)[2:]:
        hunk = _HUNK.match(line)
        if hunk:
            start = int(hunk[3 if reverse else 1])
            # A side of no lines names the line before it.
            if (hunk[4 if reverse else 2] or "1") != "0":
                start -= 1
            result += source[position:start]
            position = start
            continue
        mark, content = line[0], line[1:]
        if mark in (" ", drop):
            if position >= len(source) or source[position] != content:
                found = source[position] if position < len(source) else "the end"
                raise DiffError(
                    f"{path}, line {position + 1}: the diff wants {content!r}, found {found!r}"
                )
            position += 1
        elif mark != add:
            raise DiffError(f"{path}: a diff line starts with {mark!r}")
        if mark in (" ", add):
            result.append(content)
    return "".join(result + source[position:])
