"""Reading traces: formats, block size discovery, malformed rows."""

import bz2
import gzip
import json
import lzma
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.replay import Trace, TraceError
from kvcache.replay.row import MAX_BLOCK_SIZE, block_size_limits

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
ROW = {"input_length": 40, "hash_ids": [1, 2, 3]}
# It alone tells a block size of 16.
TELLING_ROW = {"input_length": 320, "hash_ids": list(range(20))}
WriteTrace = Callable[..., Path]


def rows_of(path: Path, block_size: int | None = None) -> list[tuple[int, list[int]]]:
    with Trace(path, block_size) as trace:
        return [(length, list(ids)) for length, ids in trace]


def error_of(path: Path, block_size: int | None = None) -> str:
    with pytest.raises(TraceError) as caught:
        rows_of(path, block_size)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("suffix", [*COMPRESS, ".GZ"])
def test_the_suffix_chooses_the_decompressor(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix.lower()](json.dumps(ROW).encode() + b"\n"))
    assert rows_of(path) == [(40, [1, 2, 3])]


def test_rows_come_in_file_order_and_blank_lines_are_skipped(
    write_trace: WriteTrace,
) -> None:
    path = write_trace(ROW, "", {"input_length": 0, "hash_ids": []}, "  \t", ROW)
    assert rows_of(path, 16) == [(40, [1, 2, 3]), (0, []), (40, [1, 2, 3])]


def test_a_row_is_read_only_when_it_is_asked_for(write_trace: WriteTrace) -> None:
    with Trace(write_trace(ROW, "{"), 16) as trace:
        rows = iter(trace)
        assert next(rows) == (40, [1, 2, 3])
        with pytest.raises(TraceError, match=":2: not JSON"):
            next(rows)


def test_the_name_of_a_trace_is_the_last_part_of_its_path(
    write_trace: WriteTrace,
) -> None:
    with Trace(write_trace(ROW, name="a.jsonl")) as trace:
        assert trace.name == "a.jsonl"


def test_all_bytes_are_read_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ROW).encode()))
    with Trace(path) as trace:
        list(trace)
        assert trace.done == trace.total == path.stat().st_size


def test_a_pipe_is_read_without_a_known_size(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=[json.dumps(ROW) + "\n"])
    writer.start()
    with Trace(path) as trace:
        assert list(trace) == [(40, [1, 2, 3])]
        assert trace.done == trace.total == 0
    writer.join()


# Arrivals


def arrivals_of(path: Path) -> list[tuple[float | None, int]]:
    with Trace(path, 16) as trace:
        return [(time, output) for _, _, time, output in trace.arrivals()]


def test_arrivals_tell_times_and_output_lengths_where_rows_have_them(
    write_trace: WriteTrace,
) -> None:
    timed = {**ROW, "timestamp": 1.5}
    path = write_trace(timed, {**timed, "timestamp": -7}, {**ROW, "output_length": 0})
    assert arrivals_of(path) == [(1.5, 1), (-7, 1), (None, 0)]


@pytest.mark.parametrize("block_size", [16, None])
@pytest.mark.parametrize(
    ("field", "fault"),
    [
        ('"timestamp": "1"', "timestamp must be a number .* not '1'"),
        ('"timestamp": null', "timestamp must be .* not None"),
        ('"timestamp": true', "timestamp must be .* not True"),
        ('"timestamp": NaN', "timestamp must be .* not nan"),
        ('"timestamp": -Infinity', "timestamp must be .* not -inf"),
        ('"timestamp": 9007199254740993', "timestamp must be .* at most 2"),
        ('"output_length": -1', "output_length must be .* not -1"),
        ('"output_length": 2.0', "output_length must be .* not 2.0"),
        ('"output_length": null', "output_length must be .* not None"),
    ],
)
def test_a_malformed_time_or_output_length_is_named_by_file_and_line(
    write_trace: WriteTrace, field: str, fault: str, block_size: int | None
) -> None:
    line = f'{{"input_length": 40, "hash_ids": [1, 2, 3], {field}}}'
    path = write_trace(TELLING_ROW, "", line, ROW)
    with Trace(path, block_size) as trace, pytest.raises(TraceError) as caught:
        list(trace.arrivals())
    assert str(caught.value).startswith(f"{path}:3: ")
    assert re.search(fault, str(caught.value))
    assert len(rows_of(path, block_size)) == 3


