"""Checkpoints: model, optimizer, random state and progress, written whole or not at all.

    checkpoints/000007-rl-40/   manifest.json, *.distcp, .metadata, metadata.json

Tensors are in megatron's `torch_dist` format, which another grid can load. A checkpoint is
written to a hidden folder, synced, given its manifest, and renamed. The manifest holds the
SHA-256 of every file; a load verifies it and, when it does not match, says so and takes the
checkpoint before. Owner: the trainer; only one writes to a folder. Of several ranks all take part in
a save and a load, the first alone names, seals and deletes, and all need to see the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import queue
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from trainer.errors import BadRequestError, CorruptCheckpointError
from trainer.step import Learner

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MANIFEST = "manifest.json"
_SHARDING = "fully_reshardable"


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is; stored in the manifest."""

    stage: str = ""  # the stage last worked on
    stage_step: int = 0  # its steps done
    rl_step: int = 0  # RL steps done, the manager's count of optimizer steps
    weight_version: int = 0  # last one published
    finished_stages: tuple[str, ...] = ()


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

    def save(self, learner: Learner, progress: Progress) -> Path:
        """Writes a checkpoint; it is durable when this returns. Then deletes the oldest."""
        path = self._folder / _from_first(lambda: self._next_name(progress))
        partial = self._folder / f".partial-{path.name}"
        _from_first(lambda: _empty(partial))
        with_optimizer = _has_state(learner)
        dist_checkpointing.save(
            _state(learner, loading=False, with_optimizer=with_optimizer),
            str(partial),
            content_metadata={"distrib_optim_sharding_type": _SHARDING},
        )
        dist.barrier()  # every rank's files are there

        def seal() -> None:
            _write_manifest(partial, progress, with_optimizer)
            partial.rename(path)
            _sync(self._folder)
            for old in self._superseded():
                shutil.rmtree(old)

        _from_first(seal)
        return path

    def find(self, name: str) -> Checkpoint:
        """The checkpoint `name`, verified. Raises CorruptCheckpointError."""
        return verify(self._folder / name)

    def latest(self) -> Checkpoint | None:
        """Returns the newest checkpoint that verifies, or None. Logs those that do not."""

        def newest() -> Checkpoint | None:
            for path in reversed(self.paths()):
                try:
                    return verify(path)
                except CorruptCheckpointError as error:
                    _log.error("checkpoint refused, the one before is used: %s", error)
            return None

        return _from_first(newest)

    def progress_of_newest(self) -> list[Progress]:
        """Progress of the newest `kept`, oldest first, from manifests alone.

        A stage's end beyond those is there to be replayed, not to be resumed from.
        """
        return [p for path in self.paths()[-self._kept :] if (p := _progress(path)) is not None]

    def _next_name(self, progress: Progress) -> str:
        existing = self.paths()
        index = int(existing[-1].name.split("-")[0]) + 1 if existing else 1
        return f"{index:06d}-{progress.stage or 'start'}-{progress.stage_step}"

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


def load_model(learner: Learner, checkpoint: Checkpoint) -> None:
    """Loads the weights and the random state, not the optimizer."""
    _load(learner, checkpoint, with_optimizer=False)


def load_all(learner: Learner, checkpoint: Checkpoint) -> None:
    """Loads weights, random state and optimizer; `begin_stage` of the same stage comes first."""
    _load(learner, checkpoint, with_optimizer=checkpoint.has_optimizer)


def verify(path: Path) -> Checkpoint:
    """Checks every file against the manifest.

    Raises:
      CorruptCheckpointError: the manifest is missing or unreadable, or a file differs.
    """
    files, checkpoint = _read_manifest(path)
    for name, wanted in files.items():
        file = path / name
        got = _digest(file) if file.is_file() else "no such file"
        if got != wanted:
            raise CorruptCheckpointError(
                f"{file}: sha256 is {got}, the manifest says {wanted}; delete {path} if no copy "
                "of it exists"
            )
    return checkpoint


