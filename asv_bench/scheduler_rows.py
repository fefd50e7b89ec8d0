"""The row of the side-by-side table about vLLM's own scheduler, and its floor.

Stores nothing. As in pool_rows.py. More about it in vllm_scheduler.py, a script that
also compares what both sides schedule.
"""

from __future__ import annotations

from functools import partial

from measure import Row, TimeRow
from vllm_scheduler import PROMPT, RUNNING, decoding

NOTES = (
    f"Scheduler: vLLM's own, with the plugin and without; nanoseconds a request of a"
    f" step that schedules a token for each of {RUNNING} of some {PROMPT:,} tokens."
)


def scheduler_rows() -> list[Row]:
    return [
        TimeRow(
            f"scheduler: schedule(), {RUNNING} decoding",
            2.2,
            partial(decoding, True),
            partial(decoding, False),
        )
    ]
