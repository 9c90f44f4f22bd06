"""The RL stage against a scripted manager behind a real port, with a fake publisher."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proto import rollout_pb2 as rpb
from trainer import batch, gap, testbed
from trainer.config import GuardsConfig, LossConfig, RlConfig, RlOptimConfig, TrainerConfig
from trainer.device import Device
from trainer.errors import BadRequestError, StageConflictError
from trainer.stage_runner import StageRequest, StageRunner
from trainer.testbed import VOCAB, ManagerThread, record, with_experts

BANNED = (0, 1, 3)
TEMPERATURE = 0.8


@pytest.fixture
def manager() -> Iterator[ManagerThread]:
    thread = ManagerThread()
    yield thread
    thread.close()


def make_runner(
    tmp_path: Path, model: Path, device: Device, manager: ManagerThread, **rl: Any
) -> StageRunner:
    settings: dict[str, Any] = {
        "optim": RlOptimConfig(lr=3e-3, warmup_steps=0),
        "groups_per_step": 1,
        "batch_wait_s": 0.2,
        # Random weights know nothing, and these steps are rough.
        "guards": GuardsConfig(action="warn"),
    }
    config = TrainerConfig(
        model_dir=model,
        run_dir=tmp_path / "run",
        manager_address=manager.address,
        rl=RlConfig(**(settings | rl)),
    )
    return StageRunner(config, device, manager.link)


def sampled(runner: StageRunner, name: str, answer: int, reward: float, version: int) -> Any:
    """A trajectory with the log-probs that the runner's weights give it."""
    ids, mask = [6, 8, 9, answer, answer], [0, 0, 0, 1, 1]
    fields: dict[str, Any] = {
        "attempt_id": name,
        "version": version,
        "reward": reward,
        "banned": BANNED,
        "temperature": TEMPERATURE,
    }
    draft = batch.from_proto(record(ids, mask, logprobs=[0.0] * 5, **fields), VOCAB)
    micros = batch.make_micro_batches([draft], 100, VOCAB, torch.device("cpu"))
    logprobs = runner.learner.logprobs(micros)[0].tolist()
    return record(ids, mask, logprobs=[0, 0, 0, *logprobs], **fields)


def group(runner: StageRunner, step: int, version: int) -> dict[str, list[Any]]:
    good = sampled(runner, f"good{step}", 7, 1.0, version)
    bad = sampled(runner, f"bad{step}", 10, 0.0, version)
    return {f"g{step}": [good, bad]}


def run_until(runner: StageRunner, done: Callable[[], bool], save_checkpoint: bool = False) -> None:
    """Runs the main loop here until `done`, watched by a thread that then stops it."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while not done() and time.monotonic() < deadline:
            time.sleep(0.005)
        runner.stop(save_checkpoint)

    watcher = threading.Thread(target=watch)
    watcher.start()
    runner.run()
    watcher.join()
    assert done()


def run_rl(runner: StageRunner, num_steps: int) -> None:
    runner.run_stage(StageRequest("rl", "rl", "", num_steps))
    run_until(runner, lambda: runner.status().state in {"finished", "failed"})
    assert runner.status().state == "finished", runner.status().error


def test_weights_are_published_though_no_further_batch_is_ready(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    manager.manager.add_batch(group(runner, 1, version=1))
    runner.run_stage(StageRequest("rl", "rl", "", 2))
    run_until(runner, lambda: len(manager.manager.asked) >= 2)
    assert manager.publisher.versions == [1, 2]
    assert [request.weight_version for request in manager.manager.asked[:2]] == [1, 2]


@pytest.mark.parametrize("recompute", [False, True], ids=["old_from_update", "old_recomputed"])
def test_steps_train_publish_and_acknowledge(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread, recompute: bool
) -> None:
    manager.manager.max_weight_version = 4
    runner = make_runner(tmp_path, model_dir, device, manager, recompute_old_logprobs=recompute)
    manager.manager.add_batch(group(runner, 1, version=5))
    manager.manager.add_batch(group(runner, 2, version=5))
    first_token = manager.manager.replies[1].first_tokens.add(weight_version=6)
    first_token.sampled_at.FromNanoseconds(int((time.time() + 1000.0) * 1e9))
    manager.manager.replies[1].first_tokens.add(weight_version=5)  # no update's
    manager.manager.num_refusals = 1
    before = runner.learner.logprobs(
        batch.make_micro_batches(
            [batch.from_proto(manager.manager.sequences["good1"][0], VOCAB)],
            100,
            VOCAB,
            torch.device("cpu"),
        )
    )[0]
    run_rl(runner, 2)
    assert [r.step for r in manager.manager.rewound] == [0]
    assert manager.publisher.versions == [5, 6, 7]
    assert not torch.equal(manager.publisher.norms[0], manager.publisher.norms[1])
    assert [(a.batch_id, a.step, a.weight_version) for a in manager.manager.acked] == [
        ("batch0", 1, 5),
        ("batch1", 2, 6),
    ]
    first, second = runner.metrics.since("rl", 1)
    assert (first.weight_version, second.weight_version) == (6, 7)
    assert (first.staleness_histogram, second.staleness_histogram) == ({0: 2}, {1: 2})
    # Same weights on both sides, then one update apart.
    assert first.scalars["gap_engine_max_nats"] <= 1e-6
    assert first.scalars["ess_token_raw_rollout_to_trainer"] == pytest.approx(1.0)
    assert second.scalars["gap_total_mean_nats"] > 1e-3
    assert "gap_engine_mean_nats" not in second.scalars
    assert "publish_to_first_token_s" not in first.scalars
    assert 900.0 < second.scalars["publish_to_first_token_s"] <= 1000.0
    parts = [v for k, v in first.scalars.items() if k.startswith("time_") and k != "time_step_s"]
    assert sum(parts) == pytest.approx(first.scalars["time_step_s"])
    assert {f"time_{part}_s" for part in ("wait", "logprob", "update", "publish")} <= (
        first.scalars.keys()
    )
    assert first.scalars["num_tokens"] == 10
    assert first.scalars["tokens_per_s"] == pytest.approx(10 / first.scalars["time_step_s"])
    assert first.scalars["mfu_update_estimate"] > first.scalars["mfu_step_estimate"] > 0
    after = runner.learner.logprobs(
        batch.make_micro_batches(
            [batch.from_proto(manager.manager.sequences["good1"][0], VOCAB)],
            100,
            VOCAB,
            torch.device("cpu"),
        )
    )[0]
    assert bool((after > before).all())
    assert runner.status().finished_stages == ("rl",)
    assert manager.manager.checkpoints[-1].step == 2


def test_old_logprobs_from_the_update_change_nothing(
    tmp_path: Path, model_dir: Path, device: Device
) -> None:
    results = []
    for recompute in (False, True):
        thread = ManagerThread()
        try:
            runner = make_runner(
                tmp_path / str(recompute),
                model_dir,
                device,
                thread,
                recompute_old_logprobs=recompute,
            )
            thread.manager.add_batch(group(runner, 1, version=1))
            run_rl(runner, 1)
            results.append(runner.metrics.since("rl", 1)[0].scalars)
        finally:
            thread.close()
    for name in ("loss", "grad_norm", "gap_total_mean_nats"):
        assert results[0][name] == results[1][name]


def test_a_batch_without_signal_is_acknowledged_and_not_published(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    manager.manager.add_batch(
        {"g": [sampled(runner, "a", 7, 1.0, 1), sampled(runner, "b", 10, 1.0, 1)]}
    )
    run_rl(runner, 1)
    assert manager.publisher.versions == [1]
    assert dict(manager.manager.acked[0].dropped_groups) == {"g": "zero_variance"}
    assert runner.metrics.since("rl", 1)[0].scalars["step_skipped"] == 1.0


def test_an_engine_that_waits_for_weights_is_served_at_once(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    manager.manager.replies.append(rpb.NextBatchReply(republish_requested=True))
    manager.manager.add_batch(group(runner, 1, version=1))
    run_rl(runner, 1)
    assert manager.publisher.versions == [1, 2, 3]
    assert torch.equal(manager.publisher.norms[0], manager.publisher.norms[1])
    assert [r.weight_version for r in manager.manager.asked] == [1, 2]


def test_requests_are_served_while_it_waits_and_stop_gives_up_the_wait(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    manager.manager.sequences["good"] = [sampled(runner, "good", 7, 1.0, 1)]
    runner.run_stage(StageRequest("rl", "rl", "", 5))
    answers: list[Any] = []

    def ask() -> None:
        while not manager.manager.asked:
            time.sleep(0.005)
        answers.append(runner.submit(runner.save).result(timeout=30))
        answers.append(runner.submit(lambda: runner.measure_gap(["good"], 0)).result(timeout=30))
        runner.stop(save_checkpoint=False)

    thread = threading.Thread(target=ask)
    thread.start()
    runner.run()
    thread.join()
    assert answers[0].is_dir()
    assert isinstance(answers[1], gap.Gap)
    assert answers[1].num_tokens == 2
    assert answers[1].max_abs_nats <= 1e-6
    assert runner.status().state == "idle"


def test_a_restarted_trainer_rewinds_and_publishes_a_higher_version(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    manager.manager.add_batch(group(runner, 1, version=1))
    runner.run_stage(StageRequest("rl", "rl", "", 2))
    run_until(runner, lambda: runner.status().step == 1)
    runner.save()
    manager.manager.max_weight_version = 9
    again = make_runner(tmp_path, model_dir, device, manager)
    manager.manager.add_batch(group(again, 2, version=10))
    assert again.run_stage(StageRequest("rl", "rl", "", 2)) == 1
    run_until(again, lambda: again.status().state == "finished")
    assert [r.step for r in manager.manager.rewound] == [0, 1]
    assert manager.publisher.versions == [1, 2, 10, 11]
    assert torch.equal(manager.publisher.norms[1], manager.publisher.norms[2])
    assert [r.step for r in again.metrics.since("rl", 1)] == [1, 2]
    assert len({r.lineage_token for r in manager.manager.rewound}) == 2


def test_an_update_whose_batch_was_not_acknowledged_is_not_saved(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    """Else the batch, which comes again, would be trained on top of itself."""
    runner = make_runner(tmp_path, model_dir, device, manager)
    manager.manager.add_batch(group(runner, 1, version=1))
    manager.manager.refuses_acks = True
    runner.run_stage(StageRequest("rl", "rl", "", 5))
    # The step's own publication, after the stage's first.
    run_until(runner, lambda: len(manager.publisher.versions) == 2, save_checkpoint=True)
    assert runner.status().step == 0
    again = make_runner(tmp_path, model_dir, device, manager)
    assert again.run_stage(StageRequest("rl", "rl", "", 5)) == 0
    again.stop(save_checkpoint=False)
    manager.manager.refuses_acks = False
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def test_steps_that_are_done_are_saved_at_the_end(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    manager.manager.add_batch(group(runner, 1, version=1))
    runner.run_stage(StageRequest("rl", "rl", "", 5))
    run_until(runner, lambda: runner.status().step == 1, save_checkpoint=True)
    again = make_runner(tmp_path, model_dir, device, manager)
    assert again.run_stage(StageRequest("rl", "rl", "", 5)) == 1


def test_a_group_that_cannot_be_read_back_is_dropped_and_the_others_are_trained(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    manager.manager.add_batch(group(runner, 1, version=1) | group(runner, 2, version=1))
    manager.manager.corrupt = {"bad2"}
    run_rl(runner, 1)
    assert dict(manager.manager.acked[0].dropped_groups) == {"g2": "corrupt_record"}
    assert [t.attempt_id for t in manager.manager.acked[0].trajectories] == ["good1", "bad1"]
    scalars = runner.metrics.since("rl", 1)[0].scalars
    assert (scalars["num_groups"], scalars["num_groups_dropped"]) == (1.0, 1.0)
    assert scalars["num_trajectories"] == 2.0


def test_weights_published_before_the_stage_are_not_sent_again(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    manager.manager.max_weight_version = 2
    runner = make_runner(tmp_path, model_dir, device, manager)
    assert runner.publish().weight_version == 3
    manager.manager.add_batch(group(runner, 1, version=3))
    run_rl(runner, 1)
    assert manager.publisher.versions == [3, 4]
    assert len(manager.manager.rewound) == 1


def test_a_lost_publication_does_not_end_the_stage(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    manager.publisher.num_failures = 1
    manager.manager.replies.append(rpb.NextBatchReply(republish_requested=True))
    manager.manager.add_batch(group(runner, 1, version=1))
    run_rl(runner, 1)
    assert manager.publisher.versions == [1, 2, 3]
    assert runner.metrics.since("rl", 1)[0].weight_version == 3


def test_an_asked_publication_is_tried_again(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    manager.publisher.num_failures = 1
    assert runner.publish().weight_version == 2


def test_gap_names_the_worst_token(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    good = sampled(runner, "good", 7, 1.0, 3)
    logprobs = np.frombuffer(good.rollout_logprobs, "<f4").copy()
    logprobs[4] += 0.25
    good.rollout_logprobs = logprobs.tobytes()
    sequences = [batch.from_proto(good, VOCAB)]
    got = gap.measure(runner.learner, sequences, 3, 1000)
    assert (got.num_tokens, got.worst["attempt_id"], got.worst["position"]) == (2, "good", 4.0)
    assert got.max_abs_nats == pytest.approx(0.25, abs=1e-5)
    assert gap.measure(runner.learner, sequences, 2, 1000).num_tokens == 0


def test_recompute_only_is_refused_for_stale_data() -> None:
    with pytest.raises(ValueError, match="wrong for stale data"):
        RlConfig(loss=LossConfig(objective="recompute_only"))


def test_replay_trains_what_has_experts_and_counts_what_has_none(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager, routing_replay=True)
    choice = np.broadcast_to([0, 3], (4, 2, 2))
    ((good, bad),) = group(runner, 1, version=1).values()
    bare = sampled(runner, "bare", 11, 0.0, 1)
    manager.manager.add_batch({"g": [with_experts(good, choice), with_experts(bad, choice), bare]})
    replayed = batch.from_proto(with_experts(good, choice), VOCAB)
    micros = batch.make_micro_batches([replayed], 100, VOCAB, torch.device("cpu"))
    gap_nats = (runner.learner.logprobs(micros)[0] - micros[0].rollout).abs()
    run_rl(runner, 1)
    (record_,) = runner.metrics.since("rl", 1)
    assert record_.scalars["num_trajectories_rejected_no_routed_experts"] == 1
    assert record_.scalars["num_trajectories"] == 2
    # Recorded log-probs are those of the router's own choice, so replaying another one shows.
    assert record_.scalars["gap_total_max_nats"] >= float(gap_nats.max()) - 1e-5 > 1e-3


def test_replay_of_a_model_without_experts_is_refused(
    tmp_path: Path, device: Device, manager: ManagerThread
) -> None:
    dense = testbed.write_model(tmp_path / "dense", **testbed.FAMILIES["qwen3"])
    with pytest.raises(BadRequestError, match="has no experts; turn it off"):
        make_runner(tmp_path, dense, device, manager, routing_replay=True)


@pytest.mark.parametrize("fault", ["vocabulary", "banned", "loss_mask"])
def test_a_record_that_breaks_the_contract_costs_its_trajectory_only(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread, fault: str
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    batch_groups = group(runner, 1, version=1)
    (good, bad) = batch_groups["g1"]
    broken = type(bad)()
    broken.CopyFrom(bad)
    if fault == "vocabulary":
        broken.token_ids = np.asarray([6, 8, 9, 10, VOCAB], "<i4").tobytes()
    elif fault == "banned":
        broken.sampling.banned_token_ids.append(VOCAB)
    else:
        broken.loss_mask = b"\x01"
    manager.manager.add_batch({"g1": [good, bad]})
    manager.manager.sequences[bad.attempt_id] = [broken]
    run_rl(runner, 1)
    (step,) = runner.metrics.since("rl", 1)
    assert step.scalars["num_trajectories_rejected_malformed"] == 1
    assert step.scalars["num_trajectories"] == 1
    (ack,) = manager.manager.acked
    told = {t.attempt_id: t.untrained_reason for t in ack.trajectories}
    assert told == {good.attempt_id: "", bad.attempt_id: "malformed"}


def test_a_failed_stage_tells_why_and_weights_of_its_unfinished_step_go_nowhere(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    manager.manager.add_batch(group(runner, 1, version=1))
    manager.manager.refuses_acks = True
    runner.run_stage(StageRequest("rl", "rl", "", 1))
    run_until(runner, lambda: runner.status().state == "failed", save_checkpoint=True)
    assert "going down" in runner.status().error
    ways = (runner.save, lambda: runner.export(tmp_path / "out"), runner.publish)
    for way in (*ways, lambda: runner.measure_gap(["good1"], 0)):
        with pytest.raises(StageConflictError, match="was not finished"):
            way()
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_an_export_replaces_a_model_folder_only(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.md").write_text("mine")
    for taken in (tmp_path / "file", tmp_path / "notes"):
        with pytest.raises(BadRequestError, match="is no folder of a model"):
            runner.export(taken)
    for own in (tmp_path / "run", tmp_path, model_dir):
        with pytest.raises(BadRequestError, match="would replace"):
            runner.export(own)
    assert (tmp_path / "file").read_text() == "mine"
    for _ in range(2):
        runner.export(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["", "../out", "a/b", ".hidden", "x" * 101])
def test_a_stage_name_is_a_file_name(
    tmp_path: Path, model_dir: Path, device: Device, manager: ManagerThread, name: str
) -> None:
    runner = make_runner(tmp_path, model_dir, device, manager)
    with pytest.raises(BadRequestError, match="files are named after it"):
        runner.run_stage(StageRequest("rl", name, "", 1))
