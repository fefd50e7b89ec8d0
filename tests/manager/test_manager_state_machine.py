"""Managers and their model (`reference_manager`) get the same random calls.

After each, `check()` proves the manager's invariants, and all that can be seen of it is
compared: tables, free blocks in their order, references, cached blocks, statistics.
Refused calls are part of the game: both raise, and the comparison shows that nothing
changed. Beside them runs a memory: what the slot mapping says is written to it, forks
are copied in it, and what the next token attends to must be there, token for token.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reference_manager import ReferenceManager, num_skipped

from kvcache.hashing import hash_blocks, sha256
from kvcache.manager import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    KVCacheManager,
    Mamba,
    SlidingWindow,
)

Rule = TypeVar("Rule", bound=Callable[..., Any])
UNIT = 2
LONGEST = 40
MOST_REQUESTS = 5
FULL = FullAttention(2)
MODELS: dict[str, list[Any]] = {
    "full": [FULL],
    "window": [SlidingWindow(2, 5)],
    "chunks": [ChunkedLocal(2, 4)],
    "full + window": [FULL, SlidingWindow(2, 3)],
    "full 2 + window 4": [FULL, SlidingWindow(4, 5)],
    "full 4 + window 2": [FullAttention(4), SlidingWindow(2, 2)],
    "full + retaining window": [FULL, SlidingWindow(2, 5, extra_retained_tokens=3)],
    "full + chunks": [FULL, ChunkedLocal(2, 4)],
    "window + chunks": [SlidingWindow(2, 5), ChunkedLocal(2, 6)],
    "2 full + window": [FULL, FULL, SlidingWindow(2, 4)],
    "full + 2 windows": [FULL, SlidingWindow(2, 3), SlidingWindow(2, 8)],
}
UNCACHED: dict[str, list[Any]] = {
    "full, uncached": [FULL],
    "full + window, uncached": [FULL, SlidingWindow(2, 5)],
    "full + Mamba none": [FULL, Mamba(LONGEST, num_speculative_blocks=1)],
    "full + Mamba all": [FULL, Mamba(2, "all")],
    "window + cross": [SlidingWindow(2, 5), CrossAttention(4)],
}
# Prompts that often begin alike.
TEXTS = [[0] * LONGEST, [0, 1] * (LONGEST // 2)]

few = st.integers(0, 6)
flags = st.sampled_from([False, False, True])
seldom = st.sampled_from([False] * 7 + [True])
tokens_lists = st.lists(st.integers(0, 1), max_size=5)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    text = draw(st.sampled_from(TEXTS))
    return text[: draw(st.integers(0, 18))] + draw(tokens_lists)


def first_attended(group: Any, computed: int) -> int:
    if isinstance(group, SlidingWindow):  # what is retained before it does not count
        return max(0, computed - (group.window - 1))
    return num_skipped(group, computed)


def some(wanted: Callable[[Any], bool]) -> Callable[[Rule], Rule]:
    """A rule that is for requests of which there is one."""
    return precondition(lambda self: any(map(wanted, self.model.rows.values())))


def is_known(request: Any) -> bool:
    return True


def is_waiting(request: Any) -> bool:
    return not request.running


def is_running(request: Any) -> bool:
    return bool(request.running)


def has_drafts(request: Any) -> bool:
    return bool(request.computed > len(request.tokens))


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or what it raises."""
    try:
        return call()
    except ValueError as error:
        return error