def _from_first(work: Callable[[], _T]) -> _T:
    """What `work` returns on the first rank, on every rank; it runs there alone.

    Raises on every rank what it raises there.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    said: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            said[0] = work()
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            said[1] = error
    dist.broadcast_object_list(said, 0)
    if said[1] is not None:
        raise said[1]
    result: _T = said[0]
    return result


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _optimizers(learner: Learner) -> list[Any]:
    return list(getattr(learner.optimizer, "chained_optimizers", [learner.optimizer]))


def _has_state(learner: Learner) -> bool:
    """megatron cannot save an optimizer that has taken no step yet."""
    if learner.optimizer is None:
        return False
    return all(bool(o.optimizer.state) for o in _optimizers(learner))


def _state(learner: Learner, loading: bool, with_optimizer: bool) -> dict[str, Any]:
    _keep_adam_step()
    _save_in_process()
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": _SHARDING,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    model = learner.policy.module.sharded_state_dict(metadata=metadata)
    state: dict[str, Any] = {"model": model, "random": {"torch": torch.get_rng_state()}}
    if with_optimizer:
        state["optimizer"] = learner.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=metadata
        )
    return state


def _load(learner: Learner, checkpoint: Checkpoint, with_optimizer: bool) -> None:
    if with_optimizer:
        for optimizer in _optimizers(learner):
            # megatron loads into existing state only; these values are overwritten.
            optimizer._init_optimizer_states_with_dummy_values()
    loaded = dist_checkpointing.load(
        _state(learner, loading=True, with_optimizer=with_optimizer), str(checkpoint.path)
    )
    learner.policy.module.load_state_dict(loaded["model"])
    torch.set_rng_state(loaded["random"]["torch"])
    if not with_optimizer:
        return
    learner.optimizer.load_state_dict(_fitted(learner, loaded["optimizer"]))
    for optimizer in _optimizers(learner):
        for state in optimizer.optimizer.state.values():
            # Loading makes all parameters share one step tensor, and AdamW would then count a
            # step for each parameter.
            state["step"] = state["step"].clone()


def _fitted(learner: Learner, loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Loaded optimizer state in the nesting that this grid's optimizer wants.

    Tensors are found by parameter on any grid. The rest lies in one dictionary, or, where experts
    have an optimizer of their own, in one for each; another grid may have the other form. What is
    state in it is the count of steps: rates and decays are set anew by the stage.
    """
    optimizers = _optimizers(learner)
    was_one, is_one = "optimizer" in loaded, len(optimizers) == 1
    if was_one == is_one:
        return loaded
    saved = loaded if was_one else loaded[0]
    (step,) = {group["step"] for group in saved["optimizer"]["param_groups"]}
    parts = []
    for index, optimizer in enumerate(optimizers):
        own = optimizer.state_dict()["optimizer"]
        groups = [{**group, "step": step} for group in own["param_groups"]]
        tensors = {
            k: v for k, v in (loaded if is_one else loaded[index]).items() if k not in (0, 1)
        }
        other = {k: v for k, v in saved.items() if isinstance(k, str) and k != "param_state"}
        parts.append({**other, **tensors, "optimizer": {**own, "param_groups": groups}})
    return parts[0] if is_one else dict(enumerate(parts))


def _keep_adam_step() -> None:
    """torch's AdamW keeps a step a parameter, which megatron's format has no place for.

    Without Transformer Engine or Apex megatron uses torch's AdamW; the step count itself is
    stored with the parameter groups.
    """
    original: Any = DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(original, "_keeps_adam_step", False):
        return

    def patched(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        return original(self, model_param, {"step": None, **tensors})

    patched._keeps_adam_step = True  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = patched


def _save_in_process() -> None:
    """Makes megatron collect its writers' results in this process.

    Saves are synchronous and write with threads, so a plain queue will do. megatron's own is
    served by a child process, which imports the main module again, costs seconds, and outlives
    a trainer that is killed.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_manifest(folder: Path, progress: Progress, has_optimizer: bool) -> None:
    files = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        _sync(file)
        files[str(file.relative_to(folder))] = _digest(file)
    manifest = folder / _MANIFEST
    content = {
        "progress": dataclasses.asdict(progress),
        "has_optimizer": has_optimizer,
        "sha256": files,
    }
    manifest.write_text(json.dumps(content, indent=1))
    _sync(manifest)
    _sync(folder)


def _progress(path: Path) -> Progress | None:
    """None when the manifest cannot be read."""
    try:
        return _read_manifest(path)[1].progress
    except CorruptCheckpointError:
        return None


def _read_manifest(path: Path) -> tuple[dict[str, str], Checkpoint]:
    try:
        content = json.loads((path / _MANIFEST).read_text())
        progress = dict(content["progress"])
        progress["finished_stages"] = tuple(progress["finished_stages"])
        checkpoint = Checkpoint(path, Progress(**progress), bool(content["has_optimizer"]))
        return dict(content["sha256"]), checkpoint
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{path / _MANIFEST} cannot be read: {error!r}") from error
