"""What the replay tests share: traces of a few rows, and the real ones."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes rows, or lines as they are, into a file."""

    def write(*rows: dict[str, Any] | str, name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


@pytest.fixture
def shared_traces() -> Path:
    """Return the folder of the real traces, or skip."""
    root = Path(__file__).parents[2]
    shared = Path(os.environ.get("KVCACHE_SHARED", root.parent / "shared"))
    if not (shared / "traces" / "expected.json").is_file():
        pytest.skip(f"no real traces in {shared}; KVCACHE_SHARED names another folder")
    return shared / "traces"
