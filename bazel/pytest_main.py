"""Runs the test files named in argv under pytest, the way Bazel expects of a test."""

import os
import sys

import pytest


def main(argv: list[str]) -> int:
    """Translates Bazel's test environment into pytest's arguments and runs it."""
    env = os.environ
    args = ["-p", "no:cacheprovider", "--rootdir=.", "--import-mode=importlib", "-ra"]
    args += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    if "XML_OUTPUT_FILE" in env:
        args += ["--junitxml=" + env["XML_OUTPUT_FILE"], "-o", "junit_family=xunit1"]
    if env.get("TEST_TMPDIR"):
        args.append("--basetemp=" + os.path.join(env["TEST_TMPDIR"], "pytest"))
        env.setdefault("HOME", env["TEST_TMPDIR"])
    selected = env.get("TESTBRIDGE_TEST_ONLY")
    if selected:
        args += ["-k", selected]
    code = pytest.main(args + argv)
    # Nothing collected is a failure, unless --test_filter left it so.
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and selected:
        return 0
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
