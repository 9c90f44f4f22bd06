"""Makes, once, the virtual environment that a lock file asks for, and says where it is.

    python3 venv.py main --lock third_party/python/main.lock [--system-site]

Run by the repository rule in python_env.bzl, by any Python 3.8 or newer. The environment lies
outside the build, under `~/.cache/swe_rl/venv` (or $SWE_RL_VENV_CACHE): gigabytes of wheels
then cost no symlink forest. Its name hashes the lock, the base interpreter and, with
--system-site, what that interpreter already has; so a changed lock is a changed path, which
every action that uses it sees, and checkouts share one environment.

Invariant: `.complete` exists only in an environment whose every requirement was installed.
"""

import argparse
import fcntl
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
from typing import Dict, List, NamedTuple, Optional, Tuple

_PIP_FLAGS = [
    "--quiet",
    "--disable-pip-version-check",
    "--no-deps",
    "--require-hashes",
    "--only-binary=:all:",
    # Published as a source archive only.
    "--no-binary=antlr4-python3-runtime",
    # megatron-core declares 3.12, ships a wheel for 3.11 and runs there.
    "--ignore-requires-python",
]


class Env(NamedTuple):
    """What an environment asks of its base interpreter."""

    versions: Tuple[str, ...]  # accepted, in order of preference
    override: str  # environment variable that names an interpreter


ENVS: Dict[str, Env] = {
    "main": Env(("3.11",), "SWE_RL_PYTHON"),
    "engine": Env(("3.11",), "SWE_RL_PYTHON"),
    "harness": Env(("3.12", "3.13"), "SWE_RL_HARNESS_PYTHON"),
}
# An accelerator image's interpreter is whatever its torch was built for.
_SYSTEM_SITE_VERSIONS = ("3.11", "3.12", "3.13")


class VenvError(Exception):
    """The environment cannot be made; the message says why and what to do."""


def _run_version(python: str) -> Optional[str]:
    """Returns "3.12" for an interpreter that starts, None for one that does not."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _candidates(env: Env) -> List[str]:
    """Returns interpreters worth trying: on PATH first, then pyenv's, by version."""
    found = []
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    for version in env.versions:
        found.append(shutil.which("python" + version))
        found += sorted(
            glob.glob(os.path.join(pyenv, "versions", version + ".*", "bin", "python3"))
        )
    found.append(shutil.which("python3"))
    return [path for path in found if path]


def find_interpreter(name: str, system_site: bool = False) -> str:
    """Finds the base interpreter of environment `name`.

    With `system_site` its packages matter, so plain `python3` is tried first.

    Raises:
        VenvError: none was found, or the one named by the override is unusable.
    """
    env = ENVS[name]
    if system_site:
        env = env._replace(versions=_SYSTEM_SITE_VERSIONS)
    wanted = " or ".join(env.versions)
    override = os.environ.get(env.override)
    if override:
        path = shutil.which(override)
        version = _run_version(path) if path else None
        if path is None or version not in env.versions:
            raise VenvError(
                f"{env.override}={override} is {'Python ' + version if version else 'no interpreter'}; "
                f"the {name} environment needs Python {wanted}. Point {env.override} at one."
            )
        return os.path.realpath(path)
    candidates = _candidates(env)
    for path in reversed(candidates) if system_site else candidates:
        if _run_version(path) in env.versions:
            return os.path.realpath(path)
    raise VenvError(
        f"no Python {wanted} was found on PATH or in pyenv, and the {name} environment needs one. "
        f"Install it (your distribution's python{env.versions[0]} with its venv package, or "
        f"`pyenv install {env.versions[0]}`) or set {env.override} to its path."
    )


def _key(lock: str, python: str, system_site: bool) -> str:
    """Returns the environment's hash: whatever would make an existing one wrong is in it."""
    with open(lock, encoding="utf-8") as f:
        parts = [line.strip() for line in f if line.strip() and not line.lstrip().startswith("#")]
    code = "import sys; print(sys.version)"
    if system_site:
        code += (
            "; from importlib.metadata import distributions"
            "; print(sorted('%s==%s' % (d.metadata['Name'], d.version) for d in distributions()))"
        )
    parts += [python, str(system_site)]
    parts.append(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _checked(command: List[str], failure: str) -> None:
    """Runs a command; raises with the last lines of its output when it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        lines = [
            line for line in done.stdout.splitlines() if not line.startswith("WARNING: Location")
        ]
        tail = "\n".join(lines[-15:])
        raise VenvError(f"{failure} (exit status {done.returncode}):\n{tail}")


def make(name: str, lock: str, system_site: bool = False) -> str:
    """Makes environment `name` from `lock` unless it is there; returns its interpreter's path.

    Safe to call from several processes: a file lock lets one install while the others wait.

    Raises:
        VenvError: there is no interpreter, or pip refused the lock.
    """
    python = find_interpreter(name, system_site)
    cache = os.environ.get("SWE_RL_VENV_CACHE") or os.path.expanduser("~/.cache/swe_rl/venv")
    venv = os.path.join(cache, name + "-" + _key(lock, python, system_site))
    venv_python, complete = os.path.join(venv, "bin", "python3"), os.path.join(venv, ".complete")
    os.makedirs(cache, exist_ok=True)
    with open(venv + ".lock", "w", encoding="utf-8") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        if not os.path.exists(complete):
            site = ["--system-site-packages"] if system_site else []
            _checked(
                [python, "-m", "venv", "--clear", *site, venv],
                f"{python} could not make a virtual environment for {name}; on Debian install the "
                "python3-venv package of its version",
            )
            _checked(
                [venv_python, "-m", "pip", "install", *_PIP_FLAGS, "-r", lock],
                f"pip could not install {lock} for the {name} environment; check the network and "
                "the lock's hashes (third_party/python/lock.py writes it)",
            )
            open(complete, "w", encoding="utf-8").close()
    return venv_python


def describe(python: str) -> Dict[str, str]:
    """Returns the interpreter with its header and site-packages folders."""
    code = "import json, sysconfig; print(json.dumps(sysconfig.get_paths()))"
    done = subprocess.run([python, "-I", "-c", code], check=True, capture_output=True, text=True)
    paths = json.loads(done.stdout)
    return {"python": python, "include": paths["include"], "site_packages": paths["purelib"]}


def main(argv: List[str]) -> int:
    """Makes one environment and prints its description as JSON; 1 and one message on failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("env", choices=sorted(ENVS))
    parser.add_argument("--lock", help="the hash lock; not needed with --find")
    parser.add_argument("--find", action="store_true", help="only look for the base interpreter")
    parser.add_argument("--system-site", action="store_true")
    args = parser.parse_args(argv)
    if not args.find and not args.lock:
        parser.error("--lock is needed")
    try:
        if args.find:
            print(find_interpreter(args.env, args.system_site))
            return 0
        print(json.dumps(describe(make(args.env, args.lock, args.system_site))))
    except VenvError as error:
        print(f"swe_rl: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
