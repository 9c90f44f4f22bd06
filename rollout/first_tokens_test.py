from __future__ import annotations

from rollout.fakes import make_turn
from rollout.first_tokens import FirstTokens


def observe(tokens: FirstTokens, version: int, at_ns: int | None) -> None:
    turn = make_turn("a", 0, [6], [7, 8], version=version)
    if at_ns is not None:
        turn.timings.first_token_at.FromNanoseconds(at_ns)
    tokens.observe(turn)


def test_the_earliest_of_each_version_is_kept_whatever_comes_first() -> None:
    tokens = FirstTokens()
    for version, at_ns in [(2, 500), (1, 100), (2, 300), (2, 400), (3, None)]:
        observe(tokens, version, at_ns)
    tokens.observe(make_turn("a", 0, [6], []))  # nothing was sampled
    found = [(m.weight_version, m.sampled_at.ToNanoseconds()) for m in tokens.messages()]
    assert found == [(1, 100), (2, 300)]


def test_a_turn_speaks_of_the_version_that_it_began_with() -> None:
    turn = make_turn("a", 0, [6], [7], version=4)
    turn.version_spans.add(weight_version=5, start=1, end=2)
    turn.timings.first_token_at.FromNanoseconds(9)
    tokens = FirstTokens()
    tokens.observe(turn)
    assert [m.weight_version for m in tokens.messages()] == [4]


def test_old_versions_are_forgotten() -> None:
    tokens = FirstTokens()
    for version in range(100):
        observe(tokens, version, version)
    assert [m.weight_version for m in tokens.messages()] == list(range(84, 100))
