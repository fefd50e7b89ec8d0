"""Faults put into the core on purpose: does the suite catch each of them?

    python tests/seeded_faults.py [--fault NAME]... [--check]

The tree is copied, with what was compiled in it, and built. For each fault that copy is
copied, one text of a .pyx or .pxd file is replaced, what depends on it is rebuilt, and
the whole suite is run until a test fails, the tests nearest to the file first. A row a
fault is printed; the exit status is 1 if one survives. `--check` only proves that each
text is found, once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SILENCE = 240  # seconds without a test's end after which the suite hangs
NOT_COPIED = [".git", ".venv*", ".*_cache", "__pycache__"]
TEST = re.compile(r"^tests/(\S+?::.+?)(?: [A-Z]+ .*)?$", re.MULTILINE)
# For minutes hypothesis would make an example smaller that nobody reads.
UNSHRUNK = """
from hypothesis import Phase, settings

settings.register_profile(
    "unshrunk", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("unshrunk")
"""
# What compiles or starts programs, and so is slow.
SLOW = [
    "test_c_surface.py",
    "test_readme.py",
    "hashing/test_extending.py",
    "test_kept_tokens_collisions.py",
    "test_threads.py",
]


class Fault(NamedTuple):
    name: str
    file: str  # in the package
    before: str
    after: str


FAULTS = [
    # -- free queue, pool --------------------------------------------------------------
    Fault(
        "unlink leaves the way back",
        "free_queue.pxd",
        "    queue.rows[row.next_free_block].prev_free_block = row.prev_free_block\n",
        "",
    ),
    Fault(
        "append leaves the queue's tail where it was",
        "pool_state.pxd",
        "    rows[ANCHOR].prev_free_block = freed.back_last\n",
        "    rows[ANCHOR].prev_free_block = freed.old_last\n",
    ),
    Fault(
        "uncached blocks are unpinned to the front",
        "pool_state.pxd",
        "freed.least_len = 0 if all_back else 1 if",
        "freed.least_len = 1 if all_back else 1 if",
    ),
    Fault(
        "a double free is accepted",
        "pool_state.pxd",
        "    if row.ref_cnt <= 0:\n",
        "    if row.ref_cnt < 0:\n",
    ),
    Fault(
        "a bad free takes back all references but the first",
        "pool_state.pyx",
        "            add_references(pool, ids, i)\n",
        "            add_references(pool, ids + 1, i - 1)\n",
    ),
    Fault(
        "touch takes a reference of free blocks only",
        "pool_state.pxd",
        "        queue_unlink(pool.queue, block)\n    row.ref_cnt += 1\n",
        "        queue_unlink(pool.queue, block)\n        row.ref_cnt += 1\n",
    ),
    Fault(
        "touch may overflow a count if a block comes twice",
        "pool_state.pyx",
        "pool.rows[ids[i]].ref_cnt > MAX_REF_CNT - n:",
        "pool.rows[ids[i]].ref_cnt > MAX_REF_CNT - 1:",
    ),
    Fault(
        "a block that is listed twice may be cached",
        "pool_state.pyx",
        "            or pool.rows[ids[i]].flags & FLAG_IN_BATCH\n",
        "",
    ),
    Fault(
        "an allocation keeps what only a further key names",
        "pool_state.pxd",
        "        has_hash(row) or (first_side != NULL and first_side[block])\n",
        "        has_hash(row)\n",
    ),
    Fault(
        "a block promoted by cache_full_blocks is announced twice",
        "block_pool.pyx",
        "        if stored is not None:\n            events.append(stored)\n"
        "        self.cached_block_hash_to_block.reserve(k, len(made))\n",
        "        if stored is not None:\n            events += [stored, stored]\n"
        "        self.cached_block_hash_to_block.reserve(k, len(made))\n",
    ),
    Fault(
        "a known partial block is announced again",
        "block_pool.pyx",
        "        if stored is not None and (loses or not known):\n",
        "        if stored is not None:\n",
    ),
    Fault(
        "a watcher is called at every reuse",
        "block_pool.pyx",
        "            watcher = self.watchers.pop(block_id, None)\n",
        "            watcher = self.watchers.get(block_id)\n",
    ),
    Fault(
        "a hash moves without its number of tokens",
        "block_pool.pyx",
        "            self.write_hash(dst, &key, num_tokens, None)\n",
        "            self.write_hash(dst, &key, NO_NUM_TOKENS, None)\n",
    ),
    Fault(
        "the null block's view counts as one of a block",
        "block_store.pyx",
        "        self.num_views += index != NULL_BLOCK\n",
        "        self.num_views += 1\n",
    ),
    Fault(
        "views that an allocation needs are looked for once",
        "block_pool.pyx",
        "        while (\n            self.store.num_views <",
        "        if (\n            self.store.num_views <",
    ),
    Fault(
        "blocks that a collection took meanwhile are handed out",
        "block_pool.pyx",
        "        if n > self.state.queue.num_free:\n"
        "            self.refuse_count(n)\n"
        "        block = self.state.rows[ANCHOR]",
        "        block = self.state.rows[ANCHOR]",
    ),
    Fault(
        "a view that a collection asked for meanwhile is made twice",
        "block_store.pyx",
        "        if self.views[index] != NULL:\n"
        "            return <KVCacheBlock> self.views[index]\n"
        "        block.row",
        "        block.row",
    ),
    Fault(
        "a null block's hash is announced",
        "block_pool.pyx",
        "[bytes(held[i]) for i in range(n) if data[i] != NULL_BLOCK]",
        "[bytes(held[i]) for i in range(n)]",
    ),
    # -- hash index --------------------------------------------------------------------
    Fault(
        "a third copy of a key is lost",
        "hash_index.pyx",
        "    entry_prev(index, head)[0] = entry\n\n\ncdef void empty_slot",
        "\n\ncdef void empty_slot",
    ),
    Fault(
        "the oldest copy goes without handing on the youngest",
        "hash_index.pyx",
        "            index.slots[at].head = behind\n"
        "            entry_prev(index, behind)[0] = before\n",
        "            index.slots[at].head = behind\n",
    ),
    Fault(
        "an eviction leaves a second alias",
        "hash_index.pyx",
        "        while index.first_side[block]:\n",
        "        if index.first_side[block]:\n",
    ),
    Fault(
        "a gap is not closed across the table's end",
        "hash_index.pyx",
        "        if (hole < home and home <= at) or "
        "(at < hole and (hole < home or home <= at)):\n",
        "        if (hole < home and home <= at) or at < hole:\n",
    ),
    Fault(
        "vacant side entries are listed again when there are more",
        "hash_index.pyx",
        "        link_vacant(index, start)\n",
        "        link_vacant(index, 0)\n",
    ),
    Fault(
        "a hint may answer with a younger copy",
        "hash_index.pyx",
        "                and row.prev_copy == blocks[i] + 1\n",
        "",
    ),
    Fault(
        "a hint may answer with a hash that is not in the index",
        "hash_index.pyx",
        "                row.flags & FLAG_INDEXED\n                and row.prev_copy",
        "                row.prev_copy",
    ),
    Fault(
        "keys that differ in length alone are the same",
        "_types.pxd",
        "        | (row.block_hash_len ^ key.length)\n",
        "",
    ),
    Fault(
        "a group's key has its id little-endian",
        "_types.pxd",
        "    suffix[0] = group_id >> 24\n"
        "    suffix[1] = (group_id >> 16) & 255\n"
        "    suffix[2] = (group_id >> 8) & 255\n"
        "    suffix[3] = group_id & 255\n",
        "    suffix[3] = group_id >> 24\n"
        "    suffix[2] = (group_id >> 16) & 255\n"
        "    suffix[1] = (group_id >> 8) & 255\n"
        "    suffix[0] = group_id & 255\n",
    ),
    Fault(
        "a reset leaves the lists of aliases",
        "hash_index.pyx",
        "        memset(index.first_side, 0, index.num_rows * sizeof(int32_t))\n",
        "        pass\n",
    ),
    # -- kept tokens -------------------------------------------------------------------
    Fault(
        "kept tokens count behind any prefix",
        "kept_tokens.pxd",
        "        and kept.prefixes[block].parent == parent\n",
        "",
    ),
    Fault(
        "the copy of kept tokens gets a serial of its own",
        "kept_tokens.pyx",
        "    if copy != NULL_BLOCK:\n",
        "    if copy != NULL_BLOCK and parent:\n",
    ),
    # -- hashing -----------------------------------------------------------------------
    Fault(
        "a block is hashed without its parent",
        "hashing/chain.pyx",
        "        parent = digests\n",
        "",
    ),
    Fault(
        "a block's extra keys are those of the one before",
        "hashing/blocks.pyx",
        "                keys = extra_keys[done]\n",
        "                keys = extra_keys[max(done - 1, 0)]\n",
    ),
    Fault(
        "token 65535 is pickled in four bytes",
        "hashing/encoding.pyx",
        "four = value > 0xffff\n        put_little",
        "four = value >= 0xffff\n        put_little",
    ),
    Fault(
        "a frame ends a byte late",
        "hashing/encoding.pyx",
        "    if out - frame[0] >= FRAME_TARGET + FRAME_HEAD:\n",
        "    if out - frame[0] > FRAME_TARGET + FRAME_HEAD:\n",
    ),
    Fault(
        "keyed cuts tokens of 32 bits",
        "hashing/keyed_hash.pyx",
        "any_bits(tokens, num_tokens) > <uint64_t> 0x7FFFFFFF",
        "any_bits(tokens, num_tokens) > <uint64_t> 0xFFFFFFFF",
    ),
    # -- manager -----------------------------------------------------------------------
    Fault(
        "a hit may cover the last token",
        "manager/calls.pyx",
        "        max_length = num_tokens - 1 if max_length < 0 else",
        "        max_length = num_tokens if max_length < 0 else",
    ),
    Fault(
        "hits of a full group are not aligned",
        "manager/prefix_match.pyx",
        "    limit -= limit % m.alignment\n",
        "",
    ),
    Fault(
        "a match of a window is content with a block less",
        "manager/prefix_match.pyx",
        "    cdef int64_t need = cdiv(first.window - 1, first.block_size) + drop\n",
        "    cdef int64_t need = first.window // first.block_size + drop\n",
    ),
    Fault(
        "a window gives its blocks back a token early",
        "manager/manager_state.pxd",
        "        computed -= group.window - 1 + group.extra_retained\n",
        "        computed -= group.window - 2 + group.extra_retained\n",
    ),
    Fault(
        "a window gives its blocks back a token late",
        "manager/slots.pyx",
        "        if skipped < (<int64_t> held.num_nulls + 1) * group.block_size:\n",
        "        if skipped <= (<int64_t> held.num_nulls + 1) * group.block_size:\n",
    ),
    Fault(
        "free hits are not counted as taken",
        "manager/slots.pyx",
        "        needed += hits[i] != NULL_BLOCK and"
        " m.pool.rows[hits[i]].ref_cnt == 0\n",
        "        needed += 0\n",
    ),
    Fault(
        "a full block is cached a token late",
        "manager/slots.pyx",
        "            at = min(at, limit - 1)\n",
        "            at = min(at, limit)\n",
    ),
    Fault(
        "blocks that a request takes do not mark its row as changed",
        "manager/slots.pyx",
        "        held.num_blocks += <int32_t> n\n        note_change(m, row)\n",
        "        held.num_blocks += <int32_t> n\n",
    ),
    Fault(
        "blocks that a window gives back do not mark the row as changed",
        "manager/slots.pyx",
        "        held.num_nulls = stop\n        note_change(m, row)\n",
        "        held.num_nulls = stop\n",
    ),
    Fault(
        "slots are computed in 32 bits",
        "manager/calls.pyx",
        "                <int64_t> ids[token // its.block_size] * its.block_size\n",
        "                ids[token // its.block_size] * its.block_size\n",
    ),
    Fault(
        "a preempted request still has tokens in flight",
        "manager/calls.pyx",
        "    m.requests[row].num_in_flight = 0\n",
        "",
    ),
    Fault(
        "a row keeps the last request's skip_lookup",
        "manager/request_rows.pyx",
        "    request.matched = request.skip_lookup = request.has_object = False\n",
        "    request.matched = request.has_object = False\n",
    ),
    Fault(
        "an append that fails keeps its hashes",
        "manager/requests.pyx",
        "        self.reserve_hashes(at, fresh, content.num_tokens + count)\n"
        "        (<list> made.block_hashes).extend(fresh)\n",
        "        (<list> made.block_hashes).extend(fresh)\n"
        "        self.reserve_hashes(at, fresh, content.num_tokens + count)\n",
    ),
    Fault(
        "a fork shares the block that its drafts are in",
        "manager/kv_cache_manager.pyx",
        "    cdef int32_t full = "
        "min(m.progress[row].num_computed, m.content[row].num_tokens)\n",
        "    cdef int32_t full = m.progress[row].num_computed\n",
    ),
    Fault(
        "a hit by a further key does not hold",
        "manager/prefix_match.pyx",
        "&key) and not index_has_side(\n                m.pool.index, &key, ids[i]\n"
        "            ):\n",
        "&key):\n",
    ),
    Fault(
        "EAGLE's extra block in front of a window is not cached",
        "manager/block_caching.pyx",
        "    need = cdiv(group.window - 1, group.block_size) + group.eagle\n",
        "    need = cdiv(group.window - 1, group.block_size)\n",
    ),
    Fault(
        "a chunk's blocks stay a token longer",
        "manager/slots.pyx",
        "            at = min(at, cdiv(limit, group.window) * group.window - 1)\n",
        "            at = min(at, cdiv(limit, group.window) * group.window)\n",
    ),
    Fault(
        "hashes that come late do not wake a request",
        "manager/requests.pyx",
        "        wake(&self.state, row)\n",
        "",
    ),
    Fault(
        "those behind the one that did not fit keep a step's tokens",
        "manager/step.pyx",
        "        if served < n:\n            take_back(m, rows, news, served, n)\n",
        "        if served < n:\n            take_back(m, rows, news, served + 1, n)\n",
    ),
    # -- v0's allocators ---------------------------------------------------------------
    Fault(
        "a shared block is written to in place",
        "prefix_caching/naive_block_allocator.pyx",
        "        cdef block_id_t row = block.row\n"
        "        if self.queue.rows[row].ref_cnt == 1:\n",
        "        cdef block_id_t row = block.row\n"
        "        if self.queue.rows[row].ref_cnt >= 1:\n",
    ),
    Fault(
        "a copy that its block refuses keeps its reference",
        "prefix_caching/naive_block_allocator.pyx",
        "        except BaseException:\n            self.drop_row(copy)\n",
        "        except BaseException:\n",
    ),
    Fault(
        "blocks of an allocation that fails keep their references",
        "prefix_caching/naive_block_allocator.pyx",
        "            for i in range(n - 1, -1, -1):\n",
        "            for i in range(n - 1, n - 1, -1):\n",
    ),
    Fault(
        "a table that cannot grow keeps a block",
        "prefix_caching/block_table.pyx",
        "            while len(blocks) > before:\n",
        "            while len(blocks) > before + 1:\n",
    ),
    Fault(
        "a window of a table frees a block early",
        "prefix_caching/block_table.pyx",
        "            computed // self._block_size - window,\n",
        "            computed // self._block_size - window + 1,\n",
    ),
    Fault(
        "of equals the evictor takes the one with the highest id",
        "prefix_caching/eviction_heap.pyx",
        "    return a.block_id < b.block_id\n",
        "    return a.block_id > b.block_id\n",
    ),
    Fault(
        "the evictor does not see a node's last child",
        "prefix_caching/eviction_heap.pyx",
        "        last = min(first + (1 << SHIFT), count)\n",
        "        last = min(first + (1 << SHIFT) - 1, count)\n",
    ),
    Fault(
        "a block freed during its step is marked as computed",
        "prefix_caching/cached_blocks.pyx",
        "            if tracked.touched:\n                tracked.computed = True\n",
        "            tracked.computed = True\n",
    ),
    Fault(
        "a hit of an old block is not computed",
        "prefix_caching/cached_blocks.pyx",
        "            self.tracked[row].computed = True\n",
        "            pass\n",
    ),
    Fault(
        "an extra hash is read without its sign",
        "prefix_caching/prefix_hash.pyx",
        "    return number.to_bytes(number.bit_length() // 8 + 1",
        "    return abs(number).to_bytes(number.bit_length() // 8 + 1",
    ),
    Fault(
        "blocks that share a physical one are swapped apart",
        "prefix_caching/cpu_gpu_block_allocator.pyx",
        "        if len(set(old_ids)) < len(old_ids):\n",
        "        if not old_ids:\n",
    ),
    # -- replay ------------------------------------------------------------------------
    Fault(
        "the second to last request admitted is preempted",
        "replay/_concurrent.pyx",
        "        cdef int32_t row = self.running[self.num_running - 1]\n",
        "        cdef int32_t row = self.running[max(self.num_running - 2, 0)]\n",
    ),
]


def seeded(fault: Fault, tree: Path) -> str:
    """The file's text with the fault in it."""
    text = (tree / "kvcache" / fault.file).read_text()
    if (found := text.count(fault.before)) != 1:
        raise SystemExit(f"{fault.name}: its text is {found} times in {fault.file}")
    return text.replace(fault.before, fault.after)


def nearest_first(source: str, tests: Path) -> list[str]:
    """All test files: of a file's module, of its folder, the others, slow ones."""
    folder, stem = Path(source).parent.as_posix(), Path(source).stem.strip("_")

    def distance(file: str) -> tuple[bool, bool, bool, str]:
        elsewhere = Path(file).parent.as_posix() != folder
        return file in SLOW, stem not in file, elsewhere, file

    found = [file.relative_to(tests).as_posix() for file in tests.rglob("test_*.py")]
    return sorted(found, key=distance)


def build(tree: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the build failed\n{done.stderr[-4000:]}")


def first_failure(tree: Path, source: str = "") -> str | None:
    """The test that fails first, or in which the suite crashes or hangs."""
    files = nearest_first(source, tree / "tests")
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONUNBUFFERED": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "CI": "true",  # hypothesis draws the same in every run
    }
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=no", "-o", "addopts="]
    command += ["-p", "no:cacheprovider", *(f"tests/{file}" for file in files)]
    log = tree / "suite.log"
    with log.open("w") as out:
        suite = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
    end, size, silent = "", 0, 0
    while suite.poll() is None:
        time.sleep(1)
        # Counted here, since a machine may sleep.
        silent = silent + 1 if size == log.stat().st_size else 0
        size = log.stat().st_size
        if silent > SILENCE:
            suite.kill()
            suite.wait()
            end = " (hangs)"
    if suite.returncode == 0:
        return None
    text = log.read_text(errors="replace")
    ran = TEST.findall(text)
    if suite.returncode not in (1, 2) and not end:
        if not ran:  # wrong arguments, and the like
            raise SystemExit(f"the suite did not run\n{text[-4000:]}")
        end = " (crashes)"
    return (ran[-1] if ran else "the import of the package") + end


def attempt(fault: Fault, built: Path) -> str | None:
    """What catches a fault."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(built, tree)  # times included: only what differs is built
        (tree / "kvcache" / fault.file).write_text(seeded(fault, tree))
        build(tree)
        return first_failure(tree, fault.file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fault", action="append", help="only this one")
    parser.add_argument("--check", action="store_true", help="only find the texts")
    options = parser.parse_args()
    names = [fault.name for fault in FAULTS]
    if unknown := set(options.fault or ()) - set(names):
        parser.error(f"no fault {unknown}; there are: {', '.join(names)}")
    for fault in FAULTS:
        seeded(fault, ROOT)
    print(f"{len(FAULTS)} faults fit the source", flush=True)
    if options.check:
        return
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "tree"
        shutil.copytree(ROOT, built, ignore=shutil.ignore_patterns(*NOT_COPIED))
        # What a fault is in compiles in half the time.
        setup = built / "setup.py"
        setup.write_text(setup.read_text().replace('"-O3"', '"-O0"'))
        with (built / "tests" / "conftest.py").open("a") as conftest:
            conftest.write(UNSHRUNK)
        build(built)
        if not options.fault and (failed := first_failure(built)):
            raise SystemExit(f"without any fault, this fails: {failed}")
        for fault in FAULTS:
            if options.fault and fault.name not in options.fault:
                continue
            start = time.monotonic()
            caught = attempt(fault, built)
            survived += caught is None
            spent = time.monotonic() - start
            print(f"{spent:4.0f} s  {fault.name}: {caught or 'SURVIVES'}", flush=True)
    print(f"{survived} survive")
    raise SystemExit(survived > 0)


if __name__ == "__main__":
    main()
