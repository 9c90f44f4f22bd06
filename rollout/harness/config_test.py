"""Configuration: defaults, refusals, and that it needs pydantic only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollout.harness.config import HarnessConfig, ProfileConfig
from rollout.harness.profile import Profile

NEEDED: dict[str, Any] = {
    "manager_address": "127.0.0.1:1",
    "broker_address": "127.0.0.1:2",
    "gateway_urls": ["http://127.0.0.1:3/"],
    "trials_dir": Path("/tmp/trials"),
}


def test_survives_json() -> None:
    config = HarnessConfig(**NEEDED)
    assert HarnessConfig.model_validate_json(config.model_dump_json()) == config
    assert config.gateway_urls == ["http://127.0.0.1:3"]
    assert set(config.profiles) == {"toy", "mini"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"default_profile": "none"}, "not among the profiles"),
        ({"gateway_urls": ["127.0.0.1:3"]}, "want http"),
        ({"gateway_urls": []}, "at least 1"),
        ({"profiles": {"toy": {"action_regex": "(a)(b)"}}}, "exactly one"),
        ({"unknown": 1}, "Extra inputs"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HarnessConfig(**{**NEEDED, **change})


def test_imports_pydantic_only() -> None:
    code = "import sys, rollout.harness.config; print(*[m for m in ('harbor','grpc','minisweagent','jinja2') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_toy_commands_are_kept_as_sampled() -> None:
    profile = Profile("toy", HarnessConfig(**NEEDED).profiles["toy"])
    for answer in ("", " ls \n", "a\nb", "```bash\nls\n```"):
        assert profile.actions(answer) == [answer]


@pytest.mark.parametrize(
    ("output", "want"), [("", "ok"), (" \n", "ok"), ("x" * 99, "x" * 60), (" a \n", "a")]
)
def test_toy_observation(output: str, want: str) -> None:
    profile = Profile("toy", HarnessConfig(**NEEDED).profiles["toy"])
    assert profile.observation({"output": output, "returncode": 0, "exception_info": ""}) == want


def test_mini_profile_has_minis_templates() -> None:
    profile = Profile("mini", HarnessConfig(**NEEDED).profiles["mini"])
    assert "mswea_bash_command" in profile.system_template
    assert profile.actions("x\n```mswea_bash_command\nls -la\n```\n") == ["ls -la"]
    shown = profile.observation({"output": "y" * 20000, "returncode": 1, "exception_info": ""})
    assert "10000 characters elided" in shown and "<returncode>1</returncode>" in shown


def test_profile_is_frozen() -> None:
    with pytest.raises(ValidationError):
        ProfileConfig().loop_limit = 3  # type: ignore[misc]
