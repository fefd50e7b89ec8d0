"""Reports: JSON, table, plot."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcache.replay import Report, Run
from kvcache.replay.report import CONCURRENT_FIELDS, JSON_FIELDS, prepare_plot


def run_of(num_blocks: int, **fields: float) -> Run:
    run: Run = {
        "num_blocks": num_blocks,
        "requests": 7,
        "skipped": 1,
        "prompt_tokens": 3000,
        "hit_tokens": 1000,
        "hit_rate": 0.333333,
        "new_blocks": 11,
        "evictions": 5,
        "cached_blocks": 6,
        "assignment_sha256": "ab",
        "seconds": 2e-6,
        "blocks": 16,
    }
    return {**run, **fields}  # type: ignore[typeddict-item]


def test_json_holds_every_field_but_times() -> None:
    report = json.loads(Report("a.jsonl", 16, [run_of(10)]).to_json())
    expected = dict(run_of(10))
    del expected["seconds"], expected["blocks"]
    assert report == {"trace": "a.jsonl", "block_size": 16, "runs": [expected]}
    assert tuple(report["runs"][0]) == JSON_FIELDS


def test_json_tells_more_of_requests_in_flight() -> None:
    more = dict.fromkeys(CONCURRENT_FIELDS[len(JSON_FIELDS) :], 3)
    report = Report(None, 16, [run_of(10, **more)], concurrency=8, step_ms=25)
    told = json.loads(report.to_json())
    assert (told["concurrency"], told["step_ms"]) == (8, 25)
    assert tuple(told["runs"][0]) == CONCURRENT_FIELDS


def test_the_table_has_one_line_a_pool_in_the_order_of_the_sizes() -> None:
    table = Report("a.jsonl", 16, [run_of(2000), run_of(10, skipped=0)]).to_table()
    assert table.splitlines() == [
        "a.jsonl: 7 requests, 16 tokens a block",
        "blocks  hit rate  hit tokens  evictions  skipped  ns/block",
        "  2000    33.33%        1000          5        1     125.0",
        "    10    33.33%        1000          5        0     125.0",
    ]


def test_a_run_without_blocks_costs_nothing_in_the_table() -> None:
    table = Report(None, 16, [run_of(10, seconds=0.0, blocks=0)]).to_table()
    assert table.startswith("generated chat: ")
    assert table.endswith(" 0.0")


def test_a_plot_is_drawn_into_the_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    prepare_plot(str(path))(Report(None, 16, [run_of(2000), run_of(10)]))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_shows_hit_rates_by_ascending_pool_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn: list[list[float]] = []

    def keep(figure: Any, path: str) -> None:
        drawn.extend(figure.axes[0].lines[0].get_xydata().tolist())

    monkeypatch.setattr(figure_module.Figure, "savefig", keep)
    report = Report(None, 16, [run_of(2000, hit_rate=0.9), run_of(10, hit_rate=0.1)])
    prepare_plot(str(tmp_path / "plot.png"))(report)
    assert drawn == [[10, 0.1], [2000, 0.9]]


def test_an_unknown_image_format_is_refused_before_anything_is_drawn(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"plot\.jsonl: no image format; use one of"):
        prepare_plot(str(tmp_path / "plot.jsonl"))


def test_a_missing_folder_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(FileNotFoundError, match="no folder"):
        prepare_plot(str(tmp_path / "nowhere" / "plot.png"))


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError):
        prepare_plot("plot.png")
