"""The house: imports point down only, and files stay small.

Both are read from the source text: of Python modules, of compiled ones (`.pyx`) and of
what these share in C (`.pxd`), `import` and `cimport` alike.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kvcache"

# Floors from the ground up; a room is a module or a package of `kvcache`.
HOUSE = {
    "words": ["_types", "_memory", "_lock", "_args", "errors", "events", "metrics"],
    "structures": ["block_store", "free_queue", "hash_index", "hashing"],
    "allocators": [
        "block_pool",
        "pool_state",
        "pool_events",
        "pool_views",
        "invariants",
        "token_match",
        "kept_tokens",
        "prefix_caching",
    ],
    "requests": ["manager"],
    "front door": ["__init__"],
    "edges": ["capi", "replay", "cli", "__main__", "integrations"],
}
FLOOR = {room: floor for floor, rooms in enumerate(HOUSE.values()) for room in rooms}

AIMS = {".pxd": 80, ".pyx": 400, ".py": 300}
# Longer for a reason that is not a second noun.
LONGER = {
    "block_pool.pyx": "vLLM's whole BlockPool is one class, in two faces",
    "block_pool.pxd": "likewise: what each of its methods stands on",
    "block_store.pyx": "a view and the store it reads know each other's fields",
    "hash_index.pyx": "the table in C, and the map that shows it",
    "hash_index.pxd": "the primitives that must be inlined where they are used",
    "pool_state.pxd": "likewise",
    "manager/kv_cache_manager.pyx": "vLLM's manager is one class, alone and by step",
    "manager/manager_state.pxd": "the structs and primitives that all parts share",
    "prefix_caching/block_table.pyx": "vLLM's whole class",
    "prefix_caching/blocks.pxd": "its fields, and what it asks of its allocator",
    "prefix_caching/blocks.pyx": "both kinds of block know each other's fields",
    "prefix_caching/interfaces.py": "three interfaces, with every method's contract",
    "prefix_caching/naive_block_allocator.pyx": "vLLM's whole class",
    "prefix_caching/prefix_caching_block_allocator.pyx": "vLLM's whole class",
    "_types.pxd": "likewise",
}

IMPORT = re.compile(
    r"""^[ \t]*(?:
        from[ \t]+(?P<base>[.\w]+)[ \t]+c?import[ \t]*
            (?:\((?P<many>[^)]*)\)|(?P<some>[^\n]*))
      | c?import[ \t]+(?P<modules>[^\n]*)
    )""",
    re.MULTILINE | re.VERBOSE,
)
TEXT = re.compile(r'""".*?"""|\'\'\'.*?\'\'\'|#[^\n]*', re.DOTALL)


def sources() -> dict[str, str]:
    """Text of every source file by its path inside the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text()
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in AIMS
    }


def room_of(path: str) -> str:
    return path.partition("/")[0].partition(".")[0]


def imports(text: str) -> set[str]:
    """Rooms of the package that a file imports or cimports from."""
    rooms = set()
    for found in IMPORT.finditer(TEXT.sub("", text)):
        if found["modules"] is not None:
            for module in found["modules"].split(","):
                name, _, rest = module.split(" as ")[0].strip().partition(".")
                if name == "kvcache":
                    rooms.add(rest.partition(".")[0] or "__init__")
        elif found["base"] == "kvcache":
            for name in (found["many"] or found["some"]).split(","):
                name = name.split(" as ")[0].strip()
                if name:
                    rooms.add(name if name in FLOOR else "__init__")
        elif found["base"].startswith("kvcache."):
            rooms.add(found["base"].split(".")[1])
        elif found["base"].startswith("."):
            raise ValueError(f"a relative import, which hides its room: {found[0]}")
    return rooms


def upward(files: Mapping[str, str]) -> list[str]:
    """What is imported from a higher floor."""
    return [
        f"{path} imports {room}"
        for path, text in files.items()
        for room in sorted(imports(text))
        if FLOOR[room] > FLOOR[room_of(path)]
    ]


def circles(files: Mapping[str, str]) -> list[str]:
    """Rooms that import each other, be it over others."""
    direct: dict[str, set[str]] = {}
    for path, text in files.items():
        room = room_of(path)
        direct.setdefault(room, set()).update(imports(text) - {room})
    found = []
    for room in direct:
        reached, todo = set(), list(direct[room])
        while todo:
            other = todo.pop()
            if other not in reached:
                reached.add(other)
                todo += direct.get(other, ())
        if room in reached:
            found.append(room)
    return found


def lines(text: str) -> int:
    return text.count("\n")


# -- the package ------------------------------------------------------------------


def test_every_room_has_its_floor() -> None:
    assert {room_of(path) for path in sources()} <= set(FLOOR)


def test_imports_point_down_only() -> None:
    assert upward(sources()) == []


def test_no_two_rooms_import_each_other() -> None:
    assert circles(sources()) == []


def test_files_are_small() -> None:
    too_long = {
        path: lines(text)
        for path, text in sources().items()
        if lines(text) > AIMS[Path(path).suffix]
    }
    assert {path: size for path, size in too_long.items() if path not in LONGER} == {}
    assert sorted(too_long) == sorted(LONGER)  # none is excused that need not be


# -- the rules themselves ---------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rooms"),
    [
        ("import kvcache", {"__init__"}),
        ("import kvcache.block_pool as pool, os", {"block_pool"}),
        ("cimport kvcache.hash_index", {"hash_index"}),
        ("from kvcache import BlockPool, KVCacheBlock", {"__init__"}),
        ("from kvcache import pool_events", {"pool_events"}),
        ("from kvcache.block_store cimport BlockStore", {"block_store"}),
        ("from kvcache.hashing.extra_keys import first", {"hashing"}),
        ("from kvcache cimport (\n    events,\n    Key,\n)", {"events", "__init__"}),
        ("if True:\n    from kvcache.cli import main", {"cli"}),
        ('"""\nfrom kvcache.cli import main\n"""\nimport os', set()),
        ("# from kvcache.cli import main\nimport numpy", set()),
        ("from kvcachelike import x\nimport kvcachelike", set()),
    ],
)
def test_an_import_is_found_in_whatever_form_it_has(text: str, rooms: set[str]) -> None:
    assert imports(text) == rooms


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(ValueError):
        imports("from .block_pool import BlockPool")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("block_store.pyx", "from kvcache.block_pool cimport BlockPool"),
        ("_types.pxd", "from kvcache.errors import X\ncimport kvcache.hash_index"),
        ("hashing/extra_keys.py", "from kvcache.pool_events import stored_event"),
        ("block_pool.pyx", "from kvcache import BlockPool"),
        ("pool_views.py", "def late():\n    from kvcache.replay import replay"),
    ],
)
def test_an_import_that_points_up_is_found(path: str, text: str) -> None:
    assert len(upward({path: text})) == 1


def test_an_import_on_the_same_floor_or_below_is_fine() -> None:
    files = {
        "free_queue.pyx": "from kvcache.block_store cimport BlockStore",
        "replay/trace.py": "from kvcache.cli import main\nfrom kvcache import events",
        "cli.py": "from kvcache import BlockPool",
    }
    assert upward(files) == []
    assert circles(files) == []


def test_a_circle_of_imports_is_found() -> None:
    files = {
        "block_pool.pxd": "likewise: what each of its methods stands on",
        "block_store.pyx": "from kvcache.free_queue cimport Q",
        "free_queue.pxd": "from kvcache.hash_index cimport H",
        "hash_index.py": "import kvcache.block_store",
        "errors.py": "import kvcache.events",
    }
    assert circles(files) == ["block_store", "free_queue", "hash_index"]
