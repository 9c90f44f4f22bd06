"""Image layers: what toy and PyPI sandboxes have on top of the host's /usr.

Owner: rollout/tasks.   python -m rollout.tasks.layers --out DIR [--only NAME]...
writes DIR/toy, and DIR/pypi as a link to the cache.

  toy   /usr/local/bin: `python` (no site-packages: starts in half the time) and `submit`.
  pypi  the same `submit`; pytest from hashed wheels in /usr/local/lib/swe_rl/site-packages;
        `python`, `python3` and `pytest` that see it.

Only pure-Python wheels are locked, so that any python3 >= 3.11 of the base runs them. The
base's interpreter is /usr/bin/python3.
Invariants: the pypi layer in the cache is named by the hash of all that went into it; the toy
layer needs neither cache nor network; a file of an existing layer is touched only to change it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bazel.downloads import DownloadError, cache_root, cached_folder, install_wheels

LAYERS = ("toy", "pypi")
LOCK = Path(__file__).with_name("pypi_layer.lock")
SITE_PACKAGES = "/usr/local/lib/swe_rl/site-packages"
INTERPRETER = "/usr/bin/python3"
_COMPILE_TIMEOUT_S = 120
_COMPILED_WITH = b"unchecked-hash"

_SUBMIT = "#!/bin/sh\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"
_TOY_PYTHON = f'#!/bin/sh\nexec {INTERPRETER} -S -E -B "$@"\n'
_SEES_PACKAGES = f"#!/bin/sh\nexport PYTHONPATH={SITE_PACKAGES}${{PYTHONPATH:+:$PYTHONPATH}}\nexec {INTERPRETER} "
_SCRIPTS: dict[str, dict[str, str]] = {
    "toy": {"submit": _SUBMIT, "python": _TOY_PYTHON},
    "pypi": {
        "submit": _SUBMIT,
        "python": _SEES_PACKAGES + '"$@"\n',
        "python3": _SEES_PACKAGES + '"$@"\n',
        "pytest": _SEES_PACKAGES + '-m pytest "$@"\n',
    },
}


def pypi_layer(lock: Path = LOCK) -> Path:
    """Folder of the pypi layer in the cache, made of the wheels of `lock` when absent.

    Raises DownloadError, OSError, subprocess.SubprocessError.
    """
    scripts = repr(sorted(_SCRIPTS["pypi"].items())).encode()
    key = hashlib.sha256(lock.read_bytes() + scripts + _COMPILED_WITH).hexdigest()[:16]

    def make(folder: Path) -> None:
        _write_scripts("pypi", folder)
        packages = folder / SITE_PACKAGES.lstrip("/")
        install_wheels(lock, packages)
        _compile(packages)

    return cached_folder(cache_root() / "layers" / f"pypi-{key}", make)


def _write_scripts(name: str, folder: Path) -> None:
    binaries = folder / "usr/local/bin"
    binaries.mkdir(parents=True, exist_ok=True)
    for script, text in _SCRIPTS[name].items():
        path = binaries / script
        # A sandbox may have the layer mounted.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            path.chmod(0o755)


def _compile(packages: Path) -> None:
    """Byte code for the sandboxes' interpreter: a read-only layer could never gain it."""
    # Hash-based and unchecked: the mount's time stamps then do not matter.
    flags = ["-q", "--invalidation-mode", "unchecked-hash"]
    command = [INTERPRETER, "-I", "-m", "compileall", *flags, str(packages)]
    subprocess.run(command, check=True, timeout=_COMPILE_TIMEOUT_S, stdout=subprocess.DEVNULL)


def put_layers(out: Path, names: Sequence[str] = LAYERS) -> dict[str, Path]:
    """Puts each layer of `names` at `out`/NAME; returns the paths by name.

    Raises DownloadError, OSError, subprocess.SubprocessError.
    """
    out.mkdir(parents=True, exist_ok=True)
    if "toy" in names:
        _write_scripts("toy", out / "toy")
    if "pypi" in names:
        staging = out / f".new-pypi-{os.getpid()}"
        staging.unlink(missing_ok=True)
        staging.symlink_to(pypi_layer())
        os.replace(staging, out / "pypi")
    return {name: out / name for name in names}


def main(argv: list[str] | None = None) -> int:
    """Command line; prints each layer's path."""
    parser = argparse.ArgumentParser(prog="python -m rollout.tasks.layers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder to put the layers in")
    parser.add_argument(
        "--only", choices=LAYERS, action="append", help="this layer (repeatable; default: all)"
    )
    args = parser.parse_args(argv)
    try:
        paths = put_layers(args.out, args.only or LAYERS)
    except (DownloadError, OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, path in paths.items():
        print(name, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
