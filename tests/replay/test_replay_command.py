"""`kvcache replay` from its arguments to what it prints and returns."""

import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.cli import main
from kvcache.replay.command import DEFAULT_SIZES

WriteTrace = Callable[..., Path]
MakeReport = Callable[..., dict[str, Any]]
# Two requests of two full blocks each; the second hits the first block only,
# for its last token is computed.
ROWS = [
    {"input_length": 32, "hash_ids": [1, 2]},
    {"input_length": 32, "hash_ids": [1, 2]},
    {"input_length": 0, "hash_ids": []},
    {"input_length": 80, "hash_ids": [3, 4, 5, 6, 7]},
]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the program and returns the error it prints."""

    def run(*args: str | Path) -> str:
        assert main(["replay", *map(str, args)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        last = err.splitlines()[-1]
        assert re.match("kvcache( replay)?: error: ", last)
        return last

    return run


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> MakeReport:
    """Return a function that runs the program and returns the JSON it prints."""

    def run(*args: str | Path) -> dict[str, Any]:
        assert main(["replay", "--json", *map(str, args)]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        told: dict[str, Any] = json.loads(out)
        return told

    return run


def digest_of(*lines: str) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def sizes_of(report: dict[str, Any]) -> list[int]:
    return [run["num_blocks"] for run in report["runs"]]


def test_json_tells_what_each_pool_did(
    write_trace: WriteTrace, report: MakeReport
) -> None:
    path = write_trace(*ROWS)
    told = report(path, "--block-size", "16", "--blocks", "5,10")
    digests = [run.pop("assignment_sha256") for run in told["runs"]]
    shared = {"requests": 4, "hit_tokens": 16}
    assert told == {
        "trace": "trace.jsonl",
        "block_size": 16,
        "runs": [
            {
                **shared,
                "num_blocks": 5,
                "skipped": 1,
                "prompt_tokens": 64,
                "hit_rate": 0.25,
                "new_blocks": 3,
                "evictions": 0,
                "cached_blocks": 2,
            },
            {
                **shared,
                "num_blocks": 10,
                "skipped": 0,
                "prompt_tokens": 144,
                "hit_rate": 0.111111,
                "new_blocks": 8,
                "evictions": 0,
                "cached_blocks": 7,
            },
        ],
    }
    lines = ["0: 1 2", "16: 1 3", ""]
    assert digests == [digest_of(*lines, "skip"), digest_of(*lines, "0: 4 5 6 7 8")]


@pytest.mark.parametrize(
    "name",
    [
        "mooncake_conversation.jsonl.xz",
        "mooncake_synthetic.jsonl.gz",
        "lmcache_agents.jsonl.gz",
    ],
)
def test_a_real_trace_gives_what_stock_vllm_gives(
    shared_traces: Path, report: MakeReport, name: str
) -> None:
    expected = json.loads((shared_traces / "expected.json").read_text())[name]
    told = report(shared_traces / name, "--blocks", ",".join(expected["runs"]))
    assert told == {
        "trace": name,
        "block_size": expected["block_size"],
        "runs": [
            {"num_blocks": int(num_blocks), **run}
            for num_blocks, run in expected["runs"].items()
        ],
    }


# The third arrives first; the second, which has no time, with the one before it. Then
# both run at once, and the second finds the first one's first block.
TIMED_ROWS = [
    {"input_length": 32, "hash_ids": [1, 2], "timestamp": 30, "output_length": 3},
    {"input_length": 32, "hash_ids": [1, 2], "output_length": 3},
    {"input_length": 33, "hash_ids": [3, 4, 5], "timestamp": 0, "output_length": 3},
    {"input_length": 99, "hash_ids": [*range(7)], "timestamp": 99},
]


def test_json_tells_what_requests_in_flight_did(
    write_trace: WriteTrace, report: MakeReport
) -> None:
    path = write_trace(*TIMED_ROWS)
    options = ["--block-size", "16", "--blocks", "7", "--concurrency", "2"]
    told = report(path, *options, "--step-ms", "10")
    assert told == {
        "trace": "trace.jsonl",
        "block_size": 16,
        "concurrency": 2,
        "step_ms": 10,
        "runs": [
            {
                "num_blocks": 7,
                "requests": 4,
                "skipped": 1,
                "prompt_tokens": 97,
                "hit_tokens": 16,
                "hit_rate": 0.164948,
                "new_blocks": 8,
                "evictions": 1,
                "cached_blocks": 3,
                "assignment_sha256": digest_of(
                    "0: 1 2 3", "0: 3 4 6", "16: 3 5 2", "skip"
                ),
                "steps": 6,
                "preemptions": 0,
                "recomputed_tokens": 0,
                "peak_blocks": 5,
                "mean_running": 1.5,
                "max_running": 2,
            }
        ],
    }


def test_the_table_tells_what_requests_in_flight_did(
    write_trace: WriteTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_trace(*TIMED_ROWS))
    options = ["--block-size", "16", "--blocks", "7,9", "--concurrency", "2"]
    assert main(["replay", path, *options]) == 0
    title, header, *lines = capsys.readouterr().out.splitlines()
    assert title == (
        "trace.jsonl: 4 requests, 16 tokens a block, 2 in flight, 25 ms a step"
    )
    assert re.split("  +", header.strip())[5:] == [
        *("peak blocks", "preemptions", "recomputed", "steps", "running, mean", "max")
    ]
    assert [line.split()[4] for line in lines] == ["1", "0"]


def test_a_time_that_is_none_matters_only_to_requests_in_flight(
    write_trace: WriteTrace, report: MakeReport, refused: Callable[..., str]
) -> None:
    path = write_trace(*TIMED_ROWS, {**TIMED_ROWS[0], "timestamp": "noon"})
    assert report(path, "--block-size", "16")["runs"][0]["requests"] == 5
    error = refused(path, "--block-size", "16", "--concurrency", "2")
    assert f"{path}:5: timestamp must be a number of milliseconds" in error


def test_requests_in_flight_of_a_real_trace_all_run(
    shared_traces: Path, report: MakeReport
) -> None:
    path = shared_traces / "mooncake_conversation.jsonl.xz"
    [run] = report(path, "--blocks", "1000", "--concurrency", "64")["runs"]
    assert (run["requests"], run["skipped"]) == (12031, 0)
    assert run["prompt_tokens"] == 144793823
    assert run["max_running"] == 64
    assert run["preemptions"] > 0
    # As many as the trace says.
    assert round(run["mean_running"] * run["steps"]) == 4122048


def test_without_arguments_generated_chats_run_through_pools_of_default_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay"]) == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title == "generated chat: 2560 requests, 16 tokens a block"
    assert [int(line.split()[0]) for line in lines] == DEFAULT_SIZES
    rates = [float(line.split()[1].rstrip("%")) for line in lines]
    assert rates == sorted(set(rates))


def test_options_shape_the_generated_chats(
    report: MakeReport,
) -> None:
    shape = ["--sessions", "1", "--turns", "1", "--system-tokens", "64"]
    shape += ["--user-tokens", "1", "--reply-tokens", "0", "--block-size", "32"]
    told = report(*shape, "--blocks", "9")
    assert told["trace"] is None
    assert told["block_size"] == 32
    assert told["runs"][0]["prompt_tokens"] == 65
    assert told["runs"][0]["cached_blocks"] == 2


def test_the_seed_changes_the_generated_chats(
    report: MakeReport,
) -> None:
    first, again, other = (
        report("--sessions", "3", "--blocks", "900", "--seed", seed) for seed in "001"
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("budgets", "kv_bytes", "sizes"),
    [
        ("1,0.5,16", 2**20, [64, 32, 1024]),
        ("1", 3000, [22369]),
        # As a float this would be 3.
        ("2.99999999999999999999", 2**26, [2]),
    ],
)
def test_a_budget_is_divided_exactly_and_rounded_down(
    report: MakeReport,
    budgets: str,
    kv_bytes: int,
    sizes: list[int],
) -> None:
    shape = ["--sessions", "1", "--turns", "1"]
    cost = ["--kv-bytes-per-token", str(kv_bytes)]
    assert sizes_of(report(*shape, "--budget-gib", budgets, *cost)) == sizes


def test_a_budget_counts_blocks_of_the_size_found_in_the_trace(
    write_trace: WriteTrace, report: MakeReport
) -> None:
    path = write_trace({"input_length": 6758, "hash_ids": list(range(14))})
    told = report(path, "--budget-gib", "1", "--kv-bytes-per-token", "1024")
    assert told["block_size"] == 512
    assert sizes_of(told) == [2048]


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--blocks", "0"], "--blocks: '0' is no integer from 1 to"),
        (["--blocks", "10,"], "--blocks: '' is no integer"),
        (["--blocks", "1e3"], "--blocks: '1e3' is no integer"),
        (["--blocks", "2147483648"], "is no integer from 1 to 2147483647"),
        (["--blocks", "9", "--budget-gib", "1"], "not allowed with argument"),
        (["--budget-gib", "1"], "need each other"),
        (["--kv-bytes-per-token", "1"], "need each other"),
        (["--budget-gib", "-1", "--kv-bytes-per-token", "1"], "--budget-gib"),
        (["--budget-gib", "nan", "--kv-bytes-per-token", "1"], "'nan' is no number"),
        (["--budget-gib", "1e99999999", "--kv-bytes-per-token", "1"], "is no number"),
        (["--budget-gib", "1", "--kv-bytes-per-token", "0"], "'0' is no integer"),
        (["--budget-gib", "0", "--kv-bytes-per-token", "1"], "hold 0 blocks of 16"),
        (["--budget-gib", "999999", "--kv-bytes-per-token", "1"], "a pool has 1 to"),
        (["--block-size", "0"], "--block-size: '0' is no integer"),
        (["--concurrency", "0"], "--concurrency: '0' is no integer from 1 to"),
        (["--concurrency", "1", "--step-ms", "0"], "--step-ms: '0' is no integer"),
        (["--step-ms", "5"], "--step-ms needs --concurrency"),
        (["--turns", "0"], "--turns: '0' is no integer from 1 to"),
        (["--seed", "1", "a.jsonl"], "--seed shapes generated chats, not a TRACE"),
        (["--plot", "plot.jsonl"], "plot.jsonl: no image format"),
        (["--plot", "nowhere/plot.png"], "there is no folder nowhere"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["nowhere.jsonl"], "No such file or directory: 'nowhere.jsonl'"),
        (["."], "Is a directory: '.'"),
    ],
)
def test_a_mistake_in_the_arguments_is_named_in_one_line(
    refused: Callable[..., str], args: list[str], fault: str
) -> None:
    if "--plot" in args:
        pytest.importorskip("matplotlib")
    assert fault in refused(*args)


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_the_program_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{kvcache.__version__}\n"


def test_a_malformed_row_is_named_in_one_line(
    write_trace: WriteTrace, refused: Callable[..., str]
) -> None:
    path = write_trace(*ROWS, '{"input_length": 1}')
    assert refused(path, "--block-size", "16").endswith(
        f"error: {path}:5: hash_ids is missing"
    )


def test_a_pool_that_does_not_fit_into_memory_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("kvcache.replay.PoolReplay", fail)
    assert refused().endswith("error: out of memory")


def test_a_plot_is_drawn_beside_the_table(
    tmp_path: Path, write_trace: WriteTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    image = tmp_path / "plot.png"
    trace = str(write_trace(*ROWS))
    assert main(["replay", trace, "--block-size", "16", "--plot", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    assert "hit rate" in capsys.readouterr().out


def test_a_missing_matplotlib_is_told_before_the_trace_is_opened(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    error = refused("nowhere.jsonl", "--plot", "plot.png")
    assert 'pip install "kvcache[cli]"' in error
