from __future__ import annotations

from pathlib import Path

import pytest

from trainer import testbed
from trainer.device import Device


@pytest.fixture(scope="session")
def device() -> Device:
    from trainer import device as devices

    return devices.enter(num_threads=1, collective_timeout_s=60.0)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return testbed.write_model(tmp_path / "model", scale=5.0)
