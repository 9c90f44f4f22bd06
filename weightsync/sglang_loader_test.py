"""The loader over SGLang's own model and a real ring: what is found out when a model loads wrongly."""

from __future__ import annotations

import array
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from rollout.engines import cpu_shim

cpu_shim.install()

from weightsync import _core, sglang_loader, sglang_models  # noqa: E402 (after the stand-ins)
from weightsync.config import WeightSyncConfig  # noqa: E402
from weightsync.descriptor import TENSOR_NAME, Descriptor, pack_plan  # noqa: E402
from weightsync.errors import PeerLostError  # noqa: E402
from weightsync.plan import TensorSpec, make_plan  # noqa: E402
from weightsync.sglang_models import (  # noqa: E402
    CONFIG,
    DENSE_CONFIG,
    make_model,
    make_weights,
)
from weightsync.transports import open_sender, send_bucket  # noqa: E402
from weightsync.weight_digest import WeightDigest, tensor_checksum  # noqa: E402

Named = tuple[str, torch.Tensor]
TIMEOUT_S = 60.0
EXPERT = "model.layers.0.mlp.experts."
OTHER_EXPERT = {f"{EXPERT}2.": f"{EXPERT}3."}


@pytest.fixture(scope="module", autouse=True)
def settings() -> None:
    sglang_models.publish_settings(2)


class Model(torch.nn.Module):
    """SGLang's model, whose loader sees what `fault` makes of the tensors."""

    def __init__(self, inner: Any, fault: Callable[[Iterable[Named]], Iterator[Named]]) -> None:
        super().__init__()
        self.inner = inner
        self._fault = fault

    def named_parameters(self, *arguments: Any, **options: Any) -> Any:
        return self.inner.named_parameters(*arguments, **options)

    def named_modules(self, *arguments: Any, **options: Any) -> Any:
        return self.inner.named_modules(*arguments, **options)

    def load_weights(self, weights: Iterable[Named]) -> None:
        self.inner.load_weights(self._fault(weights))


class Outcome:
    """What the sender knows of its receivers after one update."""

    def __init__(self, sender: Any, num_receivers: int) -> None:
        self.states = [sender.state(i) for i in range(num_receivers)]
        self.errors = [sender.error(i) for i in range(num_receivers)]
        self.digests = [sender.digest(i) for i in range(num_receivers)]
        self.touched = [sender.was_touched(i) for i in range(num_receivers)]


_epoch = 0


def update(
    models: Sequence[Any],
    weights: dict[str, torch.Tensor],
    verify: bool = True,
    wrong_sum_of: str = "",
) -> Outcome:
    """Sends `weights` to the models' loaders, each in a thread."""
    global _epoch
    _epoch += 1
    config = WeightSyncConfig(bucket_bytes=40 * 1024, verify_engine=verify)
    plan = make_plan(
        [
            TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for n, t in weights.items()
        ],
        config.bucket_bytes,
    )
    assert len(plan.buckets) > 3
    sender, endpoint = open_sender(config, plan, _epoch, len(models))
    threads = []
    for index, model in enumerate(models):
        descriptor = Descriptor(
            _epoch, 1, endpoint, index, pack_plan(plan), plan.digest, TIMEOUT_S, verify
        )
        payload = torch.frombuffer(bytearray(descriptor.encode()), dtype=torch.uint8)
        threads.append(
            threading.Thread(target=sglang_loader.load, args=(model, [(TENSOR_NAME, payload)]))
        )
    tensors = list(weights.values())
    for thread in threads:
        thread.start()
    try:
        for index, bucket in enumerate(plan.buckets):
            rows = plan.tensors[bucket.first : bucket.first + len(bucket.offsets)]
            sums = array.array(
                "Q",
                [tensor_checksum(weights[s.name]) ^ int(s.name == wrong_sum_of) for s in rows],
            )
            send_bucket(sender, plan, tensors, index, TIMEOUT_S, sums if verify else None)
        sender.finish(TIMEOUT_S)
    except PeerLostError:
        pass  # every receiver failed: the outcome says why
    for thread in threads:
        thread.join(TIMEOUT_S)
    outcome = Outcome(sender, len(models))
    sender.close()
    return outcome


def digest_of(weights: dict[str, torch.Tensor]) -> int:
    digest = WeightDigest()
    for name, tensor in reversed(weights.items()):
        digest.add(name, tensor_checksum(tensor))
    return digest.value


@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_finds_in_its_parameters_what_was_sent(size):
    models = [make_model(rank, size) for rank in range(size)]
    for seed in (1, 2):
        weights = make_weights(seed)
        outcome = update(models, weights)
        assert outcome.errors == [""] * size
        assert outcome.states == [_core.ReceiverState.VERIFIED] * size
        assert outcome.digests == [digest_of(weights)] * size
    assert digest_of(make_weights(1)) != digest_of(make_weights(2))