class ManagerMachine(RuleBasedStateMachine):
    groups: list[Any]
    caching = True

    @initialize(
        num_blocks=st.sampled_from([24, 40, 16, 10, 6]),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
        in_flight=st.sampled_from([None, None, 6]),
        events=seldom,
    )
    def make(
        self, num_blocks: int, watermark: float, in_flight: int | None, events: bool
    ) -> None:
        self.events = events
        self.real = KVCacheManager(
            num_blocks,
            self.groups,
            hash_block_size=UNIT,
            max_model_len=LONGEST,
            max_num_requests=MOST_REQUESTS,
            max_in_flight_tokens=in_flight,
            enable_caching=self.caching,
            watermark=watermark,
            enable_kv_cache_events=events,
            hash_fn=sha256,
        )
        self.model = ReferenceManager(
            self.groups,
            num_blocks,
            UNIT,
            LONGEST,
            MOST_REQUESTS,
            caching=self.caching,
            watermark=watermark,
            max_in_flight=in_flight,
        )
        self.given_hashes: set[int] = set()  # rows whose hashes the caller makes
        self.popped: list[list[int]] = []
        self.memory: list[dict[tuple[int, int], Any]] = [{} for _ in self.groups]
        self.before: dict[int, list[list[int]]] = {}  # tables, as they were listed
        self.draft = 0

    # -- comparison --------------------------------------------------------------

    def agree(self, modelled: Callable[[], Any], actual: Callable[[], Any]) -> Any:
        """The same outcome on both sides; None if it was to raise."""
        expected, found = outcome(modelled), outcome(actual)
        refused = [isinstance(each, ValueError) for each in (expected, found)]
        assert refused[0] == refused[1], (expected, found)
        if refused[0]:
            return None
        if isinstance(found, tuple):
            found = tuple(
                part.tolist() if hasattr(part, "tolist") else part for part in found
            )
        assert found == expected
        return expected

    @invariant()
    def manager_and_model_are_equal(self) -> None:
        real, model = self.real, self.model
        real.check()
        groups = range(len(self.groups))
        for row, request in model.rows.items():
            tables = [real.block_ids(row, g).tolist() for g in groups]
            assert tables == request.tables
            assert [real.num_blocks(row, g) for g in groups] == [*map(len, tables)]
            assert real.num_tokens(row) == len(request.tokens)
            assert real.num_computed_tokens(row) == request.computed
        pool = real.block_pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        assert free == model.pool.queue
        assert [block.ref_cnt for block in pool.blocks[1:]] == model.pool.refs[1:]
        cached = [block.block_hash is not None for block in pool.blocks]
        assert cached == [bool(keys) for keys in model.pool.keys]
        assert real.num_requests == len(model.rows)
        assert real.occupancy() == model.occupancy()
        assert real.usage == pool.get_usage()

    @invariant()
    def the_next_token_finds_what_it_attends_to(self) -> None:
        for request in self.model.rows.values():
            if not request.running:
                continue
            known = min(request.computed, len(request.tokens))
            for g, group in enumerate(self.groups):
                if isinstance(group, (Mamba, CrossAttention)):
                    continue
                for i in range(first_attended(group, known), known):
                    block = request.tables[g][i // group.block_size]
                    held = self.memory[g].get((block, i % group.block_size))
                    assert block and held == request.key(0, i + 1), (g, i)

    def write(self, row: int, count: int, external: int = 0) -> None:
        """Compute the last tokens of a request, as far as they are new."""
        request = self.model.rows[row]
        for g, group in enumerate(self.groups):
            if isinstance(group, (Mamba, CrossAttention)):
                continue
            slots = self.real.slot_mapping([row], [count], g)
            assert slots.dtype == np.int64
            assert slots.tolist() == self.model.slots([row], [count], g)
            for i in range(request.computed - count - external, request.computed):
                block = request.tables[g][i // group.block_size]
                if i >= request.computed - count:
                    slot = int(slots[i - request.computed + count])
                    assert slot == block * group.block_size + i % group.block_size
                content: Any = request.key(0, i + 1)
                if i >= len(request.tokens):
                    self.draft += 1
                    content = self.draft
                self.memory[g][block, i % group.block_size] = content

    # -- requests ----------------------------------------------------------------

    def draw_row(self, data: st.DataObject, wanted: Callable[[Any], bool]) -> int:
        """A request that is wanted, more often than not; or a vacant row."""
        rows = [row for row, request in self.model.rows.items() if wanted(request)]
        others = [*self.model.rows, MOST_REQUESTS - 1, -1, MOST_REQUESTS]
        return int(data.draw(st.sampled_from(rows * 20 + others), label="row"))

    def hashes(self, tokens: list[int]) -> list[bytes]:
        return [
            row.tobytes()
            for row in np.asarray(
                hash_blocks(np.array(tokens, np.int64), UNIT, hash_fn=sha256)
            )
        ]

    @rule(tokens=prompts(), salt=seldom, skip=seldom, give_hashes=flags)
    def add_request(
        self, tokens: list[int], salt: bool, skip: bool, give_hashes: bool
    ) -> None:
        give_hashes = give_hashes and not salt and not self.events
        what: dict[str, Any] = {"cache_salt": "salt" if salt else None}
        what["skip_reading_prefix_cache"] = skip
        if give_hashes:
            what |= {"hashes": self.hashes(tokens), "num_tokens": len(tokens)}
        else:
            what["tokens"] = tokens
        row = self.agree(
            lambda: self.model.add(tokens, what["cache_salt"], skip),
            lambda: self.real.add_request(**what),
        )
        self.given_hashes.discard(row)
        if give_hashes and row is not None:
            self.given_hashes.add(row)

    @precondition(lambda self: self.model.vacant)
    @rule(tokens=prompts(), lookahead=st.sampled_from([0, 0, 1]), give_hashes=flags)
    def start(self, tokens: list[int], lookahead: int, give_hashes: bool) -> None:
        """A request that is let in at once."""
        row = self.model.vacant[-1]
        self.add_request(tokens, salt=False, skip=False, give_hashes=give_hashes)
        if row not in self.model.rows:  # an empty prompt
            return
        self.agree(lambda: self.model.match(row), lambda: self.real.match(row))
        left = len(tokens) - self.model.rows[row].hit_length
        self.allocate(row, left, lookahead)

    def append_to(self, row: int, tokens: list[int]) -> None:
        def actual() -> None:
            if row not in self.given_hashes or row not in self.model.rows:
                return self.real.append(row, tokens)
            known = self.model.rows[row].tokens
            if not appended:  # it was refused
                known = known + tokens
            fresh = self.hashes(known)[before // UNIT :]
            return self.real.append(row, num_tokens=len(tokens), hashes=fresh)

        before = len(self.model.rows[row].tokens) if row in self.model.rows else 0
        appended = not isinstance(
            outcome(lambda: self.model.append(row, list(tokens))), ValueError
        )
        found = outcome(actual)
        assert isinstance(found, ValueError) != appended
        if appended:
            self.drafts_were_right(row, before)

    def drafts_were_right(self, row: int, known: int) -> None:
        """Tokens that were appended where drafts are computed are these drafts."""
        request = self.model.rows[row]
        for g, group in enumerate(self.groups):
            if isinstance(group, (Mamba, CrossAttention)):
                continue
            for i in range(known, min(len(request.tokens), request.computed)):
                place = request.tables[g][i // group.block_size], i % group.block_size
                self.memory[g][place] = request.key(0, i + 1)

    @some(is_known)
    @rule(data=st.data(), tokens=tokens_lists)
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        self.append_to(self.draw_row(data, is_known), tokens)

    @some(is_known)
    @rule(data=st.data())
    def append_step(self, data: st.DataObject) -> None:
        rows = data.draw(st.permutations(sorted(self.model.rows)), label="rows")
        rows = [row for row in rows if row not in self.given_hashes]
        if not data.draw(seldom, label="to drafts"):
            rows = [row for row in rows if not has_drafts(self.model.rows[row])]
        if data.draw(seldom, label="one twice"):
            rows = rows + rows[:1]
        tokens = [row % 2 for row in rows]
        known = [len(self.model.rows[row].tokens) for row in rows]
        self.agree(
            lambda: self.model.append_step(rows, tokens),
            lambda: self.real.append_step(np.array(rows, np.int32), tokens),
        )
        for row, count in zip(rows, known, strict=True):
            self.drafts_were_right(row, count)

    @some(is_known)
    @rule(data=st.data(), back=st.integers(0, 6))
    def truncate(self, data: st.DataObject, back: int) -> None:
        row = self.draw_row(data, is_known)
        known = len(self.model.rows[row].tokens) if row in self.model.rows else 1
        self.agree(
            lambda: self.model.truncate(row, known - back),
            lambda: self.real.truncate(row, known - back),
        )

    @some(is_running)
    @rule(data=st.data(), count=few)
    def set_in_flight(self, data: st.DataObject, count: int) -> None:
        row = self.draw_row(data, is_running)
        self.agree(
            lambda: self.model.set_in_flight(row, count),
            lambda: self.real.set_in_flight(row, count),
        )

    @some(is_running)
    @rule(data=st.data(), back=st.sampled_from([1, 1, 2, 5, -1]))
    def compute_again(self, data: st.DataObject, back: int) -> None:
        row = self.draw_row(data, is_running)
        request = self.model.rows.get(row)
        count = min(len(request.tokens), request.computed) - back if request else 0
        self.agree(
            lambda: self.model.set_computed(row, count),
            lambda: self.real.set_num_computed_tokens(row, count),
        )

    # -- match and allocate ------------------------------------------------------

    @some(is_waiting)
    @rule(data=st.data(), limit=st.sampled_from([None, None, None, 0, 3, 8, 2**30]))
    def match(self, data: st.DataObject, limit: int | None) -> None:
        row = self.draw_row(data, is_waiting)
        self.agree(
            lambda: self.model.match(row, limit), lambda: self.real.match(row, limit)
        )

    @some(is_waiting)
    @rule(
        data=st.data(),
        match_first=st.sampled_from([True, True, True, False]),
        share=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
        lookahead=st.sampled_from([0, 0, 1, 4]),
        external=st.sampled_from([0, 0, 0, 1, 4, 9]),
        encoder=st.sampled_from([0, 3, 9]),
        delay=seldom,
        must_fit=flags,
        reserved=st.sampled_from([0, 0, 0, 2, 7]),
        scheduled=flags,
    )
    def admit(
        self,
        data: st.DataObject,
        match_first: bool,
        share: float,
        lookahead: int,
        external: int,
        encoder: int,
        delay: bool,
        must_fit: bool,
        reserved: int,
        scheduled: bool,
    ) -> None:
        row = self.draw_row(data, is_waiting)
        if match_first:
            self.agree(lambda: self.model.match(row), lambda: self.real.match(row))
        request = self.model.rows.get(row)
        left = len(request.tokens) - request.hit_length if request else 1
        external = min(external, left)
        new = int((left - external) * share)
        self.allocate(
            row, new, lookahead, external, encoder, delay, must_fit, reserved, scheduled
        )

    def allocate(
        self,
        row: int,
        new: int,
        lookahead: int = 0,
        external: int = 0,
        encoder: int = 0,
        delay: bool = False,
        must_fit: bool = False,
        reserved: int = 0,
        scheduled: bool = True,
    ) -> None:
        options = (external, encoder, delay, must_fit, reserved, scheduled)
        request = self.model.rows.get(row)
        if request and has_drafts(request):  # in flight until they are settled
            count = request.computed - len(request.tokens)
            self.model.set_in_flight(row, count)
            self.real.set_in_flight(row, count)

        def actual() -> Any:
            found = self.real.allocate_slots(
                row,
                new,
                num_lookahead_tokens=lookahead,
                num_external_computed_tokens=external,
                num_encoder_tokens=encoder,
                delay_cache_blocks=delay,
                full_sequence_must_fit=must_fit,
                reserved_blocks=reserved,
                has_scheduled_requests=scheduled,
            )
            return None if found is None else [ids.tolist() for ids in found]

        served = self.agree(
            lambda: self.model.allocate(row, new, lookahead, *options), actual
        )
        if served is not None:
            self.write(row, new, external)

    @some(is_running)
    @rule(
        data=st.data(),
        drafts=st.sampled_from([0, 0, 0, 1, 2]),
        lookahead=st.sampled_from([0, 0, 2]),
        delay=seldom,
        must_fit=seldom,
        reserved=st.sampled_from([0] * 9 + [4]),
    )
    def run_one(
        self,
        data: st.DataObject,
        drafts: int,
        lookahead: int,
        delay: bool,
        must_fit: bool,
        reserved: int,
    ) -> None:
        row = self.draw_row(data, is_running)
        request = self.model.rows.get(row)
        left = len(request.tokens) - request.computed if request else 1
        new = data.draw(st.integers(0, max(left, 0)), label="new") + drafts
        self.allocate(
            row, new, lookahead, delay=delay, must_fit=must_fit, reserved=reserved
        )

    @some(has_drafts)
    @rule(data=st.data(), right=st.integers(0, 2))
    def settle_drafts(self, data: st.DataObject, right: int) -> None:
        """Some of the drafts are tokens now; all others are taken back."""
        ahead = [row for row, each in self.model.rows.items() if has_drafts(each)]
        row = data.draw(st.sampled_from(ahead), label="row")
        request = self.model.rows[row]
        right = min(right, request.computed - len(request.tokens))
        tokens = [1] * min(right, LONGEST - len(request.tokens))
        self.append_to(row, tokens)
        keep = len(request.tokens)
        self.agree(
            lambda: self.model.truncate(row, keep),
            lambda: self.real.truncate(row, keep),
        )

    @some(is_running)
    @rule(
        data=st.data(),
        lookahead=st.sampled_from([0, 0, 1]),
        twice=seldom,
        grow=st.booleans(),
    )
    def step(
        self, data: st.DataObject, lookahead: int, twice: bool, grow: bool
    ) -> None:
        """A decode step of all that can take part, in any order."""
        rows = sorted(
            row
            for row, request in self.model.rows.items()
            if request.running and len(request.tokens) < LONGEST
        )
        rows = data.draw(st.permutations(rows), label="rows")
        if grow:
            rows = [row for row in rows if row not in self.given_hashes]
            rows = [row for row in rows if not has_drafts(self.model.rows[row])]
            self.agree(
                lambda: self.model.append_step(rows, [0] * len(rows)),
                lambda: self.real.append_step(rows, [0] * len(rows)),
            )
        rows = [
            row
            for row in rows
            if len(self.model.rows[row].tokens) > self.model.rows[row].computed
        ]
        counts = [
            len(self.model.rows[row].tokens) - self.model.rows[row].computed
            for row in rows
        ]
        if twice:
            rows, counts = rows + rows[:1], counts + counts[:1]
        done = self.agree(
            lambda: self.model.step(rows, counts, lookahead),
            lambda: self.real.allocate_step(
                np.array(rows, np.int32), counts, num_lookahead_tokens=lookahead
            ),
        )
        if done is not None:
            for row, count in zip(rows[: done[0]], counts, strict=False):
                self.write(row, count)

    @some(is_running)
    @rule(data=st.data(), back=st.sampled_from([0, 0, 1, 3, -1]))
    def cache_blocks(self, data: st.DataObject, back: int) -> None:
        row = self.draw_row(data, is_running)
        request = self.model.rows.get(row)
        count = min(len(request.tokens), request.computed) - back if request else 1
        self.agree(
            lambda: self.model.cache_blocks(row, count),
            lambda: self.real.cache_blocks(row, count),
        )

    # -- the end -----------------------------------------------------------------

    @some(is_known)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        row = self.draw_row(data, is_known)
        self.agree(lambda: self.model.free(row), lambda: self.real.free(row))

    @some(is_running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        row = self.draw_row(data, is_running)
        self.agree(lambda: self.model.preempt(row), lambda: self.real.preempt(row))

    @some(is_running)
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        row = self.draw_row(data, is_running)
        ids = self.agree(
            lambda: self.model.pop(row), lambda: self.real.pop_block_ids(row).tolist()
        )
        if ids is not None:
            self.popped.append(ids)

    @precondition(lambda self: self.popped)
    @rule()
    def free_what_was_popped(self) -> None:
        ids = self.popped.pop(0)[::-1]
        self.model.pool.free(ids)
        self.real.block_pool.free_block_ids(ids)

    @some(is_running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row = self.draw_row(data, is_running)

        def actual() -> Any:
            found = self.real.fork(row)
            if found is None:
                return None
            child, copies = found
            assert copies.dtype == np.int32 and copies.shape == (len(copies), 2)
            return child, [(int(a), int(b)) for a, b in copies]

        done = self.agree(lambda: self.model.fork(row), actual)
        if done is None:
            return
        child, copies = done
        self.given_hashes.discard(child)
        if row in self.given_hashes:
            self.given_hashes.add(child)
        for memory in self.memory:
            for source, target in copies:
                for place, content in list(memory.items()):
                    if place[0] == source:
                        memory[target, place[1]] = content

    @precondition(lambda self: any(self.model.pool.keys))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A block loses its content, which somebody may have matched."""
        cached = [block for block, keys in enumerate(self.model.pool.keys) if keys]
        block = data.draw(st.sampled_from(cached), label="block")
        self.model.pool.evict([block])
        self.real.evict_blocks({block})

    @precondition(lambda self: any(self.model.pool.keys))
    @rule()
    def reset(self) -> None:
        self.agree(self.model.reset, self.real.reset_prefix_cache)

    # -- what is listed ----------------------------------------------------------

    @precondition(lambda self: self.model.changed)
    @rule()
    def take_changed_rows(self) -> None:
        listed = self.real.take_changed_rows().tolist()
        assert len(set(listed)) == len(listed)
        now = {row: list(map(list, r.tables)) for row, r in self.model.rows.items()}
        nothing: list[list[int]] = [[] for _ in self.groups]
        for row in {*now, *self.before}:
            if now.get(row, nothing) != self.before.get(row, nothing):
                assert row in listed
        assert set(self.model.changed) <= set(listed)
        self.before, self.model.changed = now, []

    @precondition(lambda self: any(self.model.stats))
    @rule()
    def take_statistics(self) -> None:
        stats = self.real.take_prefix_cache_stats()
        found = [stats.requests, stats.queries, stats.hits]
        found += [
            stats.preempted_requests,
            stats.preempted_queries,
            stats.preempted_hits,
        ]
        assert found == self.model.stats
        self.model.stats = [0] * 6

    @invariant()
    def events_come_where_they_are_wanted(self) -> None:
        assert self.real.take_events() == [] or self.events


def machine_of(groups: list[Any], caching: bool) -> type[ManagerMachine]:
    return type("Machine", (ManagerMachine,), {"groups": groups, "caching": caching})


MACHINES = {
    f"manager, {name}": machine_of(groups, table is MODELS)
    for table in (MODELS, UNCACHED)
    for name, groups in table.items()
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_manager_does_what_its_model_does(name: str) -> None:
    run_state_machine_as_test(
        MACHINES[name],
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, database=None
        ),
    )
