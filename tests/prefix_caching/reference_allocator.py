"""The prefix-caching allocator in plain Python: what the compiled one is compared with.

A block's content is the tokens and extra hash of each block of its sequence up to it,
as one tuple: two blocks hold the same if and only if these are equal, and no hash is
needed. Free blocks without content are a list, free blocks with content a dict that is
searched for the one to evict. A refused call changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy, deepcopy
from dataclasses import dataclass

from kvcache import BlockStateError, NoFreeBlocksError

Tokens = tuple[int, ...]
Content = tuple[tuple[Tokens, int | None], ...]


def require(condition: object, error: type[Exception] = ValueError) -> None:
    if not condition:
        raise error


@dataclass(eq=False)
class ReferenceBlock:
    owner: ReferenceAllocator
    prev: ReferenceBlock | None
    extra: int | None = None
    tokens: Tokens = ()
    content: Content | None = None  # set as the block becomes full
    id: int | None = None  # of its physical block
    computed: bool = False
    total: int = 0  # tokens of its sequence when it was last written to

    def __post_init__(self) -> None:
        tokens, self.tokens = self.tokens, ()
        self.write(tokens)

    def write(self, tokens: Tokens) -> None:
        require(len(self.tokens) + len(tokens) <= self.owner.size, BlockStateError)
        self.tokens += tokens
        self.total = len(self.tokens) + (0 if self.prev is None else self.prev.total)
        before = () if self.prev is None else self.prev.content
        if self.is_full and before is not None:
            self.content = (*before, (self.tokens, self.extra))

    def append(self, tokens: Tokens) -> None:
        require(self.content is None and not self.computed, BlockStateError)
        require(len(self.tokens) + len(tokens) <= self.owner.size, BlockStateError)
        if tokens:
            self.owner.make_writable(self)
            self.write(tokens)
            if self.content is not None:
                self.owner.promote(self)

    @property
    def is_full(self) -> bool:
        return len(self.tokens) == self.owner.size

    def chain(self) -> list[ReferenceBlock]:
        """All blocks of its sequence up to it."""
        blocks = [self]
        while blocks[-1].prev is not None:
            blocks.append(blocks[-1].prev)
        return blocks[::-1]


class ReferenceAllocator:
    def __init__(self, ids: Iterable[int], size: int) -> None:
        self.size = size
        self.queue = list(ids)  # free blocks without content; the first goes first
        self.refs = dict.fromkeys(self.queue, 0)
        self.cached: dict[Content, int] = {}  # which block holds that content
        self.evictable: dict[int, tuple[float, int]] = {}  # free: last access, depth
        self.accessed: dict[int, float] = {}  # when each block in use was accessed
        self.computed: set[int] = set()  # blocks in use whose values are there
        self.touched: set[int] = set()  # blocks in use that were cached in this step
        self.copies: list[tuple[int, int]] = []
        self.hits: list[bool] = []  # what each full block met when it was placed

    # -- physical blocks ---------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self.queue) + len(self.evictable)

    def eviction_order(self) -> list[int]:
        """Least recently accessed first, then deepest, then lowest id."""

        def rank(block: int) -> tuple[float, int, int]:
            accessed, depth = self.evictable[block]
            return accessed, -depth, block

        return sorted(self.evictable, key=rank)

    def take(self) -> int:
        require(self.num_free, NoFreeBlocksError)
        if self.queue:
            block = self.queue.pop(0)
        else:
            block = self.eviction_order()[0]
            del self.evictable[block]
            self.cached = {c: b for c, b in self.cached.items() if b != block}
        self.refs[block] = 1
        return block

    def drop(self, block: int, depth: int) -> None:
        """Take one reference back."""
        self.refs[block] -= 1
        if self.refs[block] == 0:
            accessed = self.accessed.pop(block, -1)
            self.computed.discard(block)
            self.touched.discard(block)
            if block in self.cached.values():
                self.evictable[block] = accessed, depth
            else:
                self.queue.insert(0, block)

    def use(self, content: Content) -> int:
        """One more reference to the block that holds this content."""
        block = self.cached[content]
        if block in self.evictable:
            del self.evictable[block]
            self.computed.add(block)
        self.refs[block] += 1
        return block

    def cache(self, block: int, content: Content) -> None:
        self.cached[content] = block
        self.touched.add(block)

    def place(self, content: Content | None) -> tuple[int, bool]:
        """A physical block for this content, and whether it was cached."""
        if content is None:
            return self.take(), False
        self.hits.append(content in self.cached)
        if content in self.cached:
            return self.use(content), True
        block = self.take()
        self.cache(block, content)
        return block, False

    def place_all(self, blocks: list[ReferenceBlock]) -> list[tuple[int, bool]]:
        """Places for all of them, or NoFreeBlocksError and none is taken."""
        before = {name: copy(value) for name, value in vars(self).items()}
        try:
            return [self.place(block.content) for block in blocks]
        except NoFreeBlocksError:
            vars(self).update(before)
            raise

    def held(self, block: ReferenceBlock) -> int:
        require(block.owner is self)
        if block.id is None:
            raise BlockStateError
        return block.id

    # -- blocks ------------------------------------------------------------------

    def allocate_immutable(
        self,
        prev: ReferenceBlock | None,
        block_tokens: list[Tokens],
        extra: int | None = None,
        tail: bool = False,
    ) -> list[ReferenceBlock]:
        """With a tail, the last one need not be full."""
        blocks = []
        for tokens in block_tokens:
            prev = ReferenceBlock(self, prev, extra, tokens)
            blocks.append(prev)
        full = [block.content is not None for block in blocks]
        require(all(full[:-1] if tail else full), BlockStateError)
        for block, place in zip(blocks, self.place_all(blocks), strict=True):
            block.id, block.computed = place
        return blocks

    def allocate_mutable(
        self, prev: ReferenceBlock | None, extra: int | None = None
    ) -> ReferenceBlock:
        return ReferenceBlock(self, prev, extra, id=self.take())

    def make_writable(self, block: ReferenceBlock) -> int:
        """Copy on write: a shared physical block is left for one of its own."""
        old = self.held(block)
        if self.refs[old] > 1:
            new = self.take()
            self.drop(old, block.total)
            self.copies.append((old, new))
            block.id = new
        return self.held(block)

    def cow(self, block: ReferenceBlock) -> int:
        self.held(block)
        require(block.content is None, BlockStateError)
        return self.make_writable(block)

    def promote(self, block: ReferenceBlock) -> int:
        """Its content is cached, or it takes the block that holds it already."""
        old = self.held(block)
        if block.content is None:
            raise BlockStateError
        if block.content not in self.cached:
            self.cache(old, block.content)
        elif self.cached[block.content] != old:
            self.drop(old, block.total)
            block.id = self.use(block.content)
            block.computed = True
        return self.held(block)

    def free(self, block: ReferenceBlock) -> None:
        self.drop(self.held(block), block.total)
        block.id = None

    def fork(
        self, last: ReferenceBlock, count: int | None = None
    ) -> list[ReferenceBlock]:
        """The last blocks, so many of them, or all."""
        chain = last.chain()
        require(count is None or 0 < count <= len(chain))
        source = chain[-count:] if count else chain
        prev = source[0].prev
        blocks = []
        for old in source:
            prev = ReferenceBlock(self, prev, old.extra, old.tokens, id=self.held(old))
            prev.content = old.content
            blocks.append(prev)
        for block in blocks:
            self.refs[self.held(block)] += 1
        return blocks

    def check_swap_out(self, blocks: list[ReferenceBlock]) -> None:
        for block in blocks:
            self.held(block)
        require(len(set(blocks)) == len(blocks))

    def swap_out(self, blocks: list[ReferenceBlock]) -> None:
        self.check_swap_out(blocks)
        for block in blocks:
            self.free(block)

    def check_swap_in(self, blocks: list[ReferenceBlock]) -> None:
        require(len(set(blocks)) == len(blocks))
        deepcopy(self).place_all(blocks)

    def swap_in(self, blocks: list[ReferenceBlock]) -> None:
        self.check_swap_in(blocks)
        require(all(block.id is None for block in blocks), BlockStateError)
        for block, (place, _) in zip(blocks, self.place_all(blocks), strict=True):
            block.owner, block.id = self, place

    # -- marks and lookups -------------------------------------------------------

    def mark_accessed(self, ids: list[int], now: float) -> None:
        require(all(block in self.refs for block in ids))
        require(not any(block in self.queue for block in ids))
        for block in ids:
            if self.refs[block]:
                self.accessed[block] = now
            else:
                self.evictable[block] = now, self.evictable[block][1]

    def mark_computed(self) -> None:
        self.computed |= self.touched
        self.touched.clear()

    def is_computed(self, block: int) -> bool:
        return block in self.computed or block in self.evictable

    def find_cached_prefix(self, content: Content) -> int:
        """How many blocks, from the first on, are cached and computed."""
        for end in range(1, len(content) + 1):
            block = self.cached.get(content[:end])
            if block is None or not self.is_computed(block):
                return end - 1
        return len(content)

    def num_full_blocks_touched(self, blocks: list[ReferenceBlock]) -> int:
        """How many of them are full and not in a physical block that is in use."""
        in_use = [c for c, block in self.cached.items() if self.refs[block]]
        return sum(one.is_full and one.content not in in_use for one in blocks)

    @property
    def hit_rate(self) -> float:
        return sum(self.hits) / len(self.hits) if self.hits else 0.0

    def reset(self) -> bool:
        if any(self.refs.values()):
            return False
        # As if each was evicted and then freed.
        for block in self.eviction_order():
            self.queue.insert(0, block)
        self.evictable.clear()
        self.cached.clear()
        self.hits.clear()
        return True
