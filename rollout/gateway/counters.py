"""What a gateway counted, for /counters (JSON) and /metrics (Prometheus).

Owner: the gateway. A call is counted where it crosses a boundary, so that the figures can be
compared with the manager's, the engines' and the harness's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.gateway.refusal import Reason

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Counters:
    """Plain integers; one event loop writes them."""

    def __init__(self) -> None:
        self.num_requests = 0  # model calls received
        self.num_answered = 0  # answers that were written to their client
        self.num_generate_calls = 0  # engine calls that came back
        self.num_sampled_tokens = 0  # ids that engines returned
        self.num_replayed = 0  # resent requests answered from the durable turn
        self.num_branches = 0  # turns that did not extend the newest one
        self.num_client_left = 0  # clients gone before their answer
        self.refused: Counter[Reason] = Counter()
        self.engine_losses: Counter[str] = Counter()
        self.registry = CollectorRegistry()
        self.registry.register(_Families(self))
        self._seconds = Histogram(
            "swe_rl_gateway_turn_seconds",
            "Time of durable turns by part",
            ["part"],
            buckets=_BUCKETS,
            registry=self.registry,
        )

    def refuse(self, reason: Reason) -> None:
        self.refused[reason] += 1

    def lose_engine(self, engine: str) -> None:
        """An engine died under a call, or answered with nonsense."""
        self.engine_losses[engine] += 1

    def observe_turn(self, queued_s: float, generating_s: float) -> None:
        self._seconds.labels("queued").observe(queued_s)
        self._seconds.labels("generating").observe(generating_s)

    def as_dict(self) -> dict[str, Any]:
        """The /counters document."""
        return {
            **self.totals(),
            "num_refused": {reason.value: self.refused[reason] for reason in Reason},
            "num_engine_losses": dict(self.engine_losses),
        }

    def totals(self) -> dict[str, int]:
        """Counters without labels."""
        return {
            "num_requests": self.num_requests,
            "num_answered": self.num_answered,
            "num_generate_calls": self.num_generate_calls,
            "num_sampled_tokens": self.num_sampled_tokens,
            "num_replayed": self.num_replayed,
            "num_branches": self.num_branches,
            "num_client_left": self.num_client_left,
        }


class _Families(Collector):
    """Shows the integers to Prometheus at each scrape."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for name, value in self._counters.totals().items():
            short = name.removeprefix("num_")
            yield CounterMetricFamily(f"swe_rl_gateway_{short}", short, value=value)
        refused = CounterMetricFamily("swe_rl_gateway_refused", "by reason", labels=["reason"])
        for reason in Reason:
            refused.add_metric([reason.value], self._counters.refused[reason])
        yield refused
        lost = CounterMetricFamily("swe_rl_gateway_engine_losses", "by engine", labels=["engine"])
        for engine, count in self._counters.engine_losses.items():
            lost.add_metric([engine], count)
        yield lost
