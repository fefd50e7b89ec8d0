"""What a block, an allocator and a two-device allocator must offer.

Abstract classes with vLLM 0.8.5's names, methods and arguments, and the contract of
each. They store nothing and cost nothing: kvcache's compiled classes are registered
with them (`isinstance` answers True), and a class of one's own may derive from them.

Everywhere: a failed call changes nothing; a lack of blocks is `NoFreeBlocksError`, a
caller's mistake another ValueError, or a TypeError. One thread at a time uses an
allocator and the blocks it made; each call of a compiled one is atomic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Protocol

from kvcache.errors import NoFreeBlocksError

BlockId = int
PrefixHash = int


class Device(Enum):
    """Where a block's memory lies."""

    GPU = 1
    CPU = 2


class RefCounterProtocol(Protocol):
    """Counts the users of each block id."""

    def incr(self, block_id: BlockId) -> int:
        """Add a user of the block; return how many it has now."""
        ...

    def decr(self, block_id: BlockId) -> int:
        """Take a user of the block away; return how many are left."""
        ...

    def get(self, block_id: BlockId) -> int:
        """Return how many users the block has."""
        ...


class Block(ABC):
    """Up to `block_size` tokens of one sequence, and the physical block they are in.

    Blocks of a sequence form a chain through `prev_block`. Several blocks, of several
    sequences, may have one physical block; the first to be written to is then given a
    copy.
    """

    class Factory(Protocol):
        """Makes blocks: a block class, or a function like one."""

        def __call__(
            self,
            prev_block: Block | None,
            token_ids: list[int],
            block_size: int,
            allocator: BlockAllocator,
            block_id: BlockId | None = None,
            computed: bool = False,
            extra_hash: int | None = None,
        ) -> Block:
            """Return a block that stands behind `prev_block` and holds the tokens."""
            ...

    @abstractmethod
    def append_token_ids(self, token_ids: list[int]) -> None:
        """Add tokens, at most `num_empty_slots`; this may change `block_id`.

        It does when the physical block is shared (copy-on-write), or when the block
        becomes full and another with the same content is cached.
        """

    @property
    @abstractmethod
    def block_id(self) -> BlockId | None:
        """The physical block; None while there is none."""

    @block_id.setter
    @abstractmethod
    def block_id(self, value: BlockId | None) -> None:
        """Set the physical block; for allocators only."""

    @property
    @abstractmethod
    def token_ids(self) -> list[int]:
        """The tokens in the block, in order."""

    @property
    @abstractmethod
    def num_tokens_total(self) -> int:
        """Tokens of the sequence up to this block's last one."""

    @property
    @abstractmethod
    def num_empty_slots(self) -> int:
        """Tokens that may still be appended."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether no token may be appended any more."""

    @property
    @abstractmethod
    def prev_block(self) -> Block | None:
        """The block before this one in its sequence; None for the first."""

    @property
    @abstractmethod
    def extra_hash(self) -> int | None:
        """What the content depends on beside tokens, such as an adapter."""

    @property
    @abstractmethod
    def computed(self) -> bool:
        """Whether the KV data of the block exists already."""

    @computed.setter
    @abstractmethod
    def computed(self, value: bool) -> None:
        """Set `computed`; for prefix-caching allocators only."""

    @property
    @abstractmethod
    def last_accessed(self) -> float:
        """When the block was used last, by the caller's clock; -1 for never."""

    @last_accessed.setter
    @abstractmethod
    def last_accessed(self, last_accessed_ts: float) -> None:
        """Set the time of the last use."""

    @property
    @abstractmethod
    def content_hash(self) -> PrefixHash | None:
        """Hash of all tokens up to and including this block's.

        None until the block is full, and where content is not hashed.
        """


