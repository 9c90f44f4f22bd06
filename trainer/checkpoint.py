"""The checkpoints of a run as files: whole or absent, and verified when they are read.

    checkpoints/000007-rl-40/   manifest.json, *.distcp, .metadata, metadata.json
                .partial-NAME   is being written          .deleted-NAME   is being deleted
                .refused-NAME   did not verify; those of the last start stay to be looked at

A checkpoint is written to a hidden folder, synced, given its manifest, and renamed. The manifest
holds the SHA-256 of every file and of itself; a load verifies all, and where they do not match, says
so and takes the checkpoint before. Owner: the trainer; only one writes to a folder. Of several ranks
the first alone names, seals and deletes, and all need to see the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import ranks
from trainer.errors import BadRequestError, CorruptCheckpointError

_log = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_PARTIAL, _DELETED, _REFUSED = ".partial-", ".deleted-", ".refused-"


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is; stored in the manifest."""

    stage: str = ""  # the stage last worked on
    stage_step: int = 0  # its steps done
    rl_step: int = 0  # RL steps done, the manager's count of optimizer steps
    weight_version: int = 0  # last one published
    finished_stages: tuple[str, ...] = ()
    batch_ids: tuple[str, ...] = ()  # of the RL steps done, in their order


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    progress: Progress
    has_optimizer: bool  # False when no step was taken since the optimizer was made


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, kept: int, keep_stage_ends: bool = False) -> None:
        """Args: folder is made if needed; what survives a save is the newest `kept` checkpoints
        and, if asked, the newest of each stage that had ended.
        """
        self.pinned = ""  # name of one that survives however old it is
        self._folder = folder
        self._kept = kept
        self._keep_stage_ends = keep_stage_ends
        folder.mkdir(parents=True, exist_ok=True)

    def paths(self) -> list[Path]:
        """Complete checkpoints, oldest first; not verified."""
        return sorted(p for p in self._folder.iterdir() if p.name[0].isdigit())

    def open(self, progress: Progress) -> Path:
        """An empty hidden folder for the next checkpoint. Only one is open at a time.

        What a process that was killed had not finished writing or deleting is deleted first.
        """
        for left in self._folder.iterdir():
            if left.name.startswith((_PARTIAL, _DELETED)):
                shutil.rmtree(left)
        names = [p.name.removeprefix(_REFUSED) for p in self._folder.iterdir()]
        index = 1 + max((int(n.split("-")[0]) for n in names if n[0].isdigit()), default=0)
        name = f"{index:06d}-{progress.stage or 'start'}-{progress.stage_step}"
        folder = self._folder / (_PARTIAL + name)
        folder.mkdir()
        return folder

    def seal(
        self, folder: Path, progress: Progress, has_optimizer: bool, digests: Mapping[str, str]
    ) -> Path:
        """Makes a checkpoint of what was written to `folder`, durably, and deletes the oldest.

        Args: digests are SHA-256 by file of what is synced already; other files are read.
        Raises: OSError.
        """
        files = dict(digests)
        for file in (p for p in folder.rglob("*") if p.is_file()):
            name = str(file.relative_to(folder))
            if name not in files:
                _sync(file)
                files[name] = _digest(file)
        manifest = folder / _MANIFEST
        manifest.write_bytes(_manifest_of(progress, has_optimizer, files))
        _sync(manifest)
        _sync(folder)
        path = self._folder / folder.name.removeprefix(_PARTIAL)
        folder.rename(path)
        _sync(self._folder)
        for old in self._superseded():
            self._delete(old)
        return path

    def discard(self, folder: Path) -> None:
        """Deletes what `open` gave, as far as that is possible."""
        shutil.rmtree(folder, ignore_errors=True)

    def find(self, name: str) -> Checkpoint:
        """The checkpoint `name`, verified. Raises CorruptCheckpointError."""
        return verify(self._folder / name)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies, or None, on every rank.

        Newer ones are refused: the log says why, and they are renamed. Training goes on from the
        one before, and what they hold is of a past that did not happen.
        """
        return ranks.from_first(self._latest)

    def _latest(self) -> Checkpoint | None:
        earlier = list(self._folder.glob(_REFUSED + "*"))
        for path in reversed(self.paths()):
            try:
                return verify(path)
            except CorruptCheckpointError as error:
                aside = self._folder / (_REFUSED + path.name)
                _log.error("checkpoint refused, the one before is used: %s", error)
                for old in earlier:
                    shutil.rmtree(old, ignore_errors=True)
                path.rename(aside)
                _log.error("%s is now %s: delete it once you have looked at it", path, aside)
        return None

    def progress_of_newest(self) -> list[Progress]:
        """Progress of the newest `kept`, oldest first, from manifests alone.

        A stage's end beyond those is there to be replayed, not to be resumed from.
        """
        return [p for path in self.paths()[-self._kept :] if (p := _progress(path)) is not None]

    def _delete(self, path: Path) -> None:
        """Deletes a checkpoint; it is never there in part, and one that cannot go stays."""
        try:
            gone = path.rename(self._folder / (_DELETED + path.name))
            shutil.rmtree(gone)
        except OSError as error:
            _log.warning("an old checkpoint was not deleted: %s", error)

    def _superseded(self) -> list[Path]:
        """Checkpoints that nothing needs any more."""
        older = [p for p in self.paths()[: -self._kept] if p.name != self.pinned]
        if not self._keep_stage_ends:
            return older
        ends: dict[str, Path] = {}
        for path in self.paths():
            progress = _progress(path)
            if progress is not None and progress.stage in progress.finished_stages:
                ends[progress.stage] = path
        return [path for path in older if path not in ends.values()]


def start_of_rl(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run that no RL step has changed.

    Raises:
      BadRequestError: there is none, RL began with a later one that is gone, or its files do
        not match its manifest.
    """
    before_rl: tuple[str, ...] | None = None  # stages that were over when RL began, if known
    for path in sorted((p for p in folder.glob("[0-9]*") if p.is_dir()), reverse=True):
        progress = _progress(path)
        if progress is None:
            continue
        if progress.rl_step:
            before_rl = tuple(s for s in progress.finished_stages if s != progress.stage)
            continue
        if before_rl is not None and progress.finished_stages != before_rl:
            break
        try:
            return verify(path)
        except CorruptCheckpointError as error:
            raise BadRequestError(f"a replay cannot start: {error}") from error
    raise BadRequestError(
        f"{folder} has no checkpoint from before the RL stage, from which a replay starts: the run "
        "was made with trainer.keep_stage_ends = false, or the folder was cleaned"
    )


