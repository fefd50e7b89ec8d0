"""The trace reader: any bytes give a trace, or a ValueError that names file and line.

The input is the file itself, or says what rows it has and where it is damaged. Rows
that are read are those that the standard library reads from the same bytes.
"""

import bz2
import gzip
import json
import lzma
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from choices import Choices

from kvcache.replay import Trace

FOLDER = Path(tempfile.mkdtemp())
FORMATS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "": (bytes, bytes),
    ".gz": (partial(gzip.compress, mtime=0), gzip.decompress),
    ".xz": (lzma.compress, lzma.decompress),
    ".bz2": (bz2.compress, bz2.decompress),
}
BLOCK_SIZES = [None, 1, 16, 512]
FIELDS = ["input_length", "hash_ids", "timestamp", "output_length", "block_size"]
NUMBERS = [0, 1, 2**31 - 2, 2**31 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 0.5, 1e16]
NO_NUMBERS = [None, True, "7", [], {}, float("nan"), float("inf"), [1, True], "\ud800"]
# Of the whole file, for no line of it is to blame.
UNDECIDED = re.compile(r"the first \d+ rows allow block sizes from \d+ to \d+; give ")

ROWS = (
    b'{"input_length": 40, "hash_ids": [1, 2, 3], "timestamp": 0, "output_length": 9}\n'
    b"\n"
    b'{"input_length": 320, "hash_ids": [%s], "timestamp": 27.5, "block_size": 16}\n'
) % b",".join(b"%d" % i for i in range(20))
SEEDS = [
    bytes([0, 0, 0]) + ROWS,
    bytes([0, 2, 0]) + ROWS * 3,
    bytes([1, 2, 0]) + gzip.compress(ROWS, mtime=0),
    bytes([0, 1, 0]) + b"[" * 2_000,
    bytes([0, 1, 0]) + b'{"input_length": ' + b"9" * 5_000 + b', "hash_ids": []}',
    *(bytes([i, 2, 1]) + b"\x05\x28" * 9 for i in range(4)),
    *(bytes([i, 2, 2]) + b"\x05\x28" * 9 for i in range(4)),
]


def draw_row(choices: Choices) -> bytes:
    """A line: a row, and now and then one that has a field wrong, or none."""
    length = choices.below(1024)
    row: dict[str, object] = {"input_length": length}
    row["hash_ids"] = list(range(-(-length // 16)))
    for _ in range(choices.below(4)):
        name, sign = choices.pick(FIELDS), 1 - 2 * choices.below(2)
        kind = choices.below(4)
        if kind == 0:
            row[name] = choices.pick(NO_NUMBERS)
        elif kind == 1:
            row[name] = sign * choices.pick(NUMBERS)
        elif kind == 2:
            row[name] = sign * choices.below(2**16)
        else:
            row.pop(name, None)
    return json.dumps(row).encode() + b"\n" * choices.below(3)


def draw_file(choices: Choices, compress: Callable[[bytes], bytes]) -> bytes:
    kind = choices.below(3)
    if kind == 0:
        return choices.take(len(choices.data))
    where, new = choices.below(2**16), choices.below(512)
    lines = []
    while choices:
        lines.append(draw_row(choices))
    content = compress(b"".join(lines))
    if kind == 2 and content:
        where %= len(content)
        rest = content[where + 1 :] if new < 256 else b""
        content = content[:where] + bytes([new % 256]) + rest
    return content


def run(data: bytes) -> None:
    choices = Choices(data)
    suffix, size = choices.pick(list(FORMATS)), choices.pick(BLOCK_SIZES)
    compress, decompress = FORMATS[suffix]
    path, content = FOLDER / f"trace{suffix}", draw_file(choices, compress)
    path.write_bytes(content)
    try:
        with Trace(path, size) as trace:
            rows = [
                (length, list(ids), *rest) for length, ids, *rest in trace.arrivals()
            ]
            size = trace.block_size
    except ValueError as error:
        message = str(error)
        where, line, what = re.fullmatch(r"(.*?):(?:(\d+):)? (.*)", message).groups()
        assert where == str(path), message
        assert line or UNDECIDED.match(what), message
        return
    lines = [line for line in decompress(content).split(b"\n") if line.strip()]
    assert len(rows) == len(lines)
    for line, (length, ids, timestamp, output_length) in zip(lines, rows, strict=True):
        row = json.loads(line)
        assert (length, ids) == (row["input_length"], row["hash_ids"])
        assert length // size <= len(ids) <= -(-length // size)
        assert timestamp == row.get("timestamp")
        assert output_length == row.get("output_length", 1)