# Block size


@pytest.mark.parametrize(
    ("rows", "block_size"),
    [
        # 14..20 and 10..14 leave 14.
        ([(42, 3), (29, 3)], 14),
        # 480..519 hold one power of two.
        ([(6758, 14)], 512),
        # An empty prompt says nothing.
        ([(0, 0), (6758, 14), (0, 0)], 512),
        # One token a block.
        ([(7, 7)], 1),
    ],
)
def test_the_block_size_is_the_only_integer_or_power_of_two_that_fits(
    write_trace: WriteTrace, rows: list[tuple[int, int]], block_size: int
) -> None:
    path = write_trace(
        *({"input_length": n, "hash_ids": list(range(k))} for n, k in rows)
    )
    with Trace(path) as trace:
        assert trace.block_size == block_size
        assert [(length, len(ids)) for length, ids in trace] == rows


@given(st.integers(0, 300), st.integers(0, 40))
def test_the_limits_enclose_the_block_sizes_that_give_the_count(
    length: int, ids: int
) -> None:
    low, high = block_size_limits(length, ids)
    fitting = [size for size in range(1, 400) if -(-length // size) == ids]
    assert fitting == list(range(low, min(high, 399) + 1))
    if ids == 1 and length:
        assert high == MAX_BLOCK_SIZE


def test_a_row_may_name_the_block_size(write_trace: WriteTrace) -> None:
    with Trace(write_trace({**ROW, "block_size": 17})) as trace:
        assert trace.block_size == 17


@pytest.mark.parametrize(
    "row", [{"input_length": 5, "hash_ids": [1]}, {"input_length": 0, "hash_ids": []}]
)
def test_rows_that_allow_several_block_sizes_ask_for_one(
    write_trace: WriteTrace, row: dict[str, object]
) -> None:
    path = write_trace(row)
    assert "--block-size" in error_of(path)
    assert rows_of(path, 16) == [(row["input_length"], row["hash_ids"])]


def test_an_empty_trace_has_no_rows_once_its_block_size_is_given(
    write_trace: WriteTrace,
) -> None:
    path = write_trace()
    assert "--block-size" in error_of(path)
    assert rows_of(path, 16) == []


def test_only_the_first_thousand_rows_tell_the_block_size(
    write_trace: WriteTrace,
) -> None:
    vague = {"input_length": 5, "hash_ids": [1]}
    telling = {"input_length": 64, "hash_ids": list(range(8))}
    with Trace(write_trace(*[vague] * 999, telling)) as trace:
        assert trace.block_size == 8
    assert "first 1000 rows" in error_of(write_trace(*[vague] * 1000, telling))


def test_ids_of_partly_filled_blocks_may_be_left_out_if_the_block_size_is_given(
    write_trace: WriteTrace,
) -> None:
    row = {"input_length": 40, "hash_ids": [1, 2]}
    assert rows_of(write_trace(ROW, row), 16) == [(40, [1, 2, 3]), (40, [1, 2])]
    named = write_trace({**row, "block_size": 16}, row)
    assert rows_of(named) == [(40, [1, 2]), (40, [1, 2])]
    assert ":2: too few hash_ids" in error_of(write_trace(TELLING_ROW, row))


def test_an_invalid_block_size_is_refused(write_trace: WriteTrace) -> None:
    with pytest.raises(ValueError, match=r"block_size must be from 1 to .*, not 0"):
        Trace(write_trace(ROW), 0)


# Malformed rows


@pytest.mark.parametrize("block_size", [16, None])
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ('{"input_length": 1} x', "not JSON: Extra data at column 21"),
        ("[" * 100_000, "nested too deeply|not JSON"),
        ('{"input_length": ' + "1" * 5000 + "}", "not JSON|must be an integer"),
        ("[40, [1, 2, 3]]", "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"hash_ids": [1, 2, 3]}', "input_length is missing"),
        ('{"input_length": 40}', "hash_ids is missing"),
        ('{"input_length": -1, "hash_ids": []}', "input_length must be .* not -1"),
        ('{"input_length": true, "hash_ids": [1]}', "input_length must .* not True"),
        ('{"input_length": 4e1, "hash_ids": [1]}', "input_length must .* not 40.0"),
        ('{"input_length": "40", "hash_ids": [1]}', "input_length must .* not '40'"),
        ('{"input_length": null, "hash_ids": [1]}', "input_length must .* not None"),
        (
            '{"input_length": 99999999999999999999, "hash_ids": [1]}',
            "input_length must be an integer from 0 to",
        ),
        ('{"input_length": 40, "hash_ids": null}', "hash_ids must be a list"),
        ('{"input_length": 40, "hash_ids": "123"}', "hash_ids must be a list"),
        ('{"input_length": 40, "hash_ids": {"0": 1}}', "hash_ids must be a list"),
        (
            '{"input_length": 40, "hash_ids": [1, true, 3]}',
            r"hash_ids\[1\] .* not True",
        ),
        ('{"input_length": 40, "hash_ids": [1, 2, 3.0]}', r"hash_ids\[2\] .* not 3.0"),
        ('{"input_length": 40, "hash_ids": [[1], 2, 3]}', r"hash_ids\[0\] .* not \[1"),
        ('{"input_length": 40, "hash_ids": [1]}', "too few hash_ids|none of the"),
        ('{"input_length": 40, "hash_ids": []}', "too few hash_ids|none of the"),
        ('{"input_length": 0, "hash_ids": [1]}', "too many hash_ids|none of the"),
        ('{"input_length": 40, "hash_ids": [1, 2, 3, 4]}', "too many|none of the"),
        ('{"input_length": 0, "hash_ids": [], "block_size": 0}', "block_size must be"),
        ('{"input_length": 0, "hash_ids": [], "block_size": 64}', "block_size 64"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(
    write_trace: WriteTrace, line: str, fault: str, block_size: int | None
) -> None:
    path = write_trace({"input_length": 48, "hash_ids": [1, 2, 3]}, "", line, ROW)
    message = error_of(path, block_size)
    assert message.startswith(f"{path}:3: ")
    assert re.search(fault, message)


def test_a_malformed_row_after_the_first_ones_is_named_too(
    write_trace: WriteTrace,
) -> None:
    path = write_trace(TELLING_ROW, ROW, {"input_length": 41, "hash_ids": [1]})
    assert error_of(path).startswith(f"{path}:3: too few hash_ids: 1, where")


def test_a_row_must_fit_the_block_size_that_it_names(write_trace: WriteTrace) -> None:
    path = write_trace({**ROW, "block_size": 2})
    assert ":1: too few hash_ids" in error_of(path)


def test_undecodable_bytes_are_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b'\n{"\xff": 1}\n')
    assert error_of(path, 16).startswith(f"{path}:2: not UTF-8: invalid start byte")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_a_truncated_stream_is_named_by_file_and_line(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"trace.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](json.dumps(ROW).encode() + b"\n")[:-9])
    assert error_of(path, 16).startswith(f"{path}:")
    assert "cannot be read: Compressed file ended" in error_of(path, 16)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_a_corrupt_stream_is_named_by_file_and_line(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"trace.jsonl{suffix}"
    content = bytearray(COMPRESS[suffix](json.dumps(ROW).encode()))
    middle = len(content) // 2
    content[middle : middle + 8] = b"\xff" * 8
    path.write_bytes(content)
    assert error_of(path, 16).startswith(f"{path}:1: cannot be read")


def test_a_stream_that_is_not_compressed_is_named_by_file_and_line(
    write_trace: WriteTrace,
) -> None:
    path = write_trace(ROW, name="trace.jsonl.gz")
    assert error_of(path).startswith(f"{path}:1: cannot be read: Not a gzipped file")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_trace_that_is_refused_leaves_no_file_open(write_trace: WriteTrace) -> None:
    path = write_trace("{")
    before = os.listdir("/proc/self/fd")
    # `caught` keeps the frames, so nothing is closed by losing its last reference.
    with pytest.raises(TraceError) as caught:
        Trace(path)
    assert os.listdir("/proc/self/fd") == before
    del caught
