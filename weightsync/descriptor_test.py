"""The descriptor arrives as SGLang can load it, also out of a process that runs megatron-core."""

from __future__ import annotations

import base64
import pickle
import pickletools

import megatron.core.safe_globals  # noqa: F401 - it replaces how torch tensors are pickled
import torch

from weightsync import loader_path
from weightsync.descriptor import TENSOR_NAME, Descriptor


def test_the_payload_names_only_what_the_engine_allows():
    descriptor = Descriptor(
        3, 7, {"transport": "shm", "segment": "s"}, 0, "plan", "digest", 5.0, True
    )
    payload = base64.b64decode(loader_path._serialize(descriptor))
    strings = [
        argument for op, argument, _ in pickletools.genops(payload) if op.name.endswith("UNICODE")
    ]
    assert strings == [TENSOR_NAME, "torch", "ByteTensor"]
    ((name, tensor),) = pickle.loads(payload)
    assert name == TENSOR_NAME
    assert tensor.dtype == torch.uint8
    assert Descriptor.decode(bytes(tensor.numpy())) == descriptor
