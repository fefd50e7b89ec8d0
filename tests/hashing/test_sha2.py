"""SHA-256: the standard's vectors, and `hashlib`, on every path that runs here."""

import array
import hashlib
import inspect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.hashing import sha2 as module
from kvcache.hashing.sha2 import sha256_digest_bytes, sha256_paths

# None is the C form, which takes the best path.
PATHS = [None, *sha256_paths()]

# NIST's: the examples of FIPS 180, and of the CAVP's SHA256ShortMsg.
VECTORS = {
    "empty": (
        b"",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    ),
    "8 bits": (
        bytes.fromhex("d3"),
        "28969cdfa74a12c82f3bad960b0b000aca2ac329deea5c2328ebc6f2ba9802c1",
    ),
    "16 bits": (
        bytes.fromhex("11af"),
        "5ca7133fa735326081558ac312c620eeca9970d1e70a4b95533d956f072d1f98",
    ),
    "24 bits": (
        b"abc",
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    ),
    "448 bits": (
        b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
    ),
    "512 bits": (
        bytes.fromhex(
            "5a86b737eaea8ee976a0a24da63e7ed7eefad18a101c1211e2b3650c5187c2a8"
            "a650547208251f6d4237e661c7bf4c77f335390394c37fa1a9f9be836ac28509"
        ),
        "42e61e174fbb3897d6dd6cef3dd2802fe67b331953b06114a65c772859dfc1aa",
    ),
    "896 bits": (
        b"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
        b"hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
        "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1",
    ),
    "a million a": (
        b"a" * 1_000_000,
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
    ),
    # NIST's "SHA-256 additional test vectors": lengths around the padding's edges.
    "1 byte 0xbd": (
        b"\xbd",
        "68325720aabd7c82f30f554b313d0570c95accbb7dc4b5aae11204c08ffe732b",
    ),
    "4 bytes": (
        bytes.fromhex("c98c8e55"),
        "7abc22c0ae5af26ce93dbb94433a0e0b2e119d014f8e7f65bd56c61ccccd9504",
    ),
    "55 zeros": (
        bytes(55),
        "02779466cdec163811d078815c633f21901413081449002f24aa3e80f0b88ef7",
    ),
    "56 zeros": (
        bytes(56),
        "d4817aa5497628e7c77e6b606107042bbba3130888c5f47a375e6179be789fbb",
    ),
    "57 zeros": (
        bytes(57),
        "65a16cb7861335d5ace3c60718b5052e44660726da4cd13bb745381b235a1785",
    ),
    "64 zeros": (
        bytes(64),
        "f5a5fd42d16a20302798ef6ed309979b43003d2320d9f0e8ea9831a92759fb4b",
    ),
    "1000 zeros": (
        bytes(1000),
        "541b3e9daa09b20bf85fa273e5cbd3e80185aa4ec298e765db87742b70138a53",
    ),
    "1000 A": (
        b"A" * 1000,
        "c2e686823489ced2017f6059b8b239318b6364f6dcd835d0a519105a1eadd6e4",
    ),
    "1005 U": (
        b"U" * 1005,
        "f4d62ddec0f3dd90ea1380fa16a5ff8dc4c54b21740650f24afc4120903552b0",
    ),
}


@pytest.fixture(params=PATHS, ids=str)
def path(request: pytest.FixtureRequest) -> str | None:
    return request.param


# -- digests ----------------------------------------------------------------------


@pytest.mark.parametrize(("message", "digest"), VECTORS.values(), ids=VECTORS)
def test_the_published_vectors_hold(
    message: bytes, digest: str, path: str | None
) -> None:
    assert sha256_digest_bytes(message, path).hex() == digest


def test_every_length_around_every_edge_of_a_block(path: str | None) -> None:
    message = bytes(range(256)) * 3
    for length in range(len(message) + 1):
        part = message[:length]
        assert sha256_digest_bytes(part, path) == hashlib.sha256(part).digest(), length


