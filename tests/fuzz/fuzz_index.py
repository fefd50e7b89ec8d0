"""A map from block hashes to blocks, made by hand, beside dicts.

Keys are bytes of the input, or such as were used before; those of no length that a key
may have are refused, and change nothing. A map of many keys grows and shrinks.
"""

from choices import Choices

from kvcache import BlockHashToBlockMap, BlockPool, KVCacheBlock

IDS = range(-1, 7)
POOL = BlockPool(7, True, 16)
# Two blocks of every id but -1: the later one takes the place of the earlier one.
BLOCKS = [*map(KVCacheBlock, IDS), *POOL.blocks]
MOST_KEY_BYTES = 36
Model = dict[bytes, dict[int, KVCacheBlock]]
SEEDS = [bytes(40), bytes(range(250)), b"".join(b"\2%c\0\5" % i for i in range(20))]


def draw_key(choices: Choices, used: list[bytes]) -> bytes:
    length = choices.below(64)
    if length > MOST_KEY_BYTES + 1:
        return choices.pick(used)
    key = choices.take(length)
    used.append(key)
    return key


def insert(index: BlockHashToBlockMap, model: Model, key: bytes, block: object) -> None:
    index.insert(key, block)
    model.setdefault(key, {})[block.block_id] = block


def pop(index: BlockHashToBlockMap, model: Model, key: bytes, block_id: int) -> None:
    held = model.get(key, {})
    assert index.pop(key, block_id) is held.pop(block_id, None)
    if not held:
        model.pop(key, None)


def compare(index: BlockHashToBlockMap, model: Model, key: bytes) -> None:
    held = model.get(key, {})
    assert index.get_one_block(key) is next(iter(held.values()), None)
    assert [i for i in IDS if index.contain(key, i)] == sorted(held)


def refused(index: BlockHashToBlockMap, key: bytes) -> None:
    """A key that none may be, in every call."""
    for call in (
        lambda: index.insert(key, BLOCKS[0]),
        lambda: index.pop(key, 0),
        lambda: index.contain(key, 0),
        lambda: index.get_one_block(key),
    ):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError(f"a key of {len(key)} bytes is not refused")


def run(data: bytes) -> None:
    choices = Choices(data)
    index, used, fresh = BlockHashToBlockMap(), [b"k"], 0
    model: Model = {}
    while choices:
        kind, key = choices.below(8), draw_key(choices, used)
        if not 0 < len(key) <= MOST_KEY_BYTES:
            refused(index, key)
        elif kind < 3:
            insert(index, model, key, choices.pick(BLOCKS))
        elif kind < 6:
            pop(index, model, key, choices.pick(IDS))
            compare(index, model, key)
        elif kind == 6:  # many keys that are new
            block, count = choices.pick(BLOCKS), choices.below(256)
            for number in range(fresh, fresh + count):
                insert(index, model, b"%d" % number, block)
            fresh += count
        else:  # many keys that are there
            some = list(model)[choices.below(256) :: 1 + choices.below(3)]
            for each in some:
                pop(index, model, each, next(iter(model[each])))
        assert len(index) == len(model)
    for key in {*used, *model}:
        if 0 < len(key) <= MOST_KEY_BYTES:
            compare(index, model, key)
    assert index.nbytes >= 0
