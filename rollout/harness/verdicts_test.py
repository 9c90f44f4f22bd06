"""What counts as equal work, and which verdicts are kept."""

from __future__ import annotations

import asyncio

import pytest

from rollout.harness.changes import Changes, TreeFile, TreeLink
from rollout.harness.verdicts import Verdicts, digest

KEY = b"key"


def test_order_of_files_does_not_count() -> None:
    a, b = TreeFile(b"1"), TreeFile(b"2")
    assert digest(Changes({"a": a, "b": b}, ["x", "y"])) == digest(
        Changes({"b": b, "a": a}, ["y", "x"])
    )


@pytest.mark.parametrize(
    "other",
    [
        Changes(),
        Changes({"a": TreeFile(b"2")}),
        Changes({"b": TreeFile(b"1")}),
        Changes({"a": TreeFile(b"1", 0o755)}),
        Changes({"a": TreeLink("1")}),
        Changes({"a": TreeFile(b"1"), "b": TreeFile(b"")}),
        Changes({"a": TreeFile(b"1")}, ["b"]),
    ],
)
def test_anything_else_counts(other: Changes) -> None:
    assert digest(Changes({"a": TreeFile(b"1")})) != digest(other)


def test_content_does_not_run_into_the_next_path() -> None:
    one = Changes({"a": TreeFile(b"xfile 644 1 b\0y")})
    two = Changes({"a": TreeFile(b"x"), "b": TreeFile(b"y")})
    assert digest(one) != digest(two)


class Grader:
    """Grades when told to; `verdicts` are what it says in turn, an exception is raised."""

    def __init__(self, *verdicts: float | Exception | None) -> None:
        self.verdicts = list(verdicts)
        self.num_calls = 0
        self.go = asyncio.Event()

    async def __call__(self) -> float | None:
        self.num_calls += 1
        await self.go.wait()
        await asyncio.sleep(0)  # as a sandbox: never done at once
        verdict = self.verdicts.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


def asked(
    verdicts: Verdicts, grader: Grader, key: bytes = KEY, max_kept: int = 8
) -> asyncio.Task[tuple[float | None, bool]]:
    return asyncio.create_task(
        verdicts.get(key, grader, lambda verdict: verdict is not None, max_kept)
    )


async def test_members_that_end_together_are_graded_once() -> None:
    verdicts, grader = Verdicts(), Grader(1.0)
    tasks = [asked(verdicts, grader) for _ in range(4)]
    await asyncio.sleep(0)
    grader.go.set()
    assert await asyncio.gather(*tasks) == [(1.0, False), (1.0, True), (1.0, True), (1.0, True)]
    assert await asked(verdicts, grader) == (1.0, True)
    assert grader.num_calls == 1


@pytest.mark.parametrize("end", [None, ValueError("the sandbox died")])
async def test_a_failure_is_no_verdict(end: Exception | None) -> None:
    """Those that waited grade on their own, at once."""
    verdicts, grader = Verdicts(), Grader(end, 0.0, 0.0)
    tasks = [asked(verdicts, grader) for _ in range(3)]
    await asyncio.sleep(0)
    assert grader.num_calls == 1
    grader.go.set()
    first, *rest = await asyncio.gather(*tasks, return_exceptions=True)
    assert first is end or first == (None, False)
    assert rest == [(0.0, False), (0.0, False)]
    assert grader.num_calls == 3


async def test_a_cancelled_grading_leaves_the_others_their_own() -> None:
    verdicts, grader = Verdicts(), Grader(1.0)
    first, second = asked(verdicts, grader), asked(verdicts, grader)
    await asyncio.sleep(0)
    first.cancel()
    grader.go.set()
    assert await second == (1.0, False)
    assert first.cancelled()


async def test_only_so_many_are_kept() -> None:
    verdicts, grader = Verdicts(), Grader(0.1, 0.2, 0.3, 0.4)
    grader.go.set()
    for key, want in [(b"a", False), (b"b", False), (b"a", True), (b"c", False), (b"b", False)]:
        _, is_reused = await asked(verdicts, grader, key, max_kept=2)
        assert is_reused == want, key
