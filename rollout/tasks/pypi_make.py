"""Makes pypi_tasks.json: injects bugs into packages and keeps those that tests notice.

Owner: rollout/tasks; run by hand when packages or strategies change:
  python -m rollout.tasks.pypi_make --seed 24 --out rollout/tasks/pypi_tasks.json

Tests run on this machine, in a scratch folder, with the pypi layer's pytest: the code is what
anyone gets who installs the package. validate.py repeats every verdict in sandboxes.

A bug is kept when at least one test notices and most do not, its run ends by itself, and a
second run agrees. At most one a function and, where others exist, two a strategy in a suite.
Deterministic by seed, up to tests that are not; those never enter a suite.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from bazel.downloads import DownloadError
from rollout.tasks import bug_injection
from rollout.tasks.grading import outcomes
from rollout.tasks.layers import INTERPRETER, SITE_PACKAGES, pypi_layer
from rollout.tasks.pypi import PYTEST_FLAGS, sdist_files, test_environment
from rollout.tasks.pypi_data import DATA, Bug, Package, Suite, TaskData, write_data
from rollout.tasks.unified_diff import make_diff

_TEST_TIMEOUT_S = 30
_BASELINE_RUNS = 3
_MAX_BROKEN_SHARE = 0.4
_MAX_PER_STRATEGY = 2


@dataclass(frozen=True)
class SuitePlan:
    """A suite to be made: where bugs go, and which tests run."""

    name: str
    sources: tuple[str, ...]
    arguments: tuple[str, ...]
    num_bugs: int


_RESTORE = ("tests/**", "**/tests/**", "**/test_*.py", "**/conftest.py")
_CONFIGURATION = ("pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "sitecustomize.py")


def _package(name: str, version: str, sha256: str, python_path: str = "") -> Package:
    restore = (*_RESTORE, *_CONFIGURATION)
    sdist = f"{name}-{version}.tar.gz"
    return Package(name, version, sdist, sha256, python_path, restore, {})


PLANS: tuple[tuple[Package, tuple[SuitePlan, ...]], ...] = (
    (
        _package(
            "inflection",
            "0.5.1",
            "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
        ),
        (SuitePlan("all", ("inflection/__init__.py",), ("test_inflection.py",), 7),),
    ),
    (
        _package(
            "toolz", "1.2.0", "9667a038e9d6ecba37995e26cb2f59ec6420b6ad8dd9677de59db9b956b08490"
        ),
        (
            SuitePlan("itertoolz", ("toolz/itertoolz.py",), ("toolz/tests/test_itertoolz.py",), 5),
            SuitePlan("dicttoolz", ("toolz/dicttoolz.py",), ("toolz/tests/test_dicttoolz.py",), 3),
        ),
    ),
    (
        _package(
            "boltons", "26.2.0", "d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c"
        ),
        (
            SuitePlan("strutils", ("boltons/strutils.py",), ("tests/test_strutils.py",), 4),
            SuitePlan("iterutils", ("boltons/iterutils.py",), ("tests/test_iterutils.py",), 4),
        ),
    ),
    (
        _package(
            "cachetools",
            "8.0.2",
            "30ac523adfc118b51d2b2e7bad8a0ddb31370dfe2700c7f10ca224f36ccf81e0",
            python_path="src",
        ),
        (
            SuitePlan(
                "caches",
                ("src/cachetools/__init__.py",),
                (
                    "tests/test_lru.py",
                    "tests/test_lfu.py",
                    "tests/test_ttl.py",
                    "tests/test_tlru.py",
                ),
                5,
            ),
            SuitePlan("keys", ("src/cachetools/keys.py",), ("tests/test_keys.py",), 2),
        ),
    ),
)


class _Workplace:
    """A package unpacked in a scratch folder, with pytest at hand."""

    def __init__(self, package: Package, folder: Path) -> None:
        self.package = package
        self.folder = folder
        for path, data in sdist_files(package).items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        packages = str(pypi_layer() / SITE_PACKAGES.lstrip("/"))
        variables = test_environment(package)
        paths = [packages, *filter(None, [variables.get("PYTHONPATH")])]
        home = {"PATH": os.defpath, "HOME": str(folder)}
        self.environment = {**home, **variables, "PYTHONPATH": ":".join(paths)}

    def log(self, arguments: tuple[str, ...]) -> str | None:
        """Output of one run; None when it had to be stopped or died."""
        try:
            done = subprocess.run(
                [INTERPRETER, "-m", "pytest", *PYTEST_FLAGS, *arguments],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_TEST_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        return done.stdout if done.returncode in (0, 1) else None


def make_suite(place: _Workplace, plan: SuitePlan, seed: int) -> tuple[Suite, list[Bug]]:
    """The suite of `plan` and up to `plan.num_bugs` bugs that it notices."""
    suite = Suite(plan.arguments, _stable_tests(place, plan.arguments))
    package = place.package.name
    choices = []
    for path in plan.sources:
        text = (place.folder / path).read_text("utf-8")
        choices += [(path, text, bug) for bug in bug_injection.candidates(text)]
    random.Random(seed).shuffle(choices)
    bugs: list[Bug] = []
    functions: set[str] = set()
    strategies: Counter[str] = Counter()
    for path, text, candidate in choices:
        if len(bugs) == plan.num_bugs:
            break
        if candidate.function in functions or strategies[candidate.strategy] >= _MAX_PER_STRATEGY:
            continue
        broken = _noticed(place, suite, path, text, candidate.source)
        print(f"  {candidate.strategy} {candidate.function}: {len(broken)} fail", file=sys.stderr)
        if not broken:
            continue
        functions.add(candidate.function)
        strategies[candidate.strategy] += 1
        task_id = f"pypi-{package}-{plan.name}-{len(bugs):02d}-{candidate.strategy}"
        patch = make_diff(path, text, candidate.source)
        bugs.append(
            Bug(
                task_id=task_id.replace("_", "-"),
                package=package,
                suite=plan.name,
                function=candidate.function,
                strategy=candidate.strategy,
                seed=seed,
                patch=patch,
                fail_to_pass=broken,
            )
        )
    return suite, bugs


def _stable_tests(place: _Workplace, arguments: tuple[str, ...]) -> tuple[str, ...]:
    stable: dict[str, None] | None = None
    for _ in range(_BASELINE_RUNS):
        log = place.log(arguments)
        if log is None:
            raise DownloadError(f"the tests of {place.package.name} do not run here")
        lines = log.splitlines()
        passed = {n.removeprefix("PASSED "): None for n in lines if n.startswith("PASSED ")}
        stable = passed if stable is None else {k: None for k in stable if k in passed}
    assert stable is not None
    return tuple(stable)


def _noticed(
    place: _Workplace, suite: Suite, path: str, original: str, changed: str
) -> tuple[str, ...]:
    """Tests of `suite` that two runs agree to fail; empty when the bug is of no use."""
    file = place.folder / path
    file.write_text(changed, "utf-8")
    try:
        verdicts = []
        for _ in range(2):
            log = place.log(suite.arguments)
            if log is None:
                return ()
            found = outcomes(log, suite.tests)
            verdicts.append(tuple(t for t in suite.tests if found[t] != {"PASSED"}))
            # A test that vanishes fails too, but a suite that cannot be collected says nothing.
            if not verdicts[-1] or len(verdicts[-1]) > _MAX_BROKEN_SHARE * len(suite.tests):
                return ()
    finally:
        file.write_text(original, "utf-8")
    return verdicts[0] if verdicts[0] == verdicts[1] else ()


def make(seed: int) -> TaskData:
    """All packages and bugs of PLANS. Raises DownloadError."""
    packages, bugs = {}, []
    for package, plans in PLANS:
        with tempfile.TemporaryDirectory() as scratch:
            place = _Workplace(package, Path(scratch))
            suites: dict[str, Suite] = {}
            for plan in plans:
                print(f"{package.name} {plan.name}", file=sys.stderr)
                suites[plan.name], found = make_suite(place, plan, seed)
                bugs += found
        packages[package.name] = replace(package, suites=suites)
    return TaskData(packages, tuple(bugs))


def main(argv: list[str] | None = None) -> int:
    """Command line; prints how many tasks each package has."""
    parser = argparse.ArgumentParser(prog="python -m rollout.tasks.pypi_make", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--out", type=Path, default=DATA)
    args = parser.parse_args(argv)
    try:
        data = make(args.seed)
    except DownloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_data(data, args.out)
    for name, count in Counter(bug.package for bug in data.bugs).items():
        print(name, count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
