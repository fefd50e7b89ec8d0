"""The blocks of a sequence: tokens, and the physical block that holds them.

Stores: the tokens, the way to the block before, the id of the physical block; a
prefix-caching block also its content hash, computed once, when it becomes full.
Invariant: a block that belongs to one of kvcache's allocators holds a physical block
if and only if it has one reference to it; only the allocator gives or takes it.
Costs: 180 bytes and 8 a token of room; the cyclic collector does not see blocks, which
is safe because no allocator refers to one. Chains of any length go without recursion.
Threads: each call is atomic.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.list cimport PyList_CheckExact
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from cpython.tuple cimport PyTuple_CheckExact
from libc.math cimport isnan
from libc.stdint cimport INT64_MAX
from libc.string cimport memcpy

import builtins

from kvcache._args cimport as_int, no_copy
from kvcache._lock cimport unshared
from kvcache._memory cimport copy_bytes
from kvcache._types cimport MAX_BLOCKS
from kvcache.prefix_caching.prefix_hash cimport (
    copy_small_tokens,
    copy_tokens,
    digest_after,
    digest_block,
    encode_extra,
    exact_tokens,
    prefix_hash_of,
)

from kvcache.errors import BlockStateError
from kvcache.prefix_caching import prefix_hash
from kvcache.prefix_caching.interfaces import Block

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*) nogil

# Cython's own isinstance does not see what a mock claims to be.
cdef object is_instance = builtins.isinstance

cdef double NEVER_ACCESSED = -1.0


cdef class BlockOwner:
    """What both kinds of allocators have in common; not to be made itself."""

    def __cinit__(self, *args, **kwargs):
        self.ids = BlockIds(())

    def __reduce__(self):
        raise no_copy(self)

    @cython.critical_section
    def get_num_total_blocks(self):
        """Number of physical blocks."""
        return self.ids.count

    @cython.critical_section
    def get_physical_block_id(self, absolute_id):
        """Place of a block's id among the ids in ascending order, from 0 on. O(1).

        Raises:
            ValueError: There is no such block.
        """
        return self.ids.row_of(absolute_id)

    @property
    @cython.critical_section
    def all_block_ids(self):
        """The ids, a frozenset."""
        return self.ids.as_frozenset()

    cdef block_id_t held_row(self, object block) except -1:
        raise NotImplementedError

    cdef int require_copies(self, Py_ssize_t n) except -1:
        raise NotImplementedError

    cdef void make_writable(self, TokenBlock block) noexcept:
        pass

    cdef void promote(self, TokenBlock block) noexcept:
        pass

    cdef list make_chain(self, object prev, object pieces, object extra_hash):
        raise NotImplementedError

    cdef int require_places(self, list blocks, set seen) except -1:
        raise NotImplementedError

    cdef void place_all(self, list blocks, bint fresh) noexcept:
        pass

    cdef Py_ssize_t choices(self, list blocks, block_id_t* rows) except -1:
        raise NotImplementedError

    cdef void release_all(self, list blocks) noexcept:
        pass


@cython.no_gc
@cython.freelist(1024)
cdef class TokenBlock:
    """What both kinds of blocks have in common; not to be made itself."""

    def __cinit__(self):
        self.row = NO_ROW
        self.id = NO_BLOCK_ID
        self.accessed = NEVER_ACCESSED

    def __dealloc__(self):
        # Letting the block before go from here could recurse as deep as the chain.
        cdef PyObject* block = self.prev
        cdef PyObject* before
        self.prev = NULL
        while block != NULL:
            before = NULL
            if Py_REFCNT(block) == 1 and isinstance(<object> block, TokenBlock):
                before = (<TokenBlock> block).prev
                (<TokenBlock> block).prev = NULL
            Py_DECREF(<object> block)
            block = before

    def __reduce__(self):
        raise no_copy(self)

    cdef void belong_to(self, object allocator) noexcept:
        self.allocator = allocator
        self.owner = NULL
        if isinstance(allocator, BlockOwner):
            self.owner = <PyObject*> allocator

    cdef int set_prev(self, object prev) except -1:
        if prev is None:
            return 0
        Py_INCREF(prev)
        self.prev = <PyObject*> prev
        return 0

    cdef int make_room(self, Py_ssize_t n) except -1:
        """Prove that n more tokens can be written."""
        if n > self.size - self.num_tokens:
            raise BlockStateError(
                f"{n} more tokens do not fit {self!r}, which has room for"
                f" {self.size - self.num_tokens}"
            )
        cdef bytes room
        cdef int64_t* tokens
        if n and (self.room is None or Py_REFCNT(<PyObject*> self.room) > 1):
            room = PyBytes_FromStringAndSize(NULL, self.size * sizeof(int64_t))
            tokens = <int64_t*> PyBytes_AS_STRING(room)
            copy_bytes(tokens, self.tokens, self.num_tokens * sizeof(int64_t))
            self.room, self.tokens = room, tokens
        return 0

    cdef bint is_shared(self) except -1:
        if self.row == NO_ROW:
            raise BlockStateError(f"{self!r} holds no physical block: it was freed")
        return (<BlockOwner> self.owner).store.rows[self.row].ref_cnt > 1

    cdef bint prepare(self, object tokens) except -1:
        raise NotImplementedError

    cdef void append(self, object tokens) noexcept:
        pass

    cdef void write(self, object tokens) noexcept:
        """Put tokens, for which `make_room` has made room, behind those in it."""
        copy_tokens(tokens, self.tokens + self.num_tokens)
        self.num_tokens += len(tokens)
        self.total += len(tokens)

    cdef int fill(self, object token_ids) except -1:
        """Put the first tokens into a block that nobody else knows yet."""
        cdef Py_ssize_t n
        token_ids = unshared(token_ids)
        if PyList_CheckExact(token_ids) or PyTuple_CheckExact(token_ids):
            n = len(token_ids)
            self.make_room(n)
            if copy_small_tokens(token_ids, n, self.tokens):
                self.num_tokens = n
                self.total += n
                return 0
        token_ids = exact_tokens(token_ids)
        self.make_room(len(token_ids))
        self.write(token_ids)
        return 0

    cdef void share_content(self, TokenBlock source) noexcept:
        """Hold what another block holds, but for what is before it."""
        self.room, self.tokens = source.room, source.tokens
        self.num_tokens, self.total = source.num_tokens, source.total
        memcpy(self.digest, source.digest, DIGEST_BYTES)
        self.has_digest = source.has_digest
        self.extra, self.extra_bytes = source.extra, source.extra_bytes

    @cython.critical_section
    def __repr__(self):
        return (
            f"{type(self).__name__}(block_id={self.block_id},"
            f" num_tokens={self.num_tokens} of {self.size})"
        )

    @property
    @cython.critical_section
    def block_id(self):
        """Id of the physical block, or None.

        Where the block belongs to one of kvcache's allocators it changes through that
        alone: setting it raises BlockStateError.
        """
        return None if self.id == NO_BLOCK_ID else self.id

    @block_id.setter
    @cython.critical_section
    def block_id(self, value):
        if self.owner != NULL:
            raise BlockStateError(
                f"{self!r} is given its physical block by its allocator,"
                f" it cannot be set to {value!r}"
            )
        self.id = (
            NO_BLOCK_ID if value is None else as_int(value, "block_id", 0, INT64_MAX)
        )

    @property
    @cython.critical_section
    def _allocator(self):
        return self.allocator

    @property
    @cython.critical_section
    def block_size(self):
        """Number of tokens that a full block has."""
        return self.size

    @property
    @cython.critical_section
    def token_ids(self):
        """The tokens, a new list."""
        cdef Py_ssize_t i
        return [self.tokens[i] for i in range(self.num_tokens)]

    @property
    @cython.critical_section
    def num_empty_slots(self):
        """How many more tokens fit."""
        return self.size - self.num_tokens

    @property
    @cython.critical_section
    def is_full(self):
        """Whether no more tokens fit."""
        return self.num_tokens == self.size

    @property
    @cython.critical_section
    def prev_block(self):
        """The block before this one in its sequence, or None."""
        return None if self.prev == NULL else <object> self.prev


cdef int64_t tokens_up_to(object block) except? -1:
    """Number of tokens from the start of a sequence to the end of this block."""
    if block is None:
        return 0
    if type(block) is PrefixCachingBlock:
        return (<PrefixCachingBlock> block).total
    return as_int(block.num_tokens_total, "num_tokens_total", 0, INT64_MAX)


cdef int refuse_second_init(TokenBlock block) except -1:
    """A block is made once: making it again would lose what it holds."""
    if block.size:
        raise BlockStateError(f"{block!r} is already made")
    return 0


@cython.final
@cython.no_gc
cdef class NaiveBlock(TokenBlock):
    """A block without prefix caching.

    Args:
        prev_block: The block before it in its sequence, or None.
        token_ids: Its first tokens: ints of 64 bits, sign included.
        block_size: Number of tokens that a full block has, at least 1.
        allocator: What `append_token_ids` asks for a copy of a shared block.
        block_id: Id of its physical block, or None. kvcache's own allocators give it.
        _cow_target: Block to name to the allocator in place of this one.
        extra_hash: Not used.

    Raises:
        TypeError, ValueError: An argument is of the wrong type or range, or there are
            too many tokens.
    """

    @cython.critical_section
    def __init__(
        self,
        prev_block,
        token_ids,
        block_size,
        allocator,
        block_id=None,
        _cow_target=None,
        extra_hash=None,
    ):
        cdef Py_ssize_t size = as_int(block_size, "block_size", 1, MAX_BLOCKS)
        refuse_second_init(self)
        self.set_prev(prev_block)
        self.size = size
        self.belong_to(allocator)
        if block_id is not None:
            self.block_id = block_id
        self.cow_target = _cow_target
        self.fill(token_ids)

    @cython.critical_section
    def append_token_ids(self, token_ids):
        """Put tokens behind those in it; if others share the block, into a copy.

        Raises:
            BlockStateError: They do not fit, or the block was freed.
            NoFreeBlocksError: A copy is needed and no block is free.
            TypeError, ValueError: One is not an int of 64 bits.
        """
        cdef object tokens = exact_tokens(token_ids)
        if self.owner != NULL:
            if self.prepare(tokens):
                (<BlockOwner> self.owner).require_copies(1)
            self.append(tokens)
            return
        self.make_room(len(tokens))
        self.write(tokens)
        if self.id != NO_BLOCK_ID:
            self.block_id = self.allocator.cow_block_if_not_appendable(
                self if self.cow_target is None else self.cow_target
            )

    cdef bint prepare(self, object tokens) except -1:
        cdef bint shared
        self.make_room(len(tokens))
        shared = self.is_shared()
        if not tokens:
            return False
        (<BlockOwner> self.owner).held_row(self)
        return shared

    cdef void append(self, object tokens) noexcept:
        if tokens:
            (<BlockOwner> self.owner).make_writable(self)
        self.write(tokens)

    @property
    @cython.critical_section
    def computed(self):
        """Raises NotImplementedError: there is no cache to have it computed."""
        raise NotImplementedError("a naive block is in no cache")

    @computed.setter
    @cython.critical_section
    def computed(self, value):
        raise NotImplementedError("a naive block is in no cache")

    @property
    @cython.critical_section
    def last_accessed(self):
        """Raises NotImplementedError: there is no cache to evict it from."""
        raise NotImplementedError("a naive block is in no cache")

    @last_accessed.setter
    @cython.critical_section
    def last_accessed(self, last_accessed_ts):
        raise NotImplementedError("a naive block is in no cache")

    @property
    @cython.critical_section
    def num_tokens_total(self):
        """Raises NotImplementedError, as vLLM's does."""
        raise NotImplementedError("a naive block does not count the tokens before it")

    @property
    @cython.critical_section
    def extra_hash(self):
        """None: a naive block has no hash."""
        return None

    @property
    @cython.critical_section
    def content_hash(self):
        """None: a naive block has no hash."""
        return None


