# SHA-256 of one whole message, on the best instructions that this processor has.
from libc.stdint cimport uint8_t

cdef enum:
    SHA256_BYTES = 32


# Writes SHA256_BYTES to digest, which may overlap data; data may be NULL if length is
# 0. No alignment is asked for.
cdef void sha256_digest(
    const uint8_t* data, size_t length, uint8_t* digest
) noexcept nogil