class BlockAllocator(ABC):
    """Hands out the physical blocks of one device and takes them back."""

    NoFreeBlocksError = NoFreeBlocksError

    @abstractmethod
    def allocate_mutable_block(
        self, prev_block: Block | None, extra_hash: int | None
    ) -> Block:
        """Return an empty block that stands behind `prev_block`.

        Raises:
            NoFreeBlocksError: No block is free.
        """

    @abstractmethod
    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        extra_hash: int | None,
    ) -> Block:
        """Return a full block of these `block_size` tokens, a cached one if there is.

        Raises:
            NoFreeBlocksError: None is cached and no block is free.
        """

    @abstractmethod
    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        extra_hash: int | None,
    ) -> list[Block]:
        """Return a chain of full blocks, one for each list of `block_size` tokens.

        Raises:
            NoFreeBlocksError: Too few blocks are free; none was taken.
        """

    @abstractmethod
    def free(self, block: Block) -> None:
        """Give the block back; the physical block is free once nobody uses it.

        The block object may be handed out again and must not be used any more.
        """

    @abstractmethod
    def fork(self, last_block: Block) -> list[Block]:
        """Return a second chain with the physical blocks of the one that ends here."""

    @abstractmethod
    def get_num_total_blocks(self) -> int:
        """Return the number of physical blocks, used or free."""

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Return how many physical blocks can be taken, cached ones included."""

    @abstractmethod
    def get_physical_block_id(self, absolute_id: BlockId) -> int:
        """Return the id's rank, from 0, among the ids of this allocator."""

    @abstractmethod
    def swap_out(self, blocks: list[Block]) -> None:
        """Free the physical blocks; the objects stay, with `block_id` None."""

    @abstractmethod
    def swap_in(self, blocks: list[Block]) -> None:
        """Give each of these blocks, whose content is elsewhere, a physical block.

        Raises:
            NoFreeBlocksError: Too few blocks are free.
        """

    @property
    @abstractmethod
    def all_block_ids(self) -> frozenset[BlockId]:
        """The ids of all physical blocks."""

    @abstractmethod
    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        """Return the copies (from, to) since the last call, for the worker to make."""

    @abstractmethod
    def mark_blocks_as_accessed(self, block_ids: list[BlockId], now: float) -> None:
        """Note that the blocks were used at the time `now`."""

    @abstractmethod
    def mark_blocks_as_computed(self, block_ids: list[BlockId]) -> None:
        """Note that the KV data of every block filled so far exists.

        As in vLLM, whatever ids are given.
        """

    @abstractmethod
    def get_common_computed_block_ids(
        self, computed_seq_block_ids: list[list[BlockId]]
    ) -> list[BlockId]:
        """Return the longest prefix of ids that all (non-empty) lists have."""

    @abstractmethod
    def cow_block_if_not_appendable(self, block: Block) -> BlockId:
        """Return an id that `block` may write to: its own, or one to copy to.

        For blocks only.
        """

    @abstractmethod
    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Cache a block that has become full; return its id, or that of its twin.

        For blocks only.
        """

    @abstractmethod
    def get_num_full_blocks_touched(self, blocks: list[Block]) -> int:
        """Return how many free blocks swapping in the full ones of these takes."""

    @abstractmethod
    def get_prefix_cache_hit_rate(self) -> float:
        """Return hits / queries, from 0 to 1; -1 where nothing is cached."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, and nothing done, while blocks are used."""

    @abstractmethod
    def find_cached_blocks_prefix(
        self, block_hashes: list[PrefixHash]
    ) -> list[PrefixHash]:
        """Return the leading hashes whose blocks are cached and computed."""


class DeviceAwareBlockAllocator(ABC):
    """Hands out the blocks of several devices, whose ids do not overlap."""

    @abstractmethod
    def allocate_mutable_block(
        self,
        prev_block: Block | None,
        device: Device,
        extra_hash: int | None = None,
    ) -> Block:
        """Return an empty block on the device; see `BlockAllocator`."""

    @abstractmethod
    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        device: Device,
        extra_hash: int | None = None,
    ) -> Block:
        """Return a full block on the device; see `BlockAllocator`."""

    @abstractmethod
    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        device: Device,
        extra_hash: int | None = None,
    ) -> list[Block]:
        """Return a chain of full blocks on the device; see `BlockAllocator`."""

    @abstractmethod
    def get_num_free_blocks(self, device: Device) -> int:
        """Return how many blocks of the device can be taken."""

    @abstractmethod
    def get_num_total_blocks(self, device: Device) -> int:
        """Return the number of the device's blocks, used or free."""

    @abstractmethod
    def free(self, block: Block) -> None:
        """Give the block back to its device; null blocks are passed over."""

    @abstractmethod
    def fork(self, last_block: Block) -> list[Block]:
        """Return a second chain with the physical blocks of the one that ends here."""

    @property
    @abstractmethod
    def all_block_ids(self) -> frozenset[BlockId]:
        """The ids of all devices' blocks."""

    @abstractmethod
    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        """Return the copies (from, to) on the GPU since the last call."""

    @abstractmethod
    def mark_blocks_as_accessed(self, block_ids: list[BlockId], now: float) -> None:
        """Note that the GPU's blocks were used at the time `now`."""

    @abstractmethod
    def mark_blocks_as_computed(self, block_ids: list[BlockId]) -> None:
        """Note that the KV data of every block filled so far on the GPU exists."""

    @abstractmethod
    def get_common_computed_block_ids(
        self, computed_seq_block_ids: list[list[BlockId]]
    ) -> list[BlockId]:
        """Return the longest prefix of ids that all (non-empty) lists have."""

    @abstractmethod
    def get_num_full_blocks_touched(self, blocks: list[Block], device: Device) -> int:
        """Return how many free blocks swapping the full ones to the device takes."""

    @abstractmethod
    def swap(
        self, blocks: list[Block], src_device: Device, dst_device: Device
    ) -> dict[BlockId, BlockId]:
        """Move blocks to another device; return which id each id became."""

    @abstractmethod
    def get_physical_block_id(self, device: Device, absolute_id: BlockId) -> int:
        """Return the id's rank, from 0, among the ids of the device."""

    @abstractmethod
    def allocate_or_get_null_block(self) -> Block:
        """Return the one block that stands for blocks a sliding window has dropped."""

    @abstractmethod
    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Return hits / queries, from 0 to 1; -1 where nothing is cached."""

    @abstractmethod
    def reset_prefix_cache(self, device: Device | None = None) -> bool:
        """Forget the device's cached content, or all; False where blocks are used."""

    @abstractmethod
    def find_cached_blocks_prefix(
        self, block_hashes: list[PrefixHash], device: Device = Device.GPU
    ) -> list[PrefixHash]:
        """Return the leading hashes whose blocks are cached and computed."""
