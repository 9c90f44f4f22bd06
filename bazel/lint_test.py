"""The lint's own check: slow tests that no suite would run."""

from bazel import lint

_BUILD = """
pytest_test(name = "quick_test", srcs = ["quick_test.py"])
pytest_test(name = "long_test", slow = True, srcs = ["long_test.py"])
cc_test(name = "never_test", slow = False)
"""
_SUITE = """
test_suite(name = "other", tests = ["//a:b"])
test_suite(name = "slow", tests = [":here_test", "//trainer:long_test"])
"""


def test_slow_targets_are_found() -> None:
    assert lint.slow_targets(_BUILD, "trainer") == {"//trainer:long_test"}


def test_suite_labels_are_absolute() -> None:
    assert lint.suite_tests(_SUITE) == {"//tests:here_test", "//trainer:long_test"}
