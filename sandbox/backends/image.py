"""Turns image configurations into the layers that an overlay is mounted from.

Owner: the local backend. A `host` image shows the host's /usr read-only (one shared overlay for
each image: the image's `usr` layers, a mask, the host's /usr) under a root made here of a few
files: no other directory of the host is visible.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.config import ImageConfig
from sandbox.errors import InvalidRequestError

_DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
_LINKS = {
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
    "dev/ptmx": "pts/ptmx",
}
_SYSTEM_FILES = {
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/hostname": "sandbox\n",
    "etc/resolv.conf": "",
}
_HOST_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/profile": "",
}
_HOST_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "mime.types", "localtime")
"""Copied from the host when there: without them libraries and alternatives are not found."""
_HOST_DIRECTORIES = (
    "root",
    "home",
    "opt",
    "srv",
    "mnt",
    "media",
    "run",
    "var/lib",
    "var/log",
    "usr",
)
_PYTHON_TARGET = "/opt/python"


@dataclass(frozen=True)
class ImageLayers:
    """What the zygote mounts for one image."""

    lowers: tuple[Path, ...]
    """Layers of the root overlay, topmost first."""
    usr_lowers: tuple[Path, ...] = ()
    """Layers of the shared read-only /usr, topmost first; empty: /usr is in `lowers`."""
    binds: tuple[tuple[Path, str], ...] = ()
    """Read-only directories: (on the host, in the sandbox)."""
    env: dict[str, str] = field(default_factory=dict)


class ImageBuilder:
    """Makes the few directories that images share, below one work directory."""

    def __init__(self, directory: Path, hidden_usr: tuple[str, ...], host_usr: Path) -> None:
        """Args: directory is created by `build`; host_usr is /usr, except in tests."""
        self._system = directory / "system"
        self._host = directory / "host"
        self._mask = directory / "mask"
        self._hidden_usr = hidden_usr
        self._host_usr = host_usr
        self._python: Path | None = None

    def build(self) -> None:
        """Writes the shared layers. Raises OSError (needs root for device nodes)."""
        _make_system_layer(self._system)
        self._python = _python_to_bind(self._host_usr)
        _make_host_layer(self._host, self._host_usr, with_python=self._python is not None)
        self._mask.mkdir(parents=True)
        for name in self._hidden_usr:
            directory = self._mask / name
            directory.mkdir(parents=True)
            os.setxattr(directory, "trusted.overlay.opaque", b"y")
        _link_python(self._mask / "local" / "bin", self._host_usr, self._python)

    def layers(self, image: ImageConfig) -> ImageLayers:
        """The layers of one image. Raises InvalidRequestError when a directory is missing."""
        for layer in image.layers:
            if not layer.is_dir():
                raise InvalidRequestError(f"image layer {layer} is not a directory: build it first")
        if image.base != "host":
            base = Path(image.base)
            if not (base / "bin").is_dir():
                raise InvalidRequestError(
                    f"root file system {base} has no bin directory: want an unpacked root"
                )
            return ImageLayers(lowers=(*image.layers, self._system, base), env=image.env)
        usr_layers = [layer / "usr" for layer in image.layers if (layer / "usr").is_dir()]
        return ImageLayers(
            lowers=(*image.layers, self._system, self._host),
            usr_lowers=(*usr_layers, self._mask, self._host_usr),
            binds=((self._python, _PYTHON_TARGET),) if self._python else (),
            env=image.env,
        )


def _write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o644)


def _make_system_layer(root: Path) -> None:
    """Devices and mount points, for images of both kinds."""
    for name in ("dev/pts", "dev/shm", "proc", "tmp", "var/tmp"):
        (root / name).mkdir(parents=True)
    for name in ("dev/shm", "tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    for name, (major, minor) in _DEVICES.items():
        path = root / "dev" / name
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        path.chmod(0o666)  # the umask does not apply
    for name, target in _LINKS.items():
        (root / name).symlink_to(target)
    _write(root, _SYSTEM_FILES)


def _make_host_layer(root: Path, host_usr: Path, with_python: bool) -> None:
    for name in _HOST_DIRECTORIES:
        (root / name).mkdir(parents=True)
    (root / "root").chmod(0o700)
    if with_python:
        (root / _PYTHON_TARGET.lstrip("/")).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if (host_usr / name).is_dir():
            (root / name).symlink_to(f"usr/{name}")
    _write(root, _HOST_FILES)
    for name in _HOST_ETC:
        source, target = Path("/etc") / name, root / "etc" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        elif source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.is_file():
            shutil.copyfile(source, target)


def _python_to_bind(host_usr: Path) -> Path | None:
    """This interpreter's prefix, when the host's /usr/bin has no python3 of its own."""
    if (host_usr / "bin" / "python3").exists():
        return None
    return Path(sys.base_prefix)


def _link_python(directory: Path, host_usr: Path, bound: Path | None) -> None:
    """`python`, and `python3` where the host has none in /usr/bin, on the sandbox's PATH."""
    directory.mkdir(parents=True, exist_ok=True)
    if bound is not None:
        for name in ("python3", "python"):
            (directory / name).symlink_to(f"{_PYTHON_TARGET}/bin/python3")
    elif not (host_usr / "bin" / "python").exists():
        (directory / "python").symlink_to("/usr/bin/python3")
