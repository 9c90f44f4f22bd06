"""Reading validation reports: which tasks are quarantined, and why.

Owner: rollout/tasks; written by validate.py, respected when an index is built.
"""

from __future__ import annotations

import json
from pathlib import Path

from rollout.tasks.harbor_task import TaskError


def read_quarantine(report: Path) -> dict[str, str]:
    """Reason by task_id of every task that `report` did not find valid. Raises TaskError."""
    try:
        rows = json.loads(report.read_text("utf-8"))["tasks"]
        return {row["task_id"]: row["reason"] for row in rows if not row["valid"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskError(f"validation report {report} cannot be read: {error!r}") from error
