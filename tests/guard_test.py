"""A guard that trips in a real run: it pauses, ends at its deadline, and goes on with a wider band."""

from __future__ import annotations

import json

from tests.command import run_root, swe_rl

_TIMEOUT_S = 600


def test_a_tripped_guard_ends_an_unattended_run_which_resumes_with_a_wider_band(tmp_path):
    outcome = swe_rl(
        tmp_path,
        "@",
        "smoke",
        "--trainer.rl.guards.max_grad_norm=1e-6",
        "--trainer.rl.guards.patience_steps=2",
        "--run.max_pause_s=3",
        timeout_s=_TIMEOUT_S,
    )
    assert outcome.code == 3, outcome.out[-3000:] + outcome.err[-3000:]
    assert outcome.left == {}
    assert "the run is paused: grad_norm is " in outcome.out
    (line,) = outcome.err.strip().splitlines()
    assert line.startswith("error: the run was paused for longer than run.max_pause_s = 3 s")
    assert "trainer.rl.guards.max_grad_norm = 1e-06 (step 2, for 2 steps in a row)" in line
    assert "--trainer.rl.guards.BAND=VALUE" in line
    root = run_root(tmp_path)
    steps = [json.loads(text) for text in (root / "metrics" / "rl.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert [step.get("guard_tripped") for step in steps] == [None, 1.0]
    assert any(path.name.endswith("-rl-2") for path in (root / "checkpoints").iterdir())

    wider = "--trainer.rl.guards.max_grad_norm=off"
    outcome = swe_rl(tmp_path, "resume", wider, timeout_s=_TIMEOUT_S)
    assert outcome.code == 0, outcome.out[-3000:] + outcome.err[-3000:]
    assert outcome.left == {}
    outcome = swe_rl(tmp_path, "replay", timeout_s=_TIMEOUT_S)
    assert outcome.code == 0, outcome.out + outcome.err
    assert "3 steps" in outcome.out and "equal bit for bit" in outcome.out
