"""Prefix-cache statistics, counted as vLLM 0.33 reports them.

Stores: sums since they were last taken. A request counts once for each admission;
those that ran before and were preempted count apart, because they hit what they had
computed themselves. Threads: as the manager that owns it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PrefixCacheStats:
    """Sums over admissions; `queries` and `hits` are in tokens.

    Attributes:
        requests: Admissions of requests that never ran before.
        queries: Tokens that they looked up.
        hits: Of these, tokens that were cached.
        preempted_requests: Admissions of requests that were preempted before.
        preempted_queries: Tokens that they looked up.
        preempted_hits: Of these, tokens that were cached.
        reset: Whether the cache was reset.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    reset: bool = False

    @property
    def hit_rate(self) -> float:
        """Share of the looked-up tokens that were cached, preempted requests apart."""
        return self.hits / self.queries if self.queries else 0.0