def verify(path: Path) -> Checkpoint:
    """Checks the manifest and every file in it.

    Raises:
      CorruptCheckpointError: the manifest is missing or not as it was written, or a file differs.
    """
    files, checkpoint = _read_manifest(path)
    for name, wanted in files.items():
        file = path / name
        try:
            got = _digest(file)
        except FileNotFoundError:
            got = "no such file"
        except OSError as error:
            got = f"not to be had: {error}"
        if got != wanted:
            raise CorruptCheckpointError(f"{file}: sha256 is {got}, the manifest says {wanted}")
    return checkpoint


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest_of(progress: Progress, has_optimizer: bool, files: Mapping[str, str]) -> bytes:
    """The manifest's bytes, the same ones for the same content."""
    content: dict[str, Any] = {
        "progress": dataclasses.asdict(progress),
        "has_optimizer": has_optimizer,
        "sha256": dict(sorted(files.items())),
    }
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "sha256_of_this": own}, indent=1).encode()


def _progress(path: Path) -> Progress | None:
    """None when the manifest cannot be read."""
    try:
        return _read_manifest(path)[1].progress
    except CorruptCheckpointError:
        return None


def _read_manifest(path: Path) -> tuple[dict[str, str], Checkpoint]:
    manifest = path / _MANIFEST
    try:
        raw = manifest.read_bytes()
        content = json.loads(raw)
        fields: dict[str, Any] = dict(content["progress"])
        for name in ("finished_stages", "batch_ids"):
            fields[name] = tuple(fields[name])
        progress = Progress(**fields)
        files, has_optimizer = dict(content["sha256"]), bool(content["has_optimizer"])
        is_whole = raw == _manifest_of(progress, has_optimizer, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{manifest} cannot be read: {error!r}") from error
    if not is_whole:
        raise CorruptCheckpointError(f"{manifest} is not as it was written")
    return files, Checkpoint(path, progress, has_optimizer)
