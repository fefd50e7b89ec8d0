"""Random requests through vLLM 0.33 and through kvcache: are the hashes the same?

    python tests/hashing/compare_with_vllm.py --blocks 100000
    python tests/hashing/compare_with_vllm.py --golden tests/hashing/golden.json

Run by a Python that has kvcache and vLLM, with cbor2 and xxhash. The second form writes
the digests that the tests compare with where there is no vLLM. The requests of a seed
are the same in every run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
GOLDEN_SEED = 33
GOLDEN_REQUESTS = 24
# Where an integer's encoding changes, in pickle or in CBOR.
EDGES = [
    *(0, 1, 23, 24, 255, 256, 65535, 65536),
    *(2**bits - 1 for bits in (31, 32, 39, 40, 47, 55, 63)),
    *(2**bits for bits in (31, 32, 39, 40, 47, 55)),
]


# -- random requests --------------------------------------------------------------


def random_token(rng: random.Random) -> int:
    if rng.random() < 0.9:
        return rng.randrange(150_000)
    return rng.choice(EDGES) if rng.random() < 0.5 else rng.getrandbits(63)


def random_features(rng: random.Random, num_tokens: int) -> list[SimpleNamespace]:
    """Multimodal items in order, some side by side, some twice the same object."""
    names = [rng.choice(("mm", "a", f"image-{rng.randrange(9)}")) for _ in range(3)]
    features, offset = [], rng.randrange(12)
    while offset < num_tokens and rng.random() < 0.8:
        length = rng.randint(1, 40)
        position = SimpleNamespace(offset=offset, length=length)
        features.append(
            SimpleNamespace(identifier=rng.choice(names), mm_position=position)
        )
        offset += length + rng.choice((0, 0, 1, rng.randrange(60)))
    return features


def random_request(rng: random.Random) -> SimpleNamespace:
    """A request as vLLM's hasher reads it, with a block size and a lookahead."""
    block_size = rng.choice((1, 2, 3, 4, 5, 8, 16, 16, 16, 17, 32, 64, 128))
    num_tokens = rng.randrange(0, 40 * block_size)
    shared = rng.choice(("S", "mm", "lora", "salt"))  # one object in several keys
    chance = rng.random
    lora = SimpleNamespace(
        lora_name=rng.choice((shared, "adapter")), lora_path=rng.choice((shared, "/p"))
    )
    return SimpleNamespace(
        block_size=block_size,
        lookahead=rng.choice((0, 0, 0, 1, 2, 5)),
        all_token_ids=[random_token(rng) for _ in range(num_tokens)],
        num_tokens=num_tokens,
        block_hashes=[rng.randbytes(rng.choice((16, 32, 7)))] * (chance() < 0.1),
        mm_features=random_features(rng, num_tokens) if chance() < 0.4 else [],
        lora_request=lora if chance() < 0.2 else None,
        cache_salt=rng.choice((shared, "", "pepper")) if chance() < 0.3 else None,
        prompt_embeds=(
            np.arange(num_tokens * 2, dtype=np.float32).reshape(-1, 2)
            + rng.randrange(9)
            if chance() < 0.1
            else None
        ),
        _prompt_embeds_per_block_hashes={},
    )


