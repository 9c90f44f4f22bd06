"""The megatron model against transformers: logits, export, packing, tied and untied."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trainer import batch, hf_export, testbed
from trainer.config import GridConfig
from trainer.device import Device
from trainer.errors import BadRequestError
from trainer.model import Policy

LENGTHS = [5, 17, 9, 31, 31, 2]


def make_policy(folder: Path, device: Device) -> Policy:
    policy = Policy(folder, GridConfig(), device, seed=0)
    policy.load_hf()
    return policy


def sequences() -> list[batch.Sequence]:
    rng = np.random.default_rng(0)
    records = [
        testbed.record(rng.integers(6, testbed.VOCAB, n), [0] + [1] * (n - 1)) for n in LENGTHS
    ]
    return [batch.from_proto(r, testbed.VOCAB) for r in records]


def logits(policy: Policy, chosen: list[batch.Sequence], budget: int) -> list[torch.Tensor]:
    """Logits of each sequence, computed in packs of `budget` tokens."""
    out: dict[int, torch.Tensor] = {}
    micros = batch.make_micro_batches(chosen, budget, testbed.VOCAB, torch.device("cpu"))
    with torch.no_grad():
        for micro in micros:
            every = policy.hidden(micro) @ policy.output_weight.t()
            bounds = micro.rows.cu_seqlens_q.tolist()
            order = list(dict.fromkeys(micro.sequence.tolist()))
            for i, a, b in zip(order, bounds, bounds[1:], strict=False):
                out[i] = every[a:b]
    return [out[i] for i in range(len(chosen))]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", testbed.FAMILIES)
def test_logits_match_transformers_and_export_is_exact(
    tmp_path: Path, device: Device, family: str, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM

    folder = testbed.write_model(
        tmp_path / "m", scale=5.0, **testbed.FAMILIES[family] | {"tie_word_embeddings": tied}
    )
    policy = make_policy(folder, device)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen = sequences()
    for sequence, ours in zip(chosen, logits(policy, chosen, 1000), strict=True):
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            theirs = reference(ids).logits[0]
        assert float((ours - theirs).abs().max()) <= 2e-6
    weights = load_file(folder / "model.safetensors")
    exported = dict(policy.export_named_tensors())
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


def test_packed_equals_one_by_one(model_dir: Path, device: Device) -> None:
    policy = make_policy(model_dir, device)
    chosen = sequences()
    for budget in (1000, 40):
        packed = logits(policy, chosen, budget)
        for one, ours in zip(chosen, packed, strict=True):
            alone = logits(policy, [one], 1000)[0]
            # Same sums in another order: float32, logits of order 1.
            assert float((alone - ours).abs().max()) <= 2e-6


def test_exported_folder_loads_again(model_dir: Path, device: Device, tmp_path: Path) -> None:
    policy = make_policy(model_dir, device)
    target = tmp_path / "out" / "export"
    for _ in range(2):  # the second replaces the first whole
        count, size = hf_export.write(policy.export_named_tensors(), model_dir, target)
    assert (count, size) == (
        len(load_file(target / "model.safetensors")),
        4 * policy.num_parameters,
    )
    assert [p.name for p in target.parent.iterdir()] == ["export"]
    again = make_policy(target, device)
    before, after = dict(policy.export_named_tensors()), dict(again.export_named_tensors())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_folders_that_cannot_be_used_are_named(tmp_path: Path, device: Device) -> None:
    with pytest.raises(BadRequestError, match=r"cannot read .*config.json"):
        Policy(tmp_path / "nothing", GridConfig(), device, seed=0)
    other = testbed.write_model(tmp_path / "other", model_type="llama")
    with pytest.raises(BadRequestError, match="model_type is 'llama'"):
        Policy(other, GridConfig(), device, seed=0)
    bare = testbed.write_model(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(BadRequestError, match="init_model"):
        Policy(bare, GridConfig(), device, seed=0).load_hf()
    dense = testbed.write_model(tmp_path / "dense", **testbed.FAMILIES["llama"])
    for axis, size, name in (
        ("tensor_parallel", 3, "vocab_size 40"),
        ("pipeline_parallel", 3, "num_hidden_layers 2"),
    ):
        with pytest.raises(BadRequestError, match=f"grid.{axis} is {size}, .* {name}"):
            Policy(dense, GridConfig(**{axis: size}), device, seed=0)
    with pytest.raises(BadRequestError, match="'transformer_engine', which is not installed"):
        Policy(dense, GridConfig(), device, seed=0, layers="transformer_engine")
    with pytest.raises(BadRequestError, match="expert_parallel=2, but the model .* no experts"):
        Policy(dense, GridConfig(data_parallel=2, expert_parallel=2), device, seed=0)


def test_a_config_of_a_newer_transformers_gives_the_same_model(
    tmp_path: Path, device: Device
) -> None:
    """It keeps the rope base where ours does not look."""
    llama = testbed.FAMILIES["llama"]
    old = testbed.write_model(tmp_path / "old", scale=5.0, **llama)
    rope = {"rope_type": "default", "rope_theta": llama["rope_theta"]}
    new = testbed.write_model(
        tmp_path / "new", scale=5.0, **llama | {"rope_theta": None, "rope_parameters": rope}
    )
    chosen = sequences()
    expected = logits(make_policy(old, device), chosen, 1000)
    for ours, theirs in zip(logits(make_policy(new, device), chosen, 1000), expected, strict=True):
        assert torch.equal(ours, theirs)
