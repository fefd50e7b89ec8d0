"""A pool beside its model (`reference_pool`): calls, faces and arguments from bytes.

What a call returns or raises is compared, and after it the counts and the free queue;
at the end all that can be seen of the pool. `check()` proves its invariants each time.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from choices import Choices

sys.path.append(str(Path(__file__).parent.parent))
from test_block_pool_state_machine import (
    BLOCK_FORMS,
    DIGESTS,
    GROUPS,
    HASH_FORMS,
    ID_FORMS,
    KEYS,
    REQUESTS,
    UNIT,
    Pair,
    Request,
    ids_of,
    key_of,
    outcome,
    walk,
)

from kvcache import BlockStateError

FORMS = [*BLOCK_FORMS, *ID_FORMS]
SEEDS = [
    bytes(40),
    bytes(range(60)),
    b"\x06\x01\x01" + bytes([0, 4, 0, 5, 3, 2, 1, 0, 4, 0, 1, 0, 0, 14, 0, 12, 0] * 4),
]


def agree(
    pair: Pair,
    modelled: Callable[[], object],
    actual: Callable[[], object],
    request: Request | None = None,
    group: int = 0,
) -> None:
    """Make a call on both sides: they return the same, or raise.

    One with two mistakes may be refused for either; all errors are ValueErrors.
    """
    expected = outcome(modelled)
    new = len(pair.model.events) - len(pair.subjects)
    pair.subjects += [(request, group)] * new
    found = outcome(actual)
    if isinstance(expected, type) and isinstance(found, type):
        assert issubclass(found, ValueError), found
    else:
        assert found == expected, (found, expected)


def draw_id(choices: Choices, pair: Pair) -> int:
    """A block of the pool."""
    return choices.below(pair.num_blocks)


def draw_ids(choices: Choices, pair: Pair, form: str, most: int = 6) -> list[int]:
    """Ids in a form; now and then one that is no block's, if the form can say so."""
    foreign = [] if form in BLOCK_FORMS else [-1, pair.num_blocks, 2**31 - 1]
    every = [*range(pair.num_blocks), *foreign]
    return [choices.pick(every) for _ in range(choices.below(most + 1))]


def draw_references(choices: Choices, pair: Pair, form: str) -> list[int]:
    """Blocks to give references back of; now and then one too many."""
    held = [0, *pair.references()]
    first, count = choices.below(len(held)), choices.below(len(held) + 1)
    ids = (held[first:] + held[:first])[:count]
    return ids + draw_ids(choices, pair, form, most=1)


# -- allocate and free ----------------------------------------------------------------


def get(choices: Choices, pair: Pair) -> None:
    n, form = choices.below(pair.num_blocks + 1), choices.pick(FORMS)
    agree(pair, lambda: pair.model.get(n), lambda: pair.get(n, form))


def free(choices: Choices, pair: Pair) -> None:
    form = choices.pick(FORMS)
    ids = draw_references(choices, pair, form)
    agree(pair, lambda: pair.model.free(ids), lambda: pair.call("free", ids, form))


def touch(choices: Choices, pair: Pair) -> None:
    form = choices.pick(FORMS)
    ids = draw_ids(choices, pair, form)
    agree(pair, lambda: pair.model.touch(ids), lambda: pair.call("touch", ids, form))


def unpin(choices: Choices, pair: Pair) -> None:
    ids = draw_references(choices, pair, "blocks")
    name = choices.pick(["ann", "bob"])
    agree(
        pair,
        lambda: pair.model.unpin(ids, name),
        lambda: pair.pool.unpin_blocks(
            pair.blocks(ids), lambda block: pair.told.append((name, block.block_id))
        ),
    )


def set_ref_cnt(choices: Choices, pair: Pair) -> None:
    block, count = draw_id(choices, pair), choices.below(4)

    def set_in_model() -> None:
        if count == 0 or pair.model.refs[block] == 0:
            raise ValueError
        pair.model.refs[block] = count

    agree(
        pair,
        set_in_model,
        lambda: setattr(pair.pool.blocks[block], "ref_cnt", count),
    )


# -- cache and look up ----------------------------------------------------------------


def cache_full_blocks(choices: Choices, pair: Pair) -> None:
    request, group = choices.pick(REQUESTS), choices.pick(GROUPS)
    factor = 1 + choices.below(2)
    most = len(request.block_hashes) // factor
    stop = 1 + choices.below(most)
    span = range(choices.below(stop), stop)
    table = [draw_id(choices, pair) for _ in range(stop)]
    mask = [choices.below(2) == 0 for _ in span] if choices.below(2) else None
    calls = pair.caching(request, table, span, factor, group, mask)
    agree(pair, *calls, request, group)


def cache_partial_block(choices: Choices, pair: Pair) -> None:
    request, group = choices.pick(REQUESTS), choices.pick(GROUPS)
    block, tokens = 1 + choices.below(pair.num_blocks - 1), choices.below(7 * UNIT)
    replace = choices.below(2) == 1
    if pair.aliases_need_order(block):
        return
    calls = pair.caching_partially(request, block, tokens, group, replace)
    agree(pair, *calls, request, group)


