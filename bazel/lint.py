"""Every check of the source that is not a test: `./bazelw run //:lint [-- --fix] [PATH...]`.

Formatting and rules (ruff), types (mypy), C++ formatting (clang-format), BUILD formatting
(buildifier, where it is on PATH), and that each `slow = True` test is in //tests:slow.
--fix formats and applies the safe fixes first. Paths limit what is formatted and reported on;
types are always checked in whole top-level packages. Files that git ignores are not read.
"""

import argparse
import ast
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

_BIN = pathlib.Path(sys.executable).parent
_CPP = (".cc", ".h", ".cu", ".hip")
_SKIPPED = ("third_party/debian4/",)


def _tracked(root: pathlib.Path) -> list[str]:
    """Returns the checkout's files, new ones included, as paths from `root`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=root, text=True).splitlines()
    return [n for n in names if (root / n).is_file() and not n.startswith(_SKIPPED)]


def _ok(command: list[str], cwd: pathlib.Path, **variables: str) -> bool:
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=cwd, check=False, env=environment).returncode == 0


def _ruff(root: pathlib.Path, files: list[str], fix: bool) -> bool:
    python = [f for f in files if f.endswith((".py", ".pyi"))]
    ruff = str(_BIN / "ruff")
    if not python:
        return True
    flags = ["--fix"] if fix else []
    checked = _ok([ruff, "check", "--quiet", "--output-format=concise", *flags, *python], root)
    return (
        _ok([ruff, "format", "--quiet", *([] if fix else ["--check"]), *python], root) and checked
    )


def _mypy(root: pathlib.Path, files: list[str], fix: bool) -> bool:
    """Checks a copy of the tree in which the generated protobuf modules lie where they belong."""
    del fix
    tracked = _tracked(root)
    protos = [f for f in tracked if f.endswith(".proto")]
    with tempfile.TemporaryDirectory(prefix="swe_rl_lint.") as folder:
        stage = pathlib.Path(folder)
        python = [f for f in tracked if f.endswith((".py", ".pyi")) and "/" in f]
        python = [f for f in python if not f.startswith("third_party/")]
        for name in python:
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            (stage / name).symlink_to(root / name)
        generated = ["--pyi_out=" + folder, "--grpc_python_out=" + folder, "--proto_path=."]
        protoc = [sys.executable, "-m", "bazel.grpc_protoc", *generated, *protos]
        if protos and not _ok(protoc, root):
            return False
        for path in stage.rglob("*_pb2_grpc.py"):
            path.write_text("# mypy: ignore-errors\n" + path.read_text())
        packages = sorted({n.partition("/")[0] for n in set(python) & set(files)})
        if not packages:
            return True
        command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml")]
        command += ["--cache-dir", str(root / ".mypy_cache"), "--no-error-summary"]
        for package in packages:
            command += ["-p", package]
        return _ok(command, stage, PYTHONPATH="", MYPYPATH="")


def _clang_format(root: pathlib.Path, files: list[str], fix: bool) -> bool:
    sources = [f for f in files if f.endswith(_CPP)]
    flags = ["-i"] if fix else ["--dry-run", "-Werror"]
    return not sources or _ok([str(_BIN / "clang-format"), *flags, *sources], root)


def _buildifier(root: pathlib.Path, files: list[str], fix: bool) -> bool:
    names = ("BUILD", "WORKSPACE")
    sources = [f for f in files if f.endswith((".bzl", ".BUILD")) or f.rpartition("/")[2] in names]
    if shutil.which("buildifier") is None:
        print("lint: buildifier is not on PATH; BUILD files were not checked by it", flush=True)
        return True
    return _ok(["buildifier", "-mode=fix" if fix else "-mode=check", *sources], root)


def slow_targets(build: str, package: str) -> set[str]:
    """Returns the labels of the `slow = True` targets in a BUILD file's text."""
    calls = [n for n in ast.walk(ast.parse(build)) if isinstance(n, ast.Call)]
    labels = set()
    for call in calls:
        values = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
        if values.get("slow") is True and isinstance(values.get("name"), str):
            labels.add(f"//{package}:{values['name']}")
    return labels


def suite_tests(build: str) -> set[str]:
    """Returns the labels in `tests` of the test_suite "slow" in tests/BUILD's text."""
    for call in ast.walk(ast.parse(build)):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "test_suite":
            values = {k.arg: k.value for k in call.keywords}
            if ast.literal_eval(values["name"]) == "slow":
                labels = ast.literal_eval(values["tests"])
                return {"//tests" + n if n.startswith(":") else n for n in labels}
    return set()


def _slow_suite(root: pathlib.Path, files: list[str], fix: bool) -> bool:
    del fix
    slow: set[str] = set()
    for name in files:
        package, _, file = name.rpartition("/")
        if file == "BUILD":
            slow |= slow_targets((root / name).read_text(), package)
    suite = suite_tests((root / "tests" / "BUILD").read_text())
    # A label without a name means the target named as its package.
    suite = {n if ":" in n else f"{n}:{n.rpartition('/')[2]}" for n in suite}
    for label in sorted(slow - suite):
        print(f"lint: {label} has slow = True; add it to `tests` of //tests:slow", flush=True)
    return slow <= suite


_CHECKS: dict[str, Callable[[pathlib.Path, list[str], bool], bool]] = {
    "ruff": _ruff,
    "mypy": _mypy,
    "clang-format": _clang_format,
    "buildifier": _buildifier,
    "slow suite": _slow_suite,
}


def main(argv: list[str]) -> int:
    """Runs every check; 1 when any fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fix", action="store_true", help="format and apply safe fixes")
    parser.add_argument("paths", nargs="*", help="files and folders, from the root; default: all")
    parser.add_argument("--only", choices=sorted(_CHECKS), help="run one check")
    args = parser.parse_args(argv)
    workspace = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
    if workspace is None:
        parser.error("start it with `./bazelw run //:lint`")
    root = pathlib.Path(workspace)
    files = _tracked(root)
    if args.paths:
        within = tuple(p.rstrip("/") for p in args.paths)
        files = [f for f in files if any(f == p or f.startswith(p + "/") for p in within)]
    failed = []
    for name, check in _CHECKS.items():
        if args.only in (None, name) and not check(root, files, args.fix):
            failed.append(name)
    print(f"lint: {'FAILED: ' + ', '.join(failed) if failed else 'passed'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
