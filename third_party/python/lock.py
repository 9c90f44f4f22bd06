"""Writes the hash locks of the Python environments from their `.in` files.

    python3 third_party/python/lock.py main [--python 3.11=/path/to/python3.11]

Runs `pip install --dry-run --report` once for each Python version an environment supports
and merges the hashes of the archives that pip would install there. Later versions are
resolved with the first version's choices as constraints, so one lock serves all. Linux on
x86-64 only: no other platform's archives are hashed.

In an `.in` file a trailing `# no-deps` takes that requirement alone, whatever it says about
dependencies and Python versions; a line `# lock: no-deps` says so for the whole file.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

_HERE = pathlib.Path(__file__).resolve().parent
_VERSIONS = {
    "main": ["3.11"],
    "main.rocm": ["3.11", "3.12", "3.13"],
    "engine": ["3.11"],
    "engine.rocm": ["3.11", "3.12", "3.13"],
    "harness": ["3.12", "3.13"],
}


def _version(python: str) -> str:
    """Returns an interpreter's version, as in "3.12"."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.check_output([python, "-I", "-c", code], text=True).strip()


def _report(
    python: str, requirements: list[str], constraints: list[str], *flags: str
) -> list[dict]:
    """Returns pip's planned installs for `requirements` under one interpreter."""
    if not requirements:
        return []
    with tempfile.TemporaryDirectory() as folder:
        wanted, limits, report = (pathlib.Path(folder) / n for n in ("in", "constraints", "report"))
        wanted.write_text("\n".join(requirements) + "\n")
        limits.write_text("\n".join(constraints) + "\n")
        command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += [*flags, "--report", str(report), "-c", str(limits), "-r", str(wanted)]
        subprocess.run(command, check=True)
        return json.loads(report.read_text())["install"]


def _split(text: str) -> tuple[list[str], list[str]]:
    """Splits an `.in` file into (resolved, taken alone) requirements."""
    alone_all = "# lock: no-deps" in text
    resolved, alone = [], []
    for line in text.splitlines():
        requirement, _, comment = line.partition("#")
        if requirement.strip():
            target = alone if alone_all or "no-deps" in comment else resolved
            target.append(requirement.strip())
    return resolved, alone


def lock(env: str, pythons: list[str]) -> str:
    """Returns the text of `env`'s lock, resolved for each interpreter in `pythons`."""
    resolved, alone = _split((_HERE / f"{env}.in").read_text())
    hashes: dict[str, set[str]] = {}
    versions: dict[str, list[str]] = {}
    for python in pythons:
        version = _version(python)
        installs = _report(python, resolved, list(hashes))
        # 3.11 is refused by a few packages that nevertheless run there.
        installs += _report(python, alone, [], "--no-deps", "--ignore-requires-python")
        for item in installs:
            name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
            # A local version ("+cpu") says who built it; the hash says that already.
            pin = f"{name}=={item['metadata']['version'].partition('+')[0]}"
            sha256 = item["download_info"]["archive_info"]["hashes"]["sha256"]
            hashes.setdefault(pin, set()).add(sha256)
            versions.setdefault(pin, []).append(version)
    lines = [f"# Written by third_party/python/lock.py from {env}.in; do not edit.\n"]
    for pin in sorted(hashes):
        head = pin
        if len(versions[pin]) < len(pythons):
            head += " ; " + " or ".join(f"python_version == '{v}'" for v in versions[pin])
        lines.append(" \\\n".join([head, *(f"    --hash=sha256:{h}" for h in sorted(hashes[pin]))]))
        lines[-1] += "\n"
    return "".join(lines)


def main(argv: list[str]) -> int:
    """Parses the command line and writes one lock."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("env", choices=sorted(_VERSIONS))
    parser.add_argument("--python", action="append", default=[], metavar="X.Y=PATH")
    args = parser.parse_args(argv)
    given = dict(p.split("=", 1) for p in args.python)
    pythons = []
    for version in _VERSIONS[args.env]:
        python = given.get(version) or shutil.which(f"python{version}")
        if python is None:
            parser.error(f"no python{version} on PATH: name one with --python {version}=PATH")
        pythons.append(python)
    (_HERE / f"{args.env}.lock").write_text(lock(args.env, pythons))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
