"""Reads one row of a trace: a line of JSON.

Holds nothing. Invariant: what leaves it is of the right type and range, or a
`ValueError` says which field is not. Costs: one JSON parse a line.
"""

from __future__ import annotations

import json
from typing import Any

MAX_BLOCK_SIZE = 2**31 - 2
MAX_TOKENS = 2**63 - 1
MAX_TIME = 2**53


def parse_row(line: bytes) -> tuple[int, list[int], int | None, dict[str, Any]]:
    """Parse one line of a trace.

    Returns:
        The row's `input_length`, `hash_ids`, and `block_size` if it names one;
        and the row, whose other fields were not looked at.

    Raises:
        ValueError: The line is not a row; the message says why.
    """
    try:
        row = json.loads(str(line, "utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:  # an integer too long to convert
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not a row: nested too deeply") from None
    if type(row) is not dict:
        raise ValueError("not a JSON object")
    length = _integer(row, "input_length", 0, MAX_TOKENS)
    ids = _field(row, "hash_ids")
    if type(ids) is not list:
        raise ValueError(f"hash_ids must be a list, not {ids!r:.40}")
    # By `type`: True is an int, but no id.
    if not set(map(type, ids)) <= {int}:
        bad = next(index for index, id_ in enumerate(ids) if type(id_) is not int)
        raise ValueError(f"hash_ids[{bad}] must be an integer, not {ids[bad]!r:.40}")
    named_size = None
    if "block_size" in row:
        named_size = _integer(row, "block_size", 1, MAX_BLOCK_SIZE)
    return length, ids, named_size, row


def parse_arrival(row: dict[str, Any]) -> tuple[float | None, int]:
    """Return a row's `timestamp` and `output_length`; None and 1 if it has none.

    Raises:
        ValueError: One of them is not a number in its range.
    """
    timestamp = row.get("timestamp", 0)
    # NaN fails the comparison as well.
    if type(timestamp) not in (int, float) or not -MAX_TIME <= timestamp <= MAX_TIME:
        raise ValueError(
            "timestamp must be a number of milliseconds, at most 2**53, not "
            f"{timestamp!r:.40}"
        )
    output_length = 1
    if "output_length" in row:
        output_length = _integer(row, "output_length", 0, MAX_TOKENS)
    return float(timestamp) if "timestamp" in row else None, output_length


def block_size_limits(length: int, ids: int) -> tuple[int, int]:
    """Return the least and the greatest b with `ceil(length / b) == ids`.

    The least exceeds the greatest if there is none.
    """
    if length == ids == 0:
        return 1, MAX_BLOCK_SIZE
    if not 0 < ids <= length:
        return 1, 0
    return -(-length // ids), (length - 1) // (ids - 1) if ids > 1 else MAX_BLOCK_SIZE


def _field(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"{name} is missing")
    return row[name]


def _integer(row: dict[str, Any], name: str, least: int, most: int) -> int:
    value = _field(row, name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{name} must be an integer from {least} to {most}, not {value!r:.40}"
        )
    return value
