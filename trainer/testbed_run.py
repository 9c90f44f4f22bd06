"""Runs a supervised stage in a process of its own and prints what it did, for tests.

    python -P -m trainer.testbed_run CONFIG.json DATA.sequences NUM_STEPS STOP_AFTER [--kill]

Stops with a checkpoint after step STOP_AFTER; 0 runs to the end. With --kill it saves and is killed
(SIGKILL) there. Prints JSON: losses by step
(as hex floats) and a digest of the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path


def main() -> int:
    """Runs the stage."""
    import torch

    from trainer import device as devices
    from trainer.config import TrainerConfig
    from trainer.stage_runner import StageRequest, StageRunner

    config = TrainerConfig.model_validate_json(Path(sys.argv[1]).read_text())
    num_steps, stop_after = int(sys.argv[3]), int(sys.argv[4])
    runner = StageRunner(config, devices.enter(1, 60.0), None)
    completed = runner.run_stage(StageRequest("sft", "sft", sys.argv[2], num_steps))

    def stop_when_due() -> None:
        while runner.status().state == "running":
            time.sleep(0.005)
        runner.stop(save_checkpoint=False)

    def stop_at_step() -> None:
        if stop_after and len(runner.metrics.since("sft", 1)) >= stop_after:
            if "--kill" in sys.argv:
                runner.submit(save_and_die)
            else:
                runner.stop(save_checkpoint=True)

    def save_and_die() -> None:
        runner.save()
        os.kill(os.getpid(), signal.SIGKILL)

    runner.metrics.add_listener(stop_at_step)
    watcher = threading.Thread(target=stop_when_due, daemon=True)
    watcher.start()
    runner.run()
    digest = hashlib.sha256()
    for name, tensor in runner.learner.policy.export_named_tensors():
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    losses = {r.step: r.scalars["loss"].hex() for r in runner.metrics.since("sft", 1)}
    print(json.dumps({"completed": completed, "losses": losses, "weights": digest.hexdigest()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
