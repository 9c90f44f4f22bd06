"""Types of the native scheduler; kv_scheduler.h states its behaviour."""

from typing import TypedDict

class EngineStats(TypedDict):
    token_budget: int
    tokens_reserved: int
    tokens_running: int
    tokens_resident: int
    num_running: int

class Stats(TypedDict):
    queued: int
    running: int
    paused: bool
    engines: dict[str, EngineStats]

class Admission:
    @property
    def ticket_id(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def queued_s(self) -> float: ...

class KvScheduler:
    def __init__(
        self, high_watermark: float, ageing_s: float, hard_context_cap: int, growth_tokens: int
    ) -> None: ...
    def add_engine(self, engine: str, token_budget: int) -> None: ...
    def remove_engine(self, engine: str) -> list[str]: ...
    def submit(
        self,
        ticket_id: str,
        session: str,
        prompt_tokens: int,
        max_new_tokens: int,
        priority: int,
        now_s: float,
    ) -> None: ...
    def poll(self, now_s: float) -> list[Admission]: ...
    def finish(self, ticket_id: str, resident_tokens: int, now_s: float) -> bool: ...
    def cancel(self, ticket_id: str) -> bool: ...
    def end_session(self, session: str) -> None: ...
    def set_paused(self, paused: bool) -> None: ...
    def stats(self) -> Stats: ...
