"""The prefix-caching allocator, its block tables and its evictor."""

from collections import OrderedDict, deque
from heapq import heapify, heappop, heappush
from itertools import count, cycle

from kvcache.prefix_caching import (
    BlockTable,
    CpuGpuBlockAllocator,
    Device,
    LRUEvictor,
    PrefixCachingBlockAllocator,
)

from .common import BLOCK_SIZE, REQUEST, SIZES, WHO, skip_what_is_too_big

# The objects of 1,000 blocks and their tokens stay in the second level of cache, those
# of 100,000 in none.
POOLS = SIZES[:2]
EVICTABLE = [*POOLS, 1_000_000]  # added by a call each
VOCABULARY = 128_256
SOME = [i * 7_919 % VOCABULARY for i in range(REQUEST * BLOCK_SIZE)]
GROWN = 256  # tokens
LONG = 2_000  # blocks of a long prompt
LONGEST = 200_000  # blocks of a chain that recursion would not survive


class PlainAllocator:
    """The same job with dicts, a list and an OrderedDict, and without any check.

    A block is a tuple: its id, its content hash, the block before it.
    """

    def __init__(self, num_blocks):
        self.unused = deque(range(num_blocks))
        self.ref_cnt = [0] * num_blocks
        self.id_of = {}  # content hash -> block id
        self.evictable = OrderedDict()  # block id -> content hash, first freed first

    def allocate_immutable_blocks(self, prev, block_token_ids):
        made = []
        for tokens in block_token_ids:
            content = hash((prev[1] if prev else None, *tokens))
            block_id = self.id_of.get(content)
            if block_id is not None:
                if self.ref_cnt[block_id] == 0:
                    del self.evictable[block_id]
            else:
                if self.unused:
                    block_id = self.unused.popleft()
                else:
                    block_id, old = self.evictable.popitem(last=False)
                    del self.id_of[old]
                self.id_of[content] = block_id
            self.ref_cnt[block_id] += 1
            prev = (block_id, content, prev)
            made.append(prev)
        return made

    def fork(self, last):
        made = []
        while last:
            made.append(last)
            self.ref_cnt[last[0]] += 1
            last = last[2]
        return made[::-1]

    def free(self, block):
        self.ref_cnt[block[0]] -= 1
        if self.ref_cnt[block[0]] == 0:
            self.evictable[block[0]] = block[1]

    def mark_blocks_as_accessed(self, ids, now):
        pass  # the order of freeing stands for it


def make_allocator(who, num_blocks):
    if who == "kvcache":
        return PrefixCachingBlockAllocator(num_blocks, BLOCK_SIZE)
    return PlainAllocator(num_blocks)


def tokens_of(number, blocks=REQUEST):
    """A request's tokens by block; no two requests begin alike."""
    tokens = [SOME[i % len(SOME)] for i in range(blocks * BLOCK_SIZE)]
    tokens[0] = VOCABULARY + number
    return [tokens[i : i + BLOCK_SIZE] for i in range(0, len(tokens), BLOCK_SIZE)]


def ids_of(who, blocks):
    return [block.block_id for block in blocks] if who == "kvcache" else []


def free_all(allocator, blocks):
    for block in blocks:
        allocator.free(block)


class Steady:
    """All blocks are cached and free; each call leaves as many free and cached."""

    params = (WHO, POOLS)
    param_names = ("who", "blocks")
    timeout = 300

    def setup(self, who, num_blocks):
        self.allocator = make_allocator(who, num_blocks)
        self.times = count()
        count_of = num_blocks // REQUEST
        cached = [tokens_of(number) for number in range(count_of)]
        others = [tokens_of(count_of + number) for number in range(count_of)]
        for tokens in cached:
            self.allocate_and_free(who, tokens)
        self.hits = cycle(cached)
        # Twice as much content as fits: by the time it comes again, it is gone.
        self.misses = cycle(others + cached)

    def allocate_and_free(self, who, tokens):
        blocks = self.allocator.allocate_immutable_blocks(None, tokens)
        now = float(next(self.times))
        self.allocator.mark_blocks_as_accessed(ids_of(who, blocks), now)
        free_all(self.allocator, blocks)

    def time_allocate_cached_and_free_100(self, who, num_blocks):
        self.allocate_and_free(who, next(self.hits))

    def time_allocate_with_eviction_and_free_100(self, who, num_blocks):
        self.allocate_and_free(who, next(self.misses))


class Shared:
    """The blocks are in use all the time."""

    params = (WHO, POOLS)
    param_names = ("who", "blocks")

    def setup(self, who, num_blocks):
        self.allocator = make_allocator(who, num_blocks)
        self.tokens = tokens_of(0)
        self.held = self.allocator.allocate_immutable_blocks(None, self.tokens)

    def time_allocate_shared_and_free_100(self, who, num_blocks):
        blocks = self.allocator.allocate_immutable_blocks(None, self.tokens)
        free_all(self.allocator, blocks)

    def time_fork_and_free_100(self, who, num_blocks):
        free_all(self.allocator, self.allocator.fork(self.held[-1]))