def hashes_of(
    request: SimpleNamespace, make_hasher: Callable[..., Any], hash_fn: Any
) -> list[bytes]:
    """The request's new hashes; in two steps, as if it had grown."""
    grown = SimpleNamespace(**vars(request))
    grown.block_hashes = list(request.block_hashes)
    grown._prompt_embeds_per_block_hashes = {}
    hasher = make_hasher(request.block_size, hash_fn, request.lookahead)
    for num_tokens in (request.num_tokens * 2 // 3, request.num_tokens):
        grown.num_tokens = num_tokens
        grown.all_token_ids = request.all_token_ids[:num_tokens]
        grown.block_hashes += hasher(grown)
    return grown.block_hashes[len(request.block_hashes) :]


# -- vLLM -------------------------------------------------------------------------


def vllm_hasher() -> tuple[Callable[..., Any], dict[str, Any], Callable[..., Any]]:
    """vLLM's get_request_block_hasher, its hash functions, its init_none_hash."""
    import torch
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils

    def make_hasher(*arguments: Any) -> Callable[[Any], list[bytes]]:
        hasher = kv_cache_utils.get_request_block_hasher(*arguments)

        def hash_request(request: Any) -> list[bytes]:
            if isinstance(request.prompt_embeds, np.ndarray):
                request.prompt_embeds = torch.from_numpy(request.prompt_embeds)
            return hasher(request)

        return hash_request

    functions = {name: getattr(hashing, name) for name in ALGORITHMS}
    return make_hasher, functions, kv_cache_utils.init_none_hash


def compare(blocks: int, seed: int) -> Counter[str]:
    """Hash random requests both ways until there were so many blocks.

    Returns:
        Blocks compared of each algorithm, and of those with extra keys or lookahead.

    Raises:
        AssertionError: A hash differs.
    """
    from kvcache import hashing as ours

    make_theirs, functions, init_theirs = vllm_hasher()
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    os.environ["PYTHONHASHSEED"] = str(seed)
    while counts["all"] < blocks:
        name = ALGORITHMS[counts["requests"] % len(ALGORITHMS)]
        function = ours.get_hash_fn_by_name(name)
        init_theirs(functions[name])
        ours.init_none_hash(function)
        request = random_request(rng)
        expected = hashes_of(request, make_theirs, functions[name])
        found = hashes_of(request, ours.get_request_block_hasher, function)
        assert found == expected, f"seed {seed}: {name} of {request}"
        counts["requests"] += 1
        counts["all"] += len(found)
        counts[name] += len(found)
        if has_extra_keys(request):
            counts["of requests with extra keys"] += len(found)
        if request.lookahead:
            counts["with lookahead"] += len(found)
        if not (request.lookahead or request.block_hashes or has_extra_keys(request)):
            compare_faces(request, function, found)
    return counts


def has_extra_keys(request: SimpleNamespace) -> bool:
    return bool(
        request.lora_request
        or request.mm_features
        or request.cache_salt
        or request.prompt_embeds is not None
    )


def compare_faces(request: SimpleNamespace, function: Any, hashes: list[bytes]) -> None:
    """The faces for tokens alone agree with what the request's hasher gave."""
    from kvcache import hashing as ours

    tokens = request.all_token_ids
    options = {"hash_fn": function}
    assert ours.hash_blocks(tokens, request.block_size, **options) == hashes
    rows = ours.hash_blocks(np.array(tokens, int), request.block_size, **options)
    assert [row.tobytes() for row in rows] == hashes


# -- golden digests ---------------------------------------------------------------


def golden_requests() -> list[SimpleNamespace]:
    rng = random.Random(GOLDEN_SEED)
    return [random_request(rng) for _ in range(GOLDEN_REQUESTS)]


def write_golden(path: Path) -> None:
    """The last hash of each random request in each algorithm, made by vLLM alone."""
    make_hasher, functions, init = vllm_hasher()
    os.environ["PYTHONHASHSEED"] = str(GOLDEN_SEED)
    golden: dict[str, list[str]] = {}
    for name in ALGORITHMS:
        init(functions[name])
        golden[name] = [
            b"".join(hashes_of(request, make_hasher, functions[name])[-1:]).hex()
            for request in golden_requests()
        ]
    os.environ.pop("PYTHONHASHSEED")
    from vllm.v1.core import kv_cache_utils

    for name in ("sha256", "sha256_cbor"):
        init(functions[name])
        golden[f"root of {name}"] = [kv_cache_utils.NONE_HASH.hex()]
    path.write_text(json.dumps(golden, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare kvcache's block hashes with vLLM's."
    )
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--golden", type=Path, help="write golden digests instead")
    options = parser.parse_args()
    if options.golden:
        write_golden(options.golden)
    else:
        counts = compare(options.blocks, options.seed)
        print("equal:", ", ".join(f"{n} {what}" for what, n in counts.items()))


if __name__ == "__main__":
    main()
