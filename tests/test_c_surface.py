"""The C surface: engines compiled against the installed package, and nothing else."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from engines import schedule

import kvcache
from kvcache import BlockPool
from kvcache.hashing import Keyed

ENGINES = Path(__file__).parent / "engines"
SETUP = """
import sys
from pathlib import Path

import kvcache, numpy
from setuptools import Extension, setup

name, include = sys.argv.pop(), [numpy.get_include(), kvcache.get_include()]
extension = Extension(Path(name).stem, [name], include_dirs=include)
if name.endswith(".pyx"):
    from Cython.Build import cythonize
    [extension] = cythonize(extension)
setup(name="engine", ext_modules=[extension])
"""


def build(folder: Path, source: str, text: str) -> ModuleType:
    """Compile a module in a folder of its own, and import it."""
    pytest.importorskip("setuptools")
    pytest.importorskip("Cython")
    (folder / source).write_text(text)
    (folder / "setup.py").write_text(textwrap.dedent(SETUP))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", source]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name = Path(source).stem
    [path] = [each for each in folder.iterdir() if each.suffix in (".so", ".pyd")]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    text = (ENGINES / "scheduler.pyx").read_text()
    return build(tmp_path_factory.mktemp("scheduler"), "scheduler.pyx", text)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    text = (ENGINES / "engine.cpp").read_text()
    return build(tmp_path_factory.mktemp("engine"), "engine.cpp", text)


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    text = (ENGINES / "threads.cpp").read_text()
    return build(tmp_path_factory.mktemp("threads"), "threads.cpp", text)


@pytest.mark.parametrize(("num_blocks", "most_running"), [(4_000, 64), (600, 64)])
def test_engines_in_cython_and_cpp_get_the_block_ids_that_python_gets(
    scheduler: ModuleType, engine: ModuleType, num_blocks: int, most_running: int
) -> None:
    work = schedule.make_workload(1_000, seed=num_blocks)
    managers = [schedule.make_manager(num_blocks, 1_000) for _ in range(3)]
    expected, preemptions = schedule.run(managers[0], work, most_running)
    log = np.zeros(len(expected) + 10_000, np.int32)
    num_logged, preempted = scheduler.run(
        managers[1], schedule.BLOCK_SIZE, *work, most_running, log
    )
    assert log[:num_logged].tolist() == expected
    cpp_log, cpp_preempted = engine.run(
        managers[2], schedule.BLOCK_SIZE, *work, most_running
    )
    assert np.frombuffer(cpp_log, np.int32).tolist() == expected
    assert preempted == cpp_preempted == preemptions
    assert (preemptions > 50) == (num_blocks == 600)
    for manager in managers:
        manager.check()
        assert manager.num_requests == 0


def test_a_pool_is_driven_from_cpp(engine: ModuleType) -> None:
    pool, keyed = BlockPool(100, True, 16), Keyed()
    tokens = np.arange(64 * 16, dtype=np.int32)
    said, digests = engine.drive_pool(pool, keyed, tokens, 16)
    expected = keyed.hash_blocks(tokens, 16)
    assert np.frombuffer(digests, np.uint8).tolist() == expected.ravel().tolist()
    # get, cache, cache again, match, same ids, other group, bad length, touch, ref_cnt,
    # free, free, free too often, a foreign id, evict, match, more than there are, free
    assert said == [0, -1, 0, 64, 1, 0, -1, -1, 2, -1, -1, 0, 0, -1, 0, -1, 99]
    pool.check()
    assert pool.match_prefix_ids(expected[1:], 3).tolist() == list(range(2, 65))


def test_a_managers_slots_and_changes_are_read_from_cpp(engine: ModuleType) -> None:
    manager = schedule.make_manager(100, 8)
    rows = np.array([manager.add_request(num_tokens=n) for n in (20, 33)], np.int32)
    for row, n in zip(rows.tolist(), (20, 33), strict=True):
        manager.allocate_slots(row, n)
    news = np.array([20, 3], np.int32)
    num_free, mapped, slots, changed = engine.read_manager(manager, rows, news, 0)
    assert num_free == manager.block_pool.get_num_free_blocks()
    expected = manager.slot_mapping(rows, news)
    assert np.frombuffer(slots, np.int64).tolist() == expected.tolist()
    assert mapped == 23
    assert np.frombuffer(changed, np.int32).tolist() == rows.tolist()
    assert manager.take_changed_rows().tolist() == []
    assert engine.read_manager(manager, rows, news + 99, 0)[1] == -1
    assert engine.read_manager(manager, rows, news, 1)[1] == -1


def test_a_block_in_c_lies_as_in_numpy(engine: ModuleType) -> None:
    size, offsets = engine.block_layout()
    dtype = BlockPool(2, True, 16).blocks.as_array().dtype
    assert size == dtype.itemsize
    assert offsets == {
        name: field[1]
        for name, field in dtype.fields.items()
        if not name.startswith("_")
    }


@pytest.mark.parametrize(
    ("function", "bad"),
    [("run", (None, 16, b"", b"", b"", b"", 1)), ("drive_pool", (3, 4, b"", 16))],
)
def test_a_handle_of_another_object_is_refused(
    engine: ModuleType, function: str, bad: tuple[object, ...]
) -> None:
    with pytest.raises(TypeError, match=rf"got {bad[0]}"):
        getattr(engine, function)(*bad)


@pytest.mark.parametrize(("name", "value"), [("MAJOR", 2), ("MINOR", 1)])
def test_a_module_compiled_for_another_version_is_not_imported(
    tmp_path: Path, name: str, value: int
) -> None:
    header = (Path(kvcache.get_include()) / "kvcache.h").read_text()
    line = re.compile(rf"(?<=#define KVC_API_{name} )\d+")
    (tmp_path / "other.h").write_text(line.sub(str(value), header))
    text = (ENGINES / "engine.cpp").read_text().replace('"kvcache.h"', '"other.h"')
    with pytest.raises(ImportError, match=r"compiled for version .* installed is 1.0"):
        build(tmp_path, "engine.cpp", text)


@pytest.mark.parametrize("num_managers", [1, 4])
def test_threads_without_the_gil_share_a_manager_under_a_lock_or_have_their_own(
    threads: ModuleType, num_managers: int
) -> None:
    managers = [schedule.make_manager(300, 256) for _ in range(num_managers)]
    each = managers * (4 // num_managers)
    served, refused = threads.run(each, Keyed(), 5_000, False)
    assert served > 10_000
    assert refused > 1_000
    for manager in managers:
        manager.check()
        assert manager.num_requests == 0
        assert manager.block_pool.get_num_free_blocks() == 299


def test_every_function_of_the_capsule_is_called_by_an_engine_here() -> None:
    header = (Path(kvcache.get_include()) / "kvcache.h").read_text()
    names = re.findall(r"\(\*(\w+)\)\(", header)
    text = (ENGINES / "engine.cpp").read_text()
    missing = [name for name in names if f"kvc->{name}(" not in text]
    assert len(names) == 26
    assert missing == []


def test_the_package_config_names_this_version_and_the_header() -> None:
    path = Path(kvcache.__file__).parent / "lib" / "pkgconfig" / "kvcache.pc"
    text = path.read_text()
    assert f"Version: {kvcache.__version__}\n" in text
    assert "includedir=${prefix}/include\n" in text
    prefix = path.parents[2]
    assert (prefix / "include" / "kvcache.h").is_file()
    assert Path(kvcache.get_include()) == prefix / "include"