def renamed(names: dict[str, str]) -> Callable[[Iterable[Named]], Iterator[Named]]:
    def fault(weights: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in weights:
            shown = name
            for old, new in names.items():
                if old in name:
                    shown = name.replace(old, new)
                    break
            yield shown, tensor

    return fault


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def fault(weights: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in weights:
            yield name, change(tensor.clone()) if part in name else tensor

    return fault


def repeated_last(part: str, where: str) -> Any:
    """What `part` holds is also written to `where`, after that was right."""
    kept: dict[str, torch.Tensor] = {}

    def fault(weights: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in weights:
            yield name, tensor
            if part in name:
                kept[name] = tensor.clone()
            if name == "model.layers.1.mlp.experts.5.down_proj.weight":
                yield where, next(iter(kept.values()))

    return fault


def one_bit(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(torch.int32)[-1, -1] ^= 1
    return tensor


def half(tensor: torch.Tensor) -> torch.Tensor:
    tensor[len(tensor) // 2 :] = 0
    return tensor


GATE_UP = {
    f"{EXPERT}1.gate_proj": f"{EXPERT}1.up_proj",
    f"{EXPERT}1.up_proj": f"{EXPERT}1.gate_proj",
}
FAULTS = {
    "drops_a_tensor": (
        renamed({"layers.1.self_attn.k_norm": "layers.1.self_attn.k_gone"}),
        ["model.layers.1.self_attn.k_norm.weight"],
    ),
    "swaps_gate_and_up": (
        renamed(GATE_UP),
        [f"{EXPERT}1.gate_proj.weight", f"{EXPERT}1.up_proj.weight"],
    ),
    "writes_an_expert_to_another_slot": (
        renamed(OTHER_EXPERT),
        [f"{EXPERT}2.{part}_proj.weight" for part in ("gate", "up", "down")],
    ),
    "swaps_k_and_v": (
        renamed(
            {
                "layers.0.self_attn.k_proj": "layers.0.self_attn.v_proj",
                "layers.0.self_attn.v_proj": "layers.0.self_attn.k_proj",
            }
        ),
        ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"],
    ),
    "truncates": (
        changed("lm_head", half),
        ["lm_head.weight"],
    ),
    "flips_a_bit": (
        changed("layers.1.mlp.experts.4.down_proj", one_bit),
        ["model.layers.1.mlp.experts.4.down_proj.weight"],
    ),
    "overwrites_an_earlier_one": (
        repeated_last("layers.0.input_layernorm", "model.norm.weight"),
        ["model.norm.weight"],
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("size", [1, 2])
def test_what_a_model_loads_wrongly_is_named(fault, size):
    change, names = FAULTS[fault]
    models = [make_model(rank, size) for rank in range(size)]
    models[-1] = Model(models[-1], change)
    # Weights were right before: what is found is that they did not change as they should.
    assert update([getattr(m, "inner", m) for m in models], make_weights(3)).errors == [""] * size
    outcome = update(models, make_weights(4))
    assert outcome.states[:-1] == [_core.ReceiverState.VERIFIED] * (size - 1)
    assert outcome.states[-1] == _core.ReceiverState.FAILED
    error = outcome.errors[-1]
    assert error.startswith(f"ArrivalError: {len(names)} of "), error
    for name in names:
        assert f"{name} in " in error
    assert outcome.touched[-1]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("config", [CONFIG, DENSE_CONFIG], ids=["experts", "dense"])
def test_a_tied_head_has_the_embeddings_weights(config, size):
    """SGLang gives the model with experts a head of its own, the dense one the embedding itself."""
    tied = copy.deepcopy(config)
    tied.tie_word_embeddings = True
    weights = make_weights(8, tied)
    del weights["lm_head.weight"]
    models = [make_model(rank, size, config=tied) for rank in range(size)]
    outcome = update(models, weights)
    assert outcome.errors == [""] * size
    assert outcome.digests == [digest_of(weights)] * size
    for model in models:
        assert model.config.tie_word_embeddings
        assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
        assert (model.lm_head.weight != -7.0).any()


def test_without_the_check_nothing_is_noticed():
    change, _ = FAULTS["swaps_gate_and_up"]
    outcome = update([Model(make_model(), change)], make_weights(5), verify=False)
    assert outcome.states == [_core.ReceiverState.VERIFIED]
    assert outcome.digests == [0]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_tensor_that_is_not_the_trainers_is_named(size, name):
    """Its bucket's checksum is right: the packing was not."""
    models = [make_model(rank, size) for rank in range(size)]
    outcome = update(models, make_weights(6), wrong_sum_of=name)
    assert outcome.states == [_core.ReceiverState.FAILED] * size
    for error in outcome.errors:
        assert error.startswith("ArrivalError: ")
        assert name in error


def test_a_model_without_a_map_is_refused_untouched_unless_it_is_not_to_be_checked():
    model = make_model()
    scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    model.model.layers[0].self_attn.o_proj.weight_scale = scale
    outcome = update([model], make_weights(7))
    assert "LayoutError: " in outcome.errors[0]
    assert "verify_engine=false" in outcome.errors[0]
    assert outcome.touched == [False]
    assert update([model], make_weights(7), verify=False).errors == [""]
