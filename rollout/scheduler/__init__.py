"""The scheduler of model calls; see kv_scheduler.h for its invariants."""

from rollout.scheduler._kv_scheduler import Admission, KvScheduler

__all__ = ["Admission", "KvScheduler"]