class Once:
    """What cannot be repeated on the same blocks: one pass over 1,000 of them."""

    params = (WHO, POOLS)
    param_names = ("who", "blocks")
    number = 1
    warmup_time = 0

    def setup(self, who, num_blocks):
        requests = [tokens_of(number) for number in range(1_000 // REQUEST)]
        self.empty = make_allocator(who, num_blocks)
        self.requests = requests
        self.full = make_allocator(who, num_blocks)
        self.held = []
        for tokens in requests:
            self.held += self.full.allocate_immutable_blocks(None, tokens)

    def time_allocate_missing_1000(self, who, num_blocks):
        for tokens in self.requests:
            self.empty.allocate_immutable_blocks(None, tokens)

    def time_free_1000(self, who, num_blocks):
        free_all(self.full, self.held)


class Table:
    """Block tables over an allocator for two devices."""

    params = (POOLS,)
    param_names = ("blocks",)

    def setup(self, num_blocks):
        self.allocator = CpuGpuBlockAllocator.create(
            "prefix_caching", num_blocks, num_blocks, BLOCK_SIZE
        )
        self.prompt = [token for tokens in tokens_of(0) for token in tokens]
        self.held = self.new_table(self.prompt)
        self.numbers = count(1)
        self.more = [[token] for token in range(GROWN)]

    def new_table(self, tokens):
        table = BlockTable(BLOCK_SIZE, self.allocator)
        table.allocate(tokens)
        return table

    def time_allocate_cached_and_free_100(self, num_blocks):
        self.new_table(self.prompt).free()

    def time_fork_and_free_100(self, num_blocks):
        self.held.fork().free()

    def time_append_256_tokens(self, num_blocks):
        """One a call, another request each time: what it fills was never cached."""
        table = self.new_table(tokens_of(next(self.numbers), 1)[0])
        for token in self.more:
            table.append_token_ids(token)
        table.free()

    def time_swap_out_and_in_100(self, num_blocks):
        blocks = self.held.blocks
        self.allocator.swap(blocks, Device.GPU, Device.CPU)
        self.allocator.swap(blocks, Device.CPU, Device.GPU)
        self.allocator.get_and_reset_swaps()


class Lookup:
    """Cached-prefix search and access times, of a prompt in use."""

    params = ([REQUEST, LONG],)
    param_names = ("hashes",)

    def setup(self, num_hashes):
        self.allocator = make_allocator("kvcache", LONG)
        self.held = self.allocator.allocate_immutable_blocks(
            None, tokens_of(0, num_hashes)
        )
        self.allocator.mark_blocks_as_computed([])
        self.hashes = [block.content_hash for block in self.held]
        self.ids = ids_of("kvcache", self.held)
        self.times = count()
        if len(self.allocator.find_cached_blocks_prefix(self.hashes)) != num_hashes:
            raise AssertionError("the prompt is not cached as a whole")

    def time_find_cached_blocks_prefix(self, num_hashes):
        self.allocator.find_cached_blocks_prefix(self.hashes)

    def time_mark_blocks_as_accessed(self, num_hashes):
        self.allocator.mark_blocks_as_accessed(self.ids, float(next(self.times)))


class LongChain:
    """One request of 200,000 blocks."""

    timeout = 300
    number = 1

    def setup(self):
        self.allocator = make_allocator("kvcache", LONGEST)
        self.held = self.allocator.allocate_immutable_blocks(
            None, tokens_of(0, LONGEST)
        )

    def time_fork_and_free(self):
        free_all(self.allocator, self.allocator.fork(self.held[-1]))


class PlainEvictor:
    """A heap whose stale entries are met when they come up."""

    def __init__(self):
        self.heap, self.known = [], {}

    def add(self, block_id, content_hash, num_hashed_tokens, last_accessed):
        entry = (last_accessed, -num_hashed_tokens, block_id, content_hash)
        self.known[block_id] = entry
        heappush(self.heap, entry)
        if len(self.heap) > 2 * len(self.known) + 16:
            self.heap = list(self.known.values())
            heapify(self.heap)

    def remove(self, block_id):
        del self.known[block_id]

    def update(self, block_id, last_accessed):
        _, depth, _, content_hash = self.known[block_id]
        self.add(block_id, content_hash, -depth, last_accessed)

    def evict(self):
        while True:
            entry = heappop(self.heap)
            if self.known.get(entry[2]) is entry:
                del self.known[entry[2]]
                return entry[2:]


class Evicting:
    """The evictor alone, holding so many blocks."""

    params = (WHO, EVICTABLE)
    param_names = ("who", "blocks")
    timeout = 300

    def setup(self, who, num_blocks):
        skip_what_is_too_big(who, num_blocks)
        self.evictor = LRUEvictor() if who == "kvcache" else PlainEvictor()
        for block_id in range(num_blocks):
            self.evictor.add(
                block_id, block_id, block_id % REQUEST, block_id // REQUEST
            )
        self.times = count(num_blocks)
        # In an order that goes all over the heap: the step and the sizes are coprime.
        self.ids = cycle([i * 7_919 % num_blocks for i in range(num_blocks)])

    def time_evict_and_add_100(self, who, num_blocks):
        evictor, now = self.evictor, float(next(self.times))
        for depth in range(REQUEST):
            block_id, content_hash = evictor.evict()
            evictor.add(block_id, content_hash, depth, now)

    def time_remove_and_add_100(self, who, num_blocks):
        evictor, now = self.evictor, float(next(self.times))
        for depth in range(REQUEST):
            block_id = next(self.ids)
            evictor.remove(block_id)
            evictor.add(block_id, block_id, depth, now)

    def time_update_100(self, who, num_blocks):
        evictor, now = self.evictor, float(next(self.times))
        for _ in range(REQUEST):
            evictor.update(next(self.ids), now)


class EvictorMemory:
    """Deterministic: bytes of C memory a block, however often blocks are updated."""

    params = (EVICTABLE,)
    param_names = ("blocks",)

    def track_bytes_a_block(self, num_blocks):
        evictor = LRUEvictor()
        for block_id in range(num_blocks):
            evictor.add(block_id, block_id, 0, 0.0)
        for block_id in range(num_blocks):
            evictor.update(block_id, 1.0)
        return evictor.nbytes / num_blocks

    track_bytes_a_block.unit = "bytes"
