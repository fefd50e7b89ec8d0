"""Instructions of the hot operations: the same in every run, on however busy a machine.

Valgrind hides the CPU's SHA instructions: sha256 is counted on its portable path, the
one with them is timed in bench_hashing.py.
"""

from pathlib import Path

from . import counted
from .valgrind import counts, skip_without_valgrind


class Instructions:
    """A round's share of what so many rounds more execute."""

    timeout = 300
    params = (
        [
            *("popleft_n_and_append_n_100", "get_new_blocks_200", "free_blocks_200"),
            *("get_new_blocks_and_free_1", "get_new_block_ids_1000"),
            "free_block_ids_1000",
            *("cache_full_blocks_and_evict_100", "match_prefix_ids_2000"),
            *("match_prefix_2000", "get_cached_block_100", "touch_and_free_100"),
            *("sha256_portable_100_int32", "sha256_portable_100_list"),
            *("keyed_100_int32", "admit_and_free_1008_tokens", "allocate_step_256"),
            *("allocate_slots_256", "allocate_immutable_blocks_and_free_100"),
            "fork_and_free_100",
        ],
    )
    param_names = ("operation",)

    def setup_cache(self):
        skip_without_valgrind()
        found = counts(Path(counted.__file__))
        return {
            name: (found[f"{name} many"] - found[f"{name} few"]) / counted.ROUNDS
            for name in self.params[0]
            if f"{name} many" in found
        }

    def setup(self, found, operation):
        if operation not in found:
            raise NotImplementedError(f"this kvcache has no {operation}")

    def track_instructions(self, found, operation):
        return found[operation]

    track_instructions.unit = "instructions"