@given(st.binary(max_size=300), st.sampled_from(PATHS))
def test_short_messages_hash_as_in_hashlib(message: bytes, path: str | None) -> None:
    assert sha256_digest_bytes(message, path) == hashlib.sha256(message).digest()


@settings(max_examples=30)
@given(
    st.integers(300, 20_000),
    st.randoms(use_true_random=False),
    st.sampled_from(PATHS),
)
def test_long_messages_hash_as_in_hashlib(length, random, path: str | None) -> None:
    message = random.randbytes(length)
    assert sha256_digest_bytes(message, path) == hashlib.sha256(message).digest()


@pytest.mark.parametrize(
    "length", [0, 1, 15, 16, 31, 55, 56, 63, 64, 65, 119, 120, 400]
)
def test_a_message_may_lie_at_any_address(length: int, path: str | None) -> None:
    room = memoryview(bytes(range(256)) * 2)
    for offset in range(65):
        part = room[offset : offset + length]
        digest = hashlib.sha256(part).digest()
        assert sha256_digest_bytes(part, path) == digest, offset


@pytest.mark.parametrize("length", [32, 33, 63, 64, 96, 119, 120, 192])
def test_a_digest_may_overwrite_its_message(length: int, path: str | None) -> None:
    message = bytes(length)
    for _ in range(5):
        message = hashlib.sha256(message).digest() + message[32:]
    assert module._benchmark(length, 5, path) == message[:32]


# -- arguments --------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        memoryview,
        lambda data: memoryview(data)[:],
        lambda data: array.array("B", data),
        lambda data: np.frombuffer(data, np.uint8),
        lambda data: np.frombuffer(data, np.int32).reshape(5, -1),
    ],
)
def test_anything_with_a_contiguous_buffer_is_hashed(make, path: str | None) -> None:
    data = bytes(range(100))
    digest = sha256_digest_bytes(make(data), path)
    assert type(digest) is bytes
    assert digest == hashlib.sha256(data).digest()


def test_a_buffer_is_let_go() -> None:
    data = bytearray(b"abc")
    sha256_digest_bytes(data)
    data.append(0)  # BufferError if it were still held


@pytest.mark.parametrize("data", ["abc", None, 3, [1, 2], object()])
def test_what_has_no_buffer_is_refused(data: object, path: str | None) -> None:
    with pytest.raises(TypeError, match=type(data).__name__):
        sha256_digest_bytes(data, path)  # type: ignore[arg-type]


def test_a_buffer_with_gaps_is_refused(path: str | None) -> None:
    with pytest.raises(BufferError):
        sha256_digest_bytes(memoryview(b"abcdef")[::2], path)


@pytest.mark.parametrize("wrong", ["", "sha", "Portable", "portable ", "sha_ni\0"])
def test_an_unknown_path_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"path must be one of .*portable here, got"):
        sha256_digest_bytes(b"abc", wrong)


def test_a_path_that_this_processor_lacks_is_refused() -> None:
    for lacking in {"sha_ni", "armv8"} - set(sha256_paths()):
        with pytest.raises(ValueError, match=lacking):
            sha256_digest_bytes(b"abc", lacking)


@pytest.mark.parametrize("wrong", [b"portable", 0, True])
def test_a_path_is_a_string(wrong: object) -> None:
    with pytest.raises(TypeError):
        sha256_digest_bytes(b"abc", wrong)  # type: ignore[arg-type]


def test_paths_end_in_the_portable_one() -> None:
    paths = sha256_paths()
    assert paths[-1] == "portable"
    assert len(set(paths)) == len(paths)
    assert set(paths) <= {"sha_ni", "armv8", "portable"}


def test_a_chain_has_room_for_its_digest() -> None:
    with pytest.raises(ValueError, match="at least 32, got 31"):
        module._benchmark(31, 1)


def test_signatures_are_shown() -> None:
    assert list(inspect.signature(sha256_digest_bytes).parameters) == ["data", "path"]
