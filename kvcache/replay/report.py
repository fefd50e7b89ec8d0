"""What a replay gives: one record a pool, as a table, JSON or a plot.

Holds plain numbers. Invariant: the JSON holds only what the trace and the pool
sizes determine, so it is the same on every machine; times are in the table
alone. Costs: matplotlib is imported only to plot.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import NamedTuple, TypedDict

JSON_FIELDS = (
    "num_blocks",
    "requests",
    "skipped",
    "prompt_tokens",
    "hit_tokens",
    "hit_rate",
    "new_blocks",
    "evictions",
    "cached_blocks",
    "assignment_sha256",
)
CONCURRENT_FIELDS = (
    *JSON_FIELDS,
    "steps",
    "preemptions",
    "recomputed_tokens",
    "peak_blocks",
    "mean_running",
    "max_running",
)


class Totals(TypedDict):
    """What one pool did.

    Attributes:
        num_blocks: Size of the pool, null block included.
        requests: Requests of the trace.
        skipped: Requests that did not fit into the pool.
        prompt_tokens: Prompt tokens of the requests that ran.
        hit_tokens: Those of them found in the cache.
        hit_rate: `hit_tokens / prompt_tokens`, rounded to 6 places.
        new_blocks: Blocks handed out.
        evictions: Blocks that lost their hash to a new allocation.
        cached_blocks: Distinct hashes in the cache at the end.
        assignment_sha256: Digest of every block id handed out; of no meaning
            unless the replay recorded the assignment.
        seconds: Time spent in the pool.
        blocks: Blocks that this time was spent on.
    """

    num_blocks: int
    requests: int
    skipped: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    new_blocks: int
    evictions: int
    cached_blocks: int
    assignment_sha256: str
    seconds: float
    blocks: int


class Run(Totals, total=False):
    """What one pool did; with several requests in flight, this too.

    There `prompt_tokens` and `hit_tokens` count first admissions alone, and
    `assignment_sha256` has a line each time that a request gives its blocks back.

    Attributes:
        steps: Steps in which anything ran.
        preemptions: How often a request had to give its blocks back and wait.
        recomputed_tokens: Tokens that were computed again after that.
        peak_blocks: Most blocks in use at a time.
        mean_running: Requests that ran in a step, on average, rounded to 6 places.
        max_running: Most requests that ran in a step.
    """

    steps: int
    preemptions: int
    recomputed_tokens: int
    peak_blocks: int
    mean_running: float
    max_running: int


class Report(NamedTuple):
    """A replay's outcome.

    Attributes:
        trace: File name of the trace, None if it was generated.
        block_size: Tokens a block.
        runs: One record a pool, in the order in which the sizes were given.
        concurrency: Most requests in flight, None if they ran one at a time.
        step_ms: What a step added to the clock, None likewise.
    """

    trace: str | None
    block_size: int
    runs: list[Run]
    concurrency: int | None = None
    step_ms: int | None = None

    def to_json(self) -> str:
        """Return the report as a JSON object, times left out."""
        records: list[dict[str, object]] = [dict(run) for run in self.runs]
        fields: tuple[str, ...] = JSON_FIELDS
        given: dict[str, object] = {"trace": self.trace, "block_size": self.block_size}
        if self.concurrency is not None:
            fields = CONCURRENT_FIELDS
            given.update(concurrency=self.concurrency, step_ms=self.step_ms)
        runs = [{name: record[name] for name in fields} for record in records]
        return json.dumps({**given, "runs": runs}, indent=1)

    def to_table(self) -> str:
        """Return the report as text: a title and one line a pool."""
        columns = _COLUMNS if self.concurrency is None else _CONCURRENT_COLUMNS
        rows = [tuple(columns)]
        rows += [tuple(show(run) for show in columns.values()) for run in self.runs]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        requests = self.runs[0]["requests"] if self.runs else 0
        title = f"{self.title()}: {requests} requests, {self.block_size} tokens a block"
        if self.concurrency is not None:
            title += f", {self.concurrency} in flight, {self.step_ms} ms a step"
        return "\n".join([title, *lines])

    def title(self) -> str:
        """Return what was replayed."""
        return self.trace or "generated chat"


def _cost(run: Run) -> str:
    cost = run["seconds"] * 1e9 / run["blocks"] if run["blocks"] else 0.0
    return f"{cost:.1f}"


_SHARED_COLUMNS: dict[str, Callable[[Run], str]] = {
    "blocks": lambda run: str(run["num_blocks"]),
    "hit rate": lambda run: f"{run['hit_rate']:.2%}",
    "hit tokens": lambda run: str(run["hit_tokens"]),
    "evictions": lambda run: str(run["evictions"]),
    "skipped": lambda run: str(run["skipped"]),
}
_COLUMNS = {**_SHARED_COLUMNS, "ns/block": _cost}
_CONCURRENT_COLUMNS: dict[str, Callable[[Run], str]] = {
    **_SHARED_COLUMNS,
    "peak blocks": lambda run: str(run["peak_blocks"]),
    "preemptions": lambda run: str(run["preemptions"]),
    "recomputed": lambda run: str(run["recomputed_tokens"]),
    "steps": lambda run: str(run["steps"]),
    "running, mean": lambda run: f"{run['mean_running']:.1f}",
    "max": lambda run: str(run["max_running"]),
}


def prepare_plot(path: str) -> Callable[[Report], None]:
    """Return a function that draws hit rate over pool size into a file.

    Whatever can be known to be missing is reported here, before the replay.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: There is no such folder.
        ValueError: The path's suffix names no format that matplotlib writes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    formats = FigureCanvasAgg(figure).get_supported_filetypes()
    suffix = os.path.splitext(path)[1].lower().lstrip(".")
    if suffix not in formats:
        raise ValueError(f"{path}: no image format; use one of {', '.join(formats)}")
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{path}: there is no folder {folder}")

    def draw(report: Report) -> None:
        runs = sorted(report.runs, key=lambda run: run["num_blocks"])
        axes = figure.add_subplot(
            title=report.title(),
            xlabel=f"pool size (blocks of {report.block_size} tokens)",
            ylabel="hit rate",
            xscale="log",
        )
        axes.plot(
            [run["num_blocks"] for run in runs],
            [run["hit_rate"] for run in runs],
            marker="o",
        )
        axes.set_ylim(0, 1)
        axes.grid(True)
        figure.savefig(path)

    return draw
