"""Draws what the benchmarks measured: ratios a row, and cost over the size of a pool.

Stores nothing. matplotlib is imported only where something is drawn.
"""

from __future__ import annotations

from argparse import ArgumentParser
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from measure import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.19  # inches
COLOURS = {True: "#1b7837", False: "#c51b26", None: "#4575b4"}
MEANING = {
    True: "its floor is reached",
    False: "its floor is not reached",
    None: "it has no floor",
}


def add_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw them, SVG or PNG"
    )


def check(path: Path | None, parser: ArgumentParser) -> None:
    """End now, not once all is measured, where a plot could not be written."""
    if path is None:
        return
    try:
        formats = new_figure(1, 1).canvas.get_supported_filetypes()
    except ImportError as error:
        parser.error(f"--plot needs matplotlib ({error}): pip install 'kvcache[bench]'")
    if path.suffix.lower().lstrip(".") not in formats:
        parser.error(f"--plot {path}: no image format; there are {', '.join(formats)}")
    if not path.parent.is_dir():
        parser.error(f"--plot {path}: there is no folder {path.parent}")


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def ratios(results: list[Result], machine: dict[str, Any], path: Path) -> None:
    """A line a row that has a ratio: the ratio, its spread and its floor."""
    sections = [
        (against, [result for result in group if result.ratio])
        for against, group in groupby(results, lambda result: result.against)
    ]
    sections = [(against, rows) for against, rows in sections if rows]
    lines = sum(len(rows) + 1 for _, rows in sections)
    figure = new_figure(11, ROW * lines + 1.6)
    axes = figure.add_subplot(xscale="log")
    place, labels = 0, []
    for against, rows in sections:
        axes.text(
            0.004,
            place,
            f"against {against}",
            transform=axes.get_yaxis_transform(),
            va="center",
            weight="bold",
            size=8.5,
        )
        place += 1
        for result in rows:
            draw_ratio(axes, place, result)
            labels.append((place, result.work))
            place += 1
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks([at for at, _ in labels], [work for _, work in labels], size=7.5)
    axes.tick_params(axis="x", which="both", top=True, labeltop=True)
    axes.set_ylim(place, -1)
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    axes.grid(axis="x", which="both", color="0.9", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_xlabel(
        "times as fast as the other side, in one process, in turns\n"
        "{cpu}, {cores} cores, {python}, kvcache {kvcache}".format(**machine)
    )
    figure.legend(handles=legend(), loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def draw_ratio(axes: Axes, place: int, result: Result) -> None:
    colour = COLOURS[result.reached]
    if result.low and result.high:
        axes.plot(
            [result.low, result.high],
            [place, place],
            color=colour,
            alpha=0.35,
            linewidth=5,
            solid_capstyle="butt",
        )
    if result.least:
        axes.plot(result.least, place, "|", color="black", markersize=9, mew=1.6)
    axes.plot(result.ratio, place, "o", color=colour, markersize=3.6)
    digits = 2 if result.ratio < 2 else 1 if result.ratio < 100 else 0
    axes.annotate(
        f"{result.ratio:.{digits}f}x",
        (max(result.ratio, result.high or 0), place),
        (6, 0),
        textcoords="offset points",
        va="center",
        size=7,
    )


def legend() -> list[Any]:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=COLOURS[reached], marker="o", lw=0, ms=4, label=meaning)
        for reached, meaning in MEANING.items()
    ]
    spread = "10th to 90th percentile"
    return [
        *marks,
        Line2D([], [], color=COLOURS[None], alpha=0.35, lw=5, label=spread),
        Line2D([], [], color="black", marker="|", lw=0, ms=9, mew=1.6, label="floor"),
        Line2D([], [], color="black", lw=1, label="both alike"),
    ]


def growth(report: dict[str, Any], path: Path) -> None:
    """Cost over the size of the pool, and over how much of it is cached."""
    figure = new_figure(11, 5)
    left, right = figure.subplots(1, 2, sharey=True)
    left.set(xscale="log", yscale="log", xlabel="blocks in the pool")
    draw_costs(left, report["by_size"], "num_blocks")
    left.set_ylabel("nanoseconds a block")
    size = report["by_share"][0]["num_blocks"]
    right.set_xlabel(f"share that is cached, of {size:,} blocks")
    draw_costs(right, report["by_share"], "share")
    right.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    left.yaxis.set_major_formatter(lambda ns, _: f"{ns:g}")
    figure.suptitle(
        "{cpu}, {cores} cores, {python}".format(**report["machine"]), size=9
    )
    figure.savefig(path, dpi=110)


def draw_costs(axes: Axes, costs: list[dict[str, Any]], over: str) -> None:
    """A line a work, with its spread, and one of the walk that each was beside."""
    for work in dict.fromkeys(cost["work"] for cost in costs):
        these = [cost for cost in costs if cost["work"] == work]
        places = [cost[over] for cost in these]
        [line] = axes.plot(
            places, [cost["ns"] for cost in these], marker="o", ms=4, label=work
        )
        axes.fill_between(
            places,
            [cost["walk_ns"] * cost["low"] for cost in these],
            [cost["walk_ns"] * cost["high"] for cost in these],
            color=line.get_color(),
            alpha=0.2,
            linewidth=0,
        )
    places = sorted({cost[over] for cost in costs})
    walks = [
        median(cost["walk_ns"] for cost in costs if cost[over] == place)
        for place in places
    ]
    axes.plot(places, walks, "k--", label="walk from row to row: memory's limit")
    axes.grid(which="both", color="0.9", linewidth=0.5)
    axes.legend(fontsize=8)
