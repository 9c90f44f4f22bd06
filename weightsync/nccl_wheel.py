"""NCCL's library and header from PyPI's wheel, pinned in nccl.lock and kept in the cache.

Tests hold our declarations against them. Nothing that ships needs the wheel: at run time the
library of the image is opened.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from bazel.downloads import cache_root, cached_folder, install_wheels

_LOCK = Path(__file__).with_name("nccl.lock")


def nccl_folder() -> Path:
    """The folder with `lib/libnccl.so.2` and `include/nccl.h`. Raises DownloadError."""
    digest = hashlib.sha256(_LOCK.read_bytes()).hexdigest()[:16]
    folder = cached_folder(
        cache_root() / "nccl" / digest, lambda target: install_wheels(_LOCK, target)
    )
    return folder / "nvidia" / "nccl"


def main() -> None:
    """Fetches, and prints where."""
    print(nccl_folder())


if __name__ == "__main__":
    main()
