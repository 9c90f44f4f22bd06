"""The loader of weightsync over an SGLang model that loads wrongly, while a file is there.

Owner: tests of real engines, which name it as engines.weight_loader. The file's name is in
SWE_RL_TEST_FAULT; it holds two parts of tensor names, and tensors of the first are loaded as if they
had the second.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from weightsync import sglang_loader

LOADER = "rollout.engines.faulty_loader.load"
VARIABLE = "SWE_RL_TEST_FAULT"


class _Model:
    def __init__(self, inner: Any, old: str, new: str) -> None:
        self._inner = inner
        self._names = old, new

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._inner.load_weights((name.replace(*self._names), tensor) for name, tensor in weights)


def load(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """As sglang_loader.load."""
    fault = Path(os.environ[VARIABLE])
    if fault.exists():
        old, new = fault.read_text().split()
        model = _Model(model, old, new)
    sglang_loader.load(model, named_tensors)