@cython.final
@cython.no_gc
cdef class PrefixCachingBlock(TokenBlock):
    """A block whose content others can share once it is full.

    Args:
        prev_block: The block before it in its sequence, or None.
        token_ids: Its first tokens: ints of 64 bits, sign included.
        block_size: Number of tokens that a full block has, at least 1.
        allocator: The `PrefixCachingBlockAllocator` it belongs to.
        block_id: Id of its physical block, or None. kvcache's own allocators give it.
        computed: Whether its KV values are there.
        extra_hash: Int that also identifies its content (a LoRA adapter's), or None.

    Raises:
        TypeError, ValueError: An argument is of the wrong type or range, or there are
            too many tokens.
    """

    _none_hash = prefix_hash.NONE_HASH

    @cython.critical_section
    def __init__(
        self,
        prev_block,
        token_ids,
        block_size,
        allocator,
        block_id=None,
        computed=False,
        extra_hash=None,
    ):
        # Imported here: the allocators' module needs this one.
        from kvcache.prefix_caching.prefix_caching_block_allocator import (
            PrefixCachingBlockAllocator,
        )
        if not is_instance(allocator, PrefixCachingBlockAllocator):
            raise TypeError(
                f"allocator must be a PrefixCachingBlockAllocator, got {allocator!r}"
            )
        assert_prefix_caching_block_or_none(prev_block)
        cdef Py_ssize_t size = as_int(block_size, "block_size", 1, MAX_BLOCKS)
        cdef bytes extra = encode_extra(extra_hash)
        cdef int64_t before = tokens_up_to(prev_block)
        # Nothing runs from here to where it has a size that could make it meanwhile.
        refuse_second_init(self)
        TokenBlock.set_prev(self, prev_block)
        self.total = before
        self.size = size
        self.belong_to(allocator)
        if block_id is not None:
            self.block_id = block_id
        self.is_computed = computed
        self.extra, self.extra_bytes = extra_hash, extra
        self.fill(token_ids)

    cdef int set_prev(self, object prev) except -1:
        self.total = tokens_up_to(prev)
        return TokenBlock.set_prev(self, prev)

    cdef int fill(self, object token_ids) except -1:
        TokenBlock.fill(self, token_ids)
        if self.num_tokens == self.size:
            self.find_digest(self.foreign_parent(0))
        return 0

    cdef object foreign_parent(self, Py_ssize_t n):
        """If n more tokens fill it: the hash of a block before of another class."""
        cdef object parent
        if self.prev == NULL or type(<object> self.prev) is PrefixCachingBlock:
            return None
        if self.num_tokens + n != self.size:
            return None
        parent = (<object> self.prev).content_hash
        if parent is None or parent == prefix_hash.NONE_HASH:
            return None
        if type(parent) is not int:
            raise TypeError(f"a content hash must be an int, got {parent!r}")
        return parent

    cdef int write_hashed(
        self, object tokens, int64_t before, object foreign_parent
    ) except -1:
        """`write`, and the total and the hash follow: nothing foreign runs."""
        self.write(tokens)
        self.total = before + self.num_tokens
        if self.num_tokens == self.size:
            self.find_digest(foreign_parent)
        return 0

    cdef int find_digest(self, object foreign_parent) except -1:
        """Hash the full block, unless the one before it has no hash."""
        cdef object before = None if self.prev == NULL else <object> self.prev
        if before is None:
            digest_block(NULL, self.tokens, self.size, self.extra_bytes, self.digest)
        elif type(before) is PrefixCachingBlock:
            if not (<PrefixCachingBlock> before).has_digest:
                return 0
            digest_block(
                (<PrefixCachingBlock> before).digest, self.tokens, self.size,
                self.extra_bytes, self.digest,
            )
        else:
            if foreign_parent is None:
                return 0
            digest_after(
                False, foreign_parent, self.tokens, self.size, self.extra_bytes,
                self.digest,
            )
        self.has_digest = True
        return 0

    @cython.critical_section
    def append_token_ids(self, token_ids):
        """Put tokens behind those in it; a block that is full then can be shared.

        If others share its physical block, it gets one of its own first, and the copy
        to make is noted (`clear_copy_on_writes`). If a full block's content is cached
        already, it takes the cached block in place of its own.

        Raises:
            BlockStateError: They do not fit, the block has a hash or is computed, or
                it was freed.
            NoFreeBlocksError: A copy is needed and no block is free.
            TypeError, ValueError: One is not an int of 64 bits.
        """
        cdef object tokens = exact_tokens(token_ids)
        cdef object parent = None
        cdef int64_t before = 0
        if self.owner != NULL and not self.has_foreign_parent():
            if self.prepare(tokens):
                (<BlockOwner> self.owner).require_copies(1)
            self.append(tokens)
            return
        if self.prev != NULL:
            before = tokens_up_to(<object> self.prev)
            parent = self.foreign_parent(len(tokens))
        # From here on nothing runs that could change the block.
        if self.has_digest or self.is_computed:
            raise BlockStateError(f"{self!r} is immutable")
        self.make_room(len(tokens))
        if not tokens:
            return
        if self.owner != NULL:
            (<BlockOwner> self.owner).require_copies(self.is_shared())
            (<BlockOwner> self.owner).make_writable(self)
            self.write_hashed(tokens, before, parent)
            if self.has_digest:
                (<BlockOwner> self.owner).promote(self)
            return
        self.write_hashed(tokens, before, parent)
        if self.id != NO_BLOCK_ID:
            self.block_id = self.allocator.cow_block_if_not_appendable(self)
        if self.has_digest:
            self.block_id = self.allocator.promote_to_immutable_block(self)

    cdef bint has_foreign_parent(self) noexcept:
        """Whether the block before is of another class, whose hash is to be asked for.
        """
        return self.prev != NULL and type(<object> self.prev) is not PrefixCachingBlock

    cdef bint prepare(self, object tokens) except -1:
        if self.has_digest or self.is_computed:
            raise BlockStateError(f"{self!r} is immutable")
        self.make_room(len(tokens))
        return self.is_shared() if tokens else False

    cdef void append(self, object tokens) noexcept:
        cdef int64_t before = 0
        if not tokens:
            return
        if self.prev != NULL:
            before = (<PrefixCachingBlock> self.prev).total
        (<BlockOwner> self.owner).make_writable(self)
        self.write_hashed(tokens, before, None)
        if self.has_digest:
            (<BlockOwner> self.owner).promote(self)

    @property
    @cython.critical_section
    def computed(self):
        """Whether its KV values were there when it was allocated."""
        return self.is_computed

    @computed.setter
    @cython.critical_section
    def computed(self, value):
        self.is_computed = value

    @property
    @cython.critical_section
    def last_accessed(self):
        """When it was last used, in the caller's clock; -1 if that was never said."""
        return self.accessed

    @last_accessed.setter
    @cython.critical_section
    def last_accessed(self, last_accessed_ts):
        cdef double when = last_accessed_ts
        if isnan(when):
            raise ValueError("last_accessed must be a time, got nan")
        self.accessed = when

    @property
    @cython.critical_section
    def num_tokens_total(self):
        """Number of tokens from the start of the sequence to the end of this block."""
        return self.total

    @property
    @cython.critical_section
    def extra_hash(self):
        """What identifies the content besides the tokens, an int or None."""
        return self.extra

    @property
    @cython.critical_section
    def content_hash(self):
        """The hash of the tokens up to the end of this block, an int of 128 bits.

        None as long as it is not full, or if the block before it had no hash when it
        became so. (vLLM 0.8.5 then hashes None in its place, so that two sequences may
        share a hash.)
        """
        return prefix_hash_of(self.digest) if self.has_digest else None

    @classmethod
    def hash_block_tokens(
        cls, is_first_block, prev_block_hash, cur_block_token_ids, extra_hash=None
    ):
        """The content hash of a block, an int of 128 bits.

        Args:
            is_first_block: Whether there is none before it.
            prev_block_hash: The hash of the block before; None or `hash('None')` with
                a first block.
            cur_block_token_ids: Its tokens: ints of 64 bits, sign included.
            extra_hash: Int that also identifies the content, or None.
        """
        return prefix_hash.hash_block_tokens(
            is_first_block, prev_block_hash, cur_block_token_ids, extra_hash
        )


Block.register(NaiveBlock)
Block.register(PrefixCachingBlock)


cdef list chain_of(object last_block, type kind, object num_blocks):
    cdef list blocks = []
    cdef PyObject* block = <PyObject*> last_block
    cdef Py_ssize_t limit = 2**62
    if num_blocks is not None:
        limit = as_int(num_blocks, "num_blocks", 1, 2**62)
    while block != NULL and len(blocks) < limit:
        if type(<object> block) is not kind:
            raise TypeError(f"expected a {kind.__name__}, got {<object> block!r}")
        blocks.append(<object> block)
        block = (<TokenBlock> block).prev
    if num_blocks is not None and len(blocks) < limit:
        raise ValueError(f"{last_block!r} is the last of {len(blocks)}, not of {limit}")
    blocks.reverse()
    return blocks


def assert_prefix_caching_block_or_none(block):
    """Raise TypeError unless it is a `PrefixCachingBlock`, or None."""
    if block is not None and type(block) is not PrefixCachingBlock:
        if not is_instance(block, PrefixCachingBlock):
            raise TypeError(f"expected a PrefixCachingBlock or None, got {block!r}")