def cache_block_ids(choices: Choices, pair: Pair) -> None:
    form, group = choices.pick(list(ID_FORMS)), choices.pick(GROUPS)
    ids = draw_ids(choices, pair, form)
    ones = [choices.pick(DIGESTS) for _ in ids]
    hashes = HASH_FORMS[choices.pick(list(HASH_FORMS))](ones)
    agree(
        pair,
        lambda: pair.model.cache_ids(ids, [key_of(one, group) for one in ones]),
        lambda: pair.pool.cache_block_ids(ID_FORMS[form](ids), hashes, group),
        None,
        group,
    )


def insert_block_hash(choices: Choices, pair: Pair) -> None:
    block, key = draw_id(choices, pair), choices.pick(KEYS)
    tokens = choices.pick([None, *range(12)])
    if pair.aliases_need_order(block):
        return

    def insert_in_model() -> None:
        if block == 0:
            raise ValueError
        pair.model.add_key(key, block, tokens)

    agree(
        pair,
        insert_in_model,
        lambda: pair.pool._insert_block_hash(key, pair.pool.blocks[block], tokens),
    )


def set_block_hash(choices: Choices, pair: Pair) -> None:
    block, key = 1 + choices.below(pair.num_blocks - 1), choices.pick(KEYS)
    tokens = choices.pick([None, *range(12)])

    def set_in_model() -> None:
        if pair.model.keys[block]:
            raise BlockStateError
        pair.model.keys[block], pair.model.tokens[block] = [key], tokens

    agree(
        pair,
        set_in_model,
        lambda: pair.pool.blocks[block].set_block_hash(key, tokens),
    )


def move_block_hashes(choices: Choices, pair: Pair) -> None:
    source, target = draw_id(choices, pair), 1 + choices.below(pair.num_blocks - 1)
    agree(
        pair,
        lambda: pair.model.move(source, target),
        lambda: pair.pool.move_block_hashes(
            pair.pool.blocks[source], pair.pool.blocks[target]
        ),
    )


def evict(choices: Choices, pair: Pair) -> None:
    form = choices.pick(list(ID_FORMS))
    ids = draw_ids(choices, pair, form)
    agree(
        pair,
        lambda: pair.model.evict(ids),
        lambda: pair.pool.evict_block_ids(ID_FORMS[form](ids)),
    )


def reset_hash(choices: Choices, pair: Pair) -> None:
    block = draw_id(choices, pair)
    pair.model.drop_keys(block)
    pair.pool.blocks[block].reset_hash()


def reset_prefix_cache(choices: Choices, pair: Pair) -> None:
    agree(pair, pair.model.reset, pair.pool.reset_prefix_cache)


def match_prefix(choices: Choices, pair: Pair) -> None:
    request, hash_form = choices.pick(REQUESTS), choices.pick(list(HASH_FORMS))
    groups = [choices.pick(GROUPS) for _ in range(choices.below(3))]
    skipped = choices.below(3)
    rows = [pair.model.match_prefix(request.chain(group)[skipped:]) for group in groups]
    shortest = min(map(len, rows), default=0)
    hashes = HASH_FORMS[hash_form](request.block_hashes[skipped:])
    found = pair.pool.match_prefix(hashes, groups)
    assert [ids_of(blocks) for blocks in found] == [row[:shortest] for row in rows]


# -- events ---------------------------------------------------------------------------


def emit_events(choices: Choices, pair: Pair) -> None:
    request, group, n = choices.pick(REQUESTS), choices.pick(GROUPS), choices.below(5)

    def record_in_model() -> None:
        if n:
            chain = request.chain(group)[:n]
            pair.model.events.append(("stored", chain, None, range(n), UNIT))

    agree(
        pair,
        record_in_model,
        lambda: pair.pool.emit_cached_block_events(
            pair.for_pool(request), n, UNIT, group
        ),
        request,
        group,
    )


def take_events(choices: Choices, pair: Pair) -> None:
    if pair.pool.enable_kv_cache_events:
        pair.compare_events()
    pair.pool.take_events()
    pair.model.events.clear()
    pair.subjects.clear()


OPERATIONS = [
    get,
    free,
    touch,
    unpin,
    set_ref_cnt,
    cache_full_blocks,
    cache_partial_block,
    cache_block_ids,
    insert_block_hash,
    set_block_hash,
    move_block_hashes,
    evict,
    reset_hash,
    reset_prefix_cache,
    match_prefix,
    emit_events,
    take_events,
]


def run(data: bytes) -> None:
    choices = Choices(data)
    pair = Pair(2 + choices.below(14), choices.below(4) > 0, choices.below(2) > 0)
    rows = pair.pool.blocks.as_array()
    while choices:
        choices.pick(OPERATIONS)(choices, pair)
        pair.pool.check()
        assert rows["ref_cnt"].tolist() == pair.model.refs
        assert walk(rows) == pair.model.queue
    pair.compare()
