/* SipHash-1-3 with a 128-bit result, one message at a time and eight side by side.

Written from "SipHash: a fast short-input PRF" (Aumasson and Bernstein, 2012) and
its authors' 128-bit variant. A message here is a whole number of 64-bit words; its last
two words are the parent digest, so all that comes before them can be absorbed before
the parent is known. Nothing here allocates, branches on a secret or reads a table.
*/
#ifndef KVCACHE_KEYED_H
#define KVCACHE_KEYED_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__)
#define KVC_X86 1
#include <immintrin.h>
#endif

#define KVC_LANES 8

/* Rounds: after each word, and before each half of the digest. */
#define KVC_WORD_ROUNDS 1
#define KVC_LAST_ROUNDS 3

/* How eight messages are worked on; both ways give the same digests. */
enum { KVC_PORTABLE = 0, KVC_AVX2 = 1 };

typedef struct {
    uint64_t v[4];
} kvc_sip;

/* States of eight messages, word by word. */
typedef struct {
    uint64_t v[4][KVC_LANES];
} kvc_sips;

static inline uint64_t kvc_rotl(uint64_t x, int bits) {
    return (x << bits) | (x >> (64 - bits));
}

static inline uint64_t kvc_load_le(const uint8_t* data) {
    uint64_t word;
    memcpy(&word, data, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static inline void kvc_store_le(uint8_t* data, uint64_t word) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    memcpy(data, &word, 8);
}

/* SipRound, on whatever ADD, XOR and ROT work on. */
#define KVC_ROUND(ADD, XOR, ROT, v0, v1, v2, v3) \
    do { \
        v0 = ADD(v0, v1); \
        v2 = ADD(v2, v3); \
        v1 = XOR(ROT(v1, 13), v0); \
        v3 = XOR(ROT(v3, 16), v2); \
        v0 = ROT(v0, 32); \
        v2 = ADD(v2, v1); \
        v0 = ADD(v0, v3); \
        v1 = XOR(ROT(v1, 17), v2); \
        v3 = XOR(ROT(v3, 21), v0); \
        v2 = ROT(v2, 32); \
    } while (0)

#define KVC_ADD(a, b) ((a) + (b))
#define KVC_XOR(a, b) ((a) ^ (b))

static inline void kvc_sip_rounds(kvc_sip* s, int n) {
    while (n--)
        KVC_ROUND(KVC_ADD, KVC_XOR, kvc_rotl, s->v[0], s->v[1], s->v[2], s->v[3]);
}

static inline void kvc_sip_init(kvc_sip* s, const uint8_t* key) {
    uint64_t k0 = kvc_load_le(key), k1 = kvc_load_le(key + 8);
    s->v[0] = k0 ^ UINT64_C(0x736f6d6570736575);
    s->v[1] = k1 ^ UINT64_C(0x646f72616e646f6d) ^ 0xee;
    s->v[2] = k0 ^ UINT64_C(0x6c7967656e657261);
    s->v[3] = k1 ^ UINT64_C(0x7465646279746573);
}

static inline void kvc_sip_word(kvc_sip* s, uint64_t word) {
    s->v[3] ^= word;
    kvc_sip_rounds(s, KVC_WORD_ROUNDS);
    s->v[0] ^= word;
}

/* The last word of a message of so many bytes, when they are a multiple of 8. */
static inline uint64_t kvc_sip_tail(uint64_t num_bytes) {
    return num_bytes << 56;
}

static inline void kvc_sip_end(kvc_sip* s, uint64_t tail, uint8_t* digest) {
    kvc_sip_word(s, tail);
    s->v[2] ^= 0xee;
    kvc_sip_rounds(s, KVC_LAST_ROUNDS);
    kvc_store_le(digest, s->v[0] ^ s->v[1] ^ s->v[2] ^ s->v[3]);
    s->v[1] ^= 0xdd;
    kvc_sip_rounds(s, KVC_LAST_ROUNDS);
    kvc_store_le(digest + 8, s->v[0] ^ s->v[1] ^ s->v[2] ^ s->v[3]);
}

/* Two tokens as one word, as they lie in little-endian memory. */
static inline uint64_t kvc_pair(const int32_t* tokens) {
    return (uint32_t)tokens[0] | (uint64_t)(uint32_t)tokens[1] << 32;
}

/* A block's tokens; if they are odd in number, the last word is padded. */
static inline void kvc_absorb(kvc_sip* s, const int32_t* tokens, size_t num_tokens) {
    size_t i;
    for (i = 0; i + 2 <= num_tokens; i += 2) kvc_sip_word(s, kvc_pair(tokens + i));
    if (num_tokens & 1) kvc_sip_word(s, (uint32_t)tokens[num_tokens - 1]);
}

/* Tokens that do not all fit 32 bits: a word each. */
static inline void kvc_absorb_wide(
    kvc_sip* s, const int64_t* tokens, size_t num_tokens
) {
    size_t i;
    for (i = 0; i < num_tokens; i++) kvc_sip_word(s, (uint64_t)tokens[i]);
}

/* The same words as `kvc_absorb`, of tokens that all fit 32 bits. */
static inline void kvc_absorb_narrowed(
    kvc_sip* s, const int64_t* tokens, size_t num_tokens
) {
    size_t i;
    for (i = 0; i + 2 <= num_tokens; i += 2)
        kvc_sip_word(s, (uint64_t)tokens[i] | (uint64_t)tokens[i + 1] << 32);
    if (num_tokens & 1) kvc_sip_word(s, (uint64_t)tokens[num_tokens - 1]);
}

/* Bytes, the last word padded. */
static inline void kvc_absorb_bytes(kvc_sip* s, const uint8_t* data, size_t n) {
    uint8_t last[8] = {0};
    size_t i;
    for (i = 0; i + 8 <= n; i += 8) kvc_sip_word(s, kvc_load_le(data + i));
    if (i < n) {
        memcpy(last, data + i, n - i);
        kvc_sip_word(s, kvc_load_le(last));
    }
}

static inline void kvc_finish(
    kvc_sip* s, const uint8_t* parent, uint64_t tail, uint8_t* digest
) {
    kvc_sip_word(s, kvc_load_le(parent));
    kvc_sip_word(s, kvc_load_le(parent + 8));
    kvc_sip_end(s, tail, digest);
}

#ifdef KVC_X86

/* -- AVX2: four lanes in a register, two of them interleaved ----------------------- */

#define KVC_256 __attribute__((target("avx2")))
#define KVC_256_ROT(x, bits) \
    ((bits) == 32 ? _mm256_shuffle_epi32(x, 0xb1) \
     : (bits) == 16 ? _mm256_shuffle_epi8(x, _mm256_set_epi64x( \
           0x0d0c0b0a09080f0e, 0x0504030201000706, \
           0x0d0c0b0a09080f0e, 0x0504030201000706)) \
     : _mm256_or_si256( \
           _mm256_slli_epi64(x, bits), _mm256_srli_epi64(x, 64 - (bits))))
#define KVC_256_ROUND(s) \
    KVC_ROUND(_mm256_add_epi64, _mm256_xor_si256, KVC_256_ROT, \
              (s)[0], (s)[1], (s)[2], (s)[3])
#define KVC_256_WORD(s, word) \
    do { \
        __m256i word_ = (word); \
        (s)[3] = _mm256_xor_si256((s)[3], word_); \
        for (int r_ = 0; r_ < KVC_WORD_ROUNDS; r_++) KVC_256_ROUND(s); \
        (s)[0] = _mm256_xor_si256((s)[0], word_); \
    } while (0)

KVC_256 static inline void kvc_transpose_256(__m256i* r) {
    __m256i a = _mm256_unpacklo_epi64(r[0], r[1]);
    __m256i b = _mm256_unpackhi_epi64(r[0], r[1]);
    __m256i c = _mm256_unpacklo_epi64(r[2], r[3]);
    __m256i d = _mm256_unpackhi_epi64(r[2], r[3]);
    r[0] = _mm256_permute2x128_si256(a, c, 0x20);
    r[1] = _mm256_permute2x128_si256(b, d, 0x20);
    r[2] = _mm256_permute2x128_si256(a, c, 0x31);
    r[3] = _mm256_permute2x128_si256(b, d, 0x31);
}

KVC_256 static inline void kvc_absorb_256(
    const kvc_sip* start, const int32_t* tokens, size_t num_words, kvc_sips* states
) {
    __m256i a[4], b[4], q[4], r[4];
    const int32_t* other = tokens + 8 * num_words;
    size_t at, i, n;
    for (i = 0; i < 4; i++) a[i] = b[i] = _mm256_set1_epi64x((int64_t)start->v[i]);
    for (at = 0; at < num_words; at += 4) {
        n = num_words - at < 4 ? num_words - at : 4;
        if (n == 4) {
            for (i = 0; i < 4; i++) {
                q[i] = _mm256_loadu_si256(
                    (const __m256i*)(tokens + 2 * (i * num_words + at)));
                r[i] = _mm256_loadu_si256(
                    (const __m256i*)(other + 2 * (i * num_words + at)));
            }
            kvc_transpose_256(q);
            kvc_transpose_256(r);
            for (i = 0; i < 4; i++) {
                KVC_256_WORD(a, q[i]);
                KVC_256_WORD(b, r[i]);
            }
        } else {
            for (i = at; i < num_words; i++) {
                KVC_256_WORD(a, _mm256_setr_epi64x(
                    (int64_t)kvc_pair(tokens + 2 * i),
                    (int64_t)kvc_pair(tokens + 2 * (num_words + i)),
                    (int64_t)kvc_pair(tokens + 2 * (2 * num_words + i)),
                    (int64_t)kvc_pair(tokens + 2 * (3 * num_words + i))));
                KVC_256_WORD(b, _mm256_setr_epi64x(
                    (int64_t)kvc_pair(other + 2 * i),
                    (int64_t)kvc_pair(other + 2 * (num_words + i)),
                    (int64_t)kvc_pair(other + 2 * (2 * num_words + i)),
                    (int64_t)kvc_pair(other + 2 * (3 * num_words + i))));
            }
        }
    }
    for (i = 0; i < 4; i++) {
        _mm256_storeu_si256((__m256i*)states->v[i], a[i]);
        _mm256_storeu_si256((__m256i*)(states->v[i] + 4), b[i]);
    }
}

#define KVC_256_LOAD2(p, q) \
    _mm256_inserti128_si256(_mm256_castsi128_si256( \
        _mm_loadu_si128((const __m128i*)(p))), \
        _mm_loadu_si128((const __m128i*)(q)), 1)
#define KVC_256_SUM(s) \
    _mm256_xor_si256(_mm256_xor_si256((s)[0], (s)[1]), _mm256_xor_si256((s)[2], (s)[3]))

KVC_256 static inline void kvc_finish_256(
    const kvc_sips* states, const uint8_t* const* parents, uint64_t tail,
    uint8_t* digests
) {
    __m256i s[2][4], low[2], p, q;
    int i, k;
    for (k = 0; k < 2; k++) {
        for (i = 0; i < 4; i++)
            s[k][i] = _mm256_loadu_si256((const __m256i*)(states->v[i] + 4 * k));
        p = KVC_256_LOAD2(parents[4 * k], parents[4 * k + 2]);
        q = KVC_256_LOAD2(parents[4 * k + 1], parents[4 * k + 3]);
        KVC_256_WORD(s[k], _mm256_unpacklo_epi64(p, q));
        KVC_256_WORD(s[k], _mm256_unpackhi_epi64(p, q));
    }
    for (k = 0; k < 2; k++) KVC_256_WORD(s[k], _mm256_set1_epi64x((int64_t)tail));
    for (k = 0; k < 2; k++)
        s[k][2] = _mm256_xor_si256(s[k][2], _mm256_set1_epi64x(0xee));
    for (i = 0; i < KVC_LAST_ROUNDS; i++)
        for (k = 0; k < 2; k++) KVC_256_ROUND(s[k]);
    for (k = 0; k < 2; k++) {
        low[k] = KVC_256_SUM(s[k]);
        s[k][1] = _mm256_xor_si256(s[k][1], _mm256_set1_epi64x(0xdd));
    }
    for (i = 0; i < KVC_LAST_ROUNDS; i++)
        for (k = 0; k < 2; k++) KVC_256_ROUND(s[k]);
    for (k = 0; k < 2; k++) {
        p = _mm256_unpacklo_epi64(low[k], KVC_256_SUM(s[k])); /* lanes 0 and 2 */
        q = _mm256_unpackhi_epi64(low[k], KVC_256_SUM(s[k])); /* lanes 1 and 3 */
        _mm256_storeu_si256((__m256i*)(digests + 64 * k),
                            _mm256_permute2x128_si256(p, q, 0x20));
        _mm256_storeu_si256((__m256i*)(digests + 64 * k + 32),
                            _mm256_permute2x128_si256(p, q, 0x31));
    }
}

#endif /* KVC_X86 */

/* -- eight messages, on the path that was chosen ----------------------------------- */

static inline int kvc_best_path(void) {
#ifdef KVC_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return KVC_AVX2;
#endif
    return KVC_PORTABLE;
}

static inline void kvc_absorb_lanes(
    int path, const kvc_sip* start, const int32_t* tokens, size_t num_tokens,
    kvc_sips* states
) {
    kvc_sip s;
    int i, k;
#ifdef KVC_X86
    if (path == KVC_AVX2 && num_tokens % 2 == 0) {
        kvc_absorb_256(start, tokens, num_tokens / 2, states);
        return;
    }
#endif
    for (k = 0; k < KVC_LANES; k++) {
        s = *start;
        kvc_absorb(&s, tokens + k * num_tokens, num_tokens);
        for (i = 0; i < 4; i++) states->v[i][k] = s.v[i];
    }
    (void)path;
}

static inline void kvc_finish_lane(
    const kvc_sips* states, int lane, const uint8_t* parent, uint64_t tail,
    uint8_t* digest
) {
    kvc_sip s;
    int i;
    for (i = 0; i < 4; i++) s.v[i] = states->v[i][lane];
    kvc_finish(&s, parent, tail, digest);
}

static inline void kvc_finish_lanes(
    int path, const kvc_sips* states, const uint8_t* const* parents, uint64_t tail,
    uint8_t* digests
) {
    int k;
#ifdef KVC_X86
    if (path == KVC_AVX2) {
        kvc_finish_256(states, parents, tail, digests);
        return;
    }
#endif
    for (k = 0; k < KVC_LANES; k++)
        kvc_finish_lane(states, k, parents[k], tail, digests + 16 * k);
    (void)path;
}

#endif
