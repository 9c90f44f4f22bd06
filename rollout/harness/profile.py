"""Agent profiles made ready: templates loaded and compiled once.

Owner: the worker. Rendering a template that is compiled for each use is what costs most CPU
in mini-swe-agent's loop.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml
from jinja2 import StrictUndefined, Template

from rollout.harness.config import ProfileConfig

_MINI_CONFIG = "mini_textbased.yaml"


@lru_cache(maxsize=256)
def compiled(template: str) -> Template:
    """The template, compiled; undefined names are errors, as in mini-swe-agent."""
    return Template(template, undefined=StrictUndefined)


class Profile:
    """What an agent run needs of its profile."""

    def __init__(self, name: str, config: ProfileConfig) -> None:
        self.name, self.config = name, config
        if config.templates == "mini":
            shipped = _mini_templates()
            self.system_template: str = shipped["agent"]["system_template"]
            self.instance_template: str = shipped["agent"]["instance_template"]
            self.observation_template: str = shipped["model"]["observation_template"]
            self.format_error_template: str = shipped["model"]["format_error_template"]
        else:
            self.system_template = config.system_template
            self.instance_template = config.instance_template
            self.observation_template = config.observation_template
            self.format_error_template = config.format_error_template
        self._action = re.compile(config.action_regex, re.DOTALL)

    def actions(self, answer: str) -> list[str]:
        """Commands in an answer, exactly as they were sampled."""
        return self._action.findall(answer)

    def observation(self, output: dict[str, Any]) -> str:
        """The message that shows a command's output to the agent."""
        text = compiled(self.observation_template).render(output=output)
        cap = self.config.observation_cap_chars
        if cap:
            text = text[:cap].strip()
        return text or self.config.empty_observation

    def format_error(self, actions: list[str], finish_reason: str) -> str:
        """The message that answers an answer without exactly one action."""
        error = f"Expected exactly 1 action, found {len(actions)}."
        return compiled(self.format_error_template).render(
            actions=actions, error=error, finish_reason=finish_reason
        )


@lru_cache(maxsize=1)
def _mini_templates() -> dict[str, Any]:
    text = resources.files("minisweagent.config").joinpath(_MINI_CONFIG).read_text("utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded
