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


class Run(TypedDict):
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


class Report(NamedTuple):
    """A replay's outcome.

    Attributes:
        trace: File name of the trace, None if it was generated.
        block_size: Tokens a block.
        runs: One record a pool, in the order in which the sizes were given.
    """

    trace: str | None
    block_size: int
    runs: list[Run]

    def to_json(self) -> str:
        """Return the report as a JSON object, times left out."""
        records: list[dict[str, object]] = [dict(run) for run in self.runs]
        runs = [{name: record[name] for name in JSON_FIELDS} for record in records]
        return json.dumps({**self._asdict(), "runs": runs}, indent=1)

    def to_table(self) -> str:
        """Return the report as text: a title and one line a pool."""
        header = ("blocks", "hit rate", "hit tokens", "evictions", "skipped")
        rows = [(*header, "ns/block")]
        for run in self.runs:
            cost = run["seconds"] * 1e9 / run["blocks"] if run["blocks"] else 0.0
            rows.append(
                (
                    str(run["num_blocks"]),
                    f"{run['hit_rate']:.2%}",
                    str(run["hit_tokens"]),
                    str(run["evictions"]),
                    str(run["skipped"]),
                    f"{cost:.1f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        requests = self.runs[0]["requests"] if self.runs else 0
        title = f"{self.title()}: {requests} requests, {self.block_size} tokens a block"
        return "\n".join([title, *lines])

    def title(self) -> str:
        """Return what was replayed."""
        return self.trace or "generated chat"


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
