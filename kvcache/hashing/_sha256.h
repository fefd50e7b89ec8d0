/* SHA-256 (FIPS 180-4) of whole messages, once for each kind of processor.
 *
 * Every path is one function that digests one message: the state stays in registers
 * from the first block to the last, whole blocks are read where they lie, and only the
 * last, padded block or two are put together aside, before anything is compressed, so
 * that this happens in the shadow of the rounds. The digest is written last and may
 * overlap the message. Nothing is allocated, no state is shared.
 */
#ifndef KVC_SHA256_H
#define KVC_SHA256_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || (defined(_M_X64) && !defined(_M_ARM64EC))
#define KVC_SHA256_X86
#include <immintrin.h>
#if defined(_MSC_VER)
#include <intrin.h>
#define KVC_SHA256_X86_TARGET
#else
#include <cpuid.h>
#define KVC_SHA256_X86_TARGET __attribute__((target("sha,sse4.1,ssse3")))
#endif
#elif defined(__aarch64__) && !defined(__AARCH64EB__)
/* Built for such processors only, or on Linux, where the kernel tells. Clang before 16
 * declares the intrinsics in the first case only. */
#if defined(__ARM_FEATURE_SHA2) || defined(__ARM_FEATURE_CRYPTO)
#define KVC_SHA256_ARM
#define KVC_SHA256_ARM_TARGET
#elif defined(__linux__) && defined(__clang__)
#if __clang_major__ >= 16
#define KVC_SHA256_ARM
#define KVC_SHA256_ARM_TARGET __attribute__((target("sha2")))
#endif
#elif defined(__linux__) && defined(__GNUC__)
#define KVC_SHA256_ARM
#define KVC_SHA256_ARM_TARGET __attribute__((target("+crypto")))
#endif
#endif

#if defined(KVC_SHA256_ARM)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

typedef void (*kvc_sha256_function)(const uint8_t*, size_t, uint8_t*);

typedef struct {
    const char* name;
    kvc_sha256_function digest;
    int (*available)(void);
} kvc_sha256_path;

/* Section 4.2.2: fractional parts of the cube roots of the first 64 primes. */
static const uint32_t kvc_sha256_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
    0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
    0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
    0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
    0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
    0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
    0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
    0xc67178f2};

/* Section 5.3.3: the same of the square roots of the first eight. */
static const uint32_t kvc_sha256_start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372,
                                             0xa54ff53a, 0x510e527f, 0x9b05688c,
                                             0x1f83d9ab, 0x5be0cd19};

/* -- padding ---------------------------------------------------------------------- */

typedef struct {
    const uint8_t* data;
    size_t whole;         /* blocks to read from data */
    size_t blocks;        /* all of them, with the one or two that are padded */
    uint8_t padded[192];  /* from the 64th byte on; what is before is scratch */
} kvc_sha256_message;

/* Section 5.1.1: a one bit, zeros, the length in bits as 8 bytes, big-endian. From 64
 * bytes on there is no branch and no copy of variable size: the last 64 bytes of the
 * message are put so that they end where the padding begins, whatever part of them
 * belongs to the last block. */
static inline void kvc_sha256_pad(kvc_sha256_message* message, const uint8_t* data,
                                  size_t length) {
    static const uint8_t padding[64] = {0x80};
    const size_t rest = length % 64, padded = 1 + (rest > 55);
    const uint64_t bits = (uint64_t)length << 3;
    uint8_t *end = message->padded + 64 + rest, *size;
    int i;
    message->data = data;
    message->whole = length / 64;
    message->blocks = message->whole + padded;
    if (length >= 64)
        memcpy(end - 64, data + length - 64, 64);
    else if (length)
        memcpy(end - length, data, length);
    memcpy(end, padding, 64);
    size = message->padded + 64 + 64 * padded - 8;
    for (i = 0; i < 8; i++)
        size[i] = (uint8_t)(bits >> (56 - 8 * i));
}

static inline const uint8_t* kvc_sha256_block(const kvc_sha256_message* message,
                                              size_t i) {
    return i < message->whole ? message->data + 64 * i
                              : message->padded + 64 * (i - message->whole + 1);
}

/* -- portable --------------------------------------------------------------------- */

#define KVC_ROTR(x, n) ((x) >> (n) | (x) << (32 - (n)))

static inline uint32_t kvc_load_be32(const uint8_t* p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static inline void kvc_store_be32(uint8_t* p, uint32_t word) {
    p[0] = (uint8_t)(word >> 24);
    p[1] = (uint8_t)(word >> 16);
    p[2] = (uint8_t)(word >> 8);
    p[3] = (uint8_t)word;
}

/* Section 6.2.2, step 3. The letters move from round to round, not the values. Ch and
 * Maj are written with one operation less than in the standard. */
#define KVC_ROUND(a, b, c, d, e, f, g, h, t)                                           \
    h += (KVC_ROTR(e, 6) ^ KVC_ROTR(e, 11) ^ KVC_ROTR(e, 25)) + (g ^ (e & (f ^ g))) +  \
         kvc_sha256_k[t] + w[(t) & 15];                                                \
    d += h;                                                                            \
    h += (KVC_ROTR(a, 2) ^ KVC_ROTR(a, 13) ^ KVC_ROTR(a, 22)) +                        \
         ((a & b) | (c & (a | b)))

/* Step 1, in place: w holds the last 16 words of the schedule. */
#define KVC_WORD(t)                                                                    \
    w[(t) & 15] += (KVC_ROTR(w[((t) + 14) & 15], 17) ^                                 \
                    KVC_ROTR(w[((t) + 14) & 15], 19) ^ w[((t) + 14) & 15] >> 10) +     \
                   w[((t) + 9) & 15] +                                                 \
                   (KVC_ROTR(w[((t) + 1) & 15], 7) ^ KVC_ROTR(w[((t) + 1) & 15], 18) ^ \
                    w[((t) + 1) & 15] >> 3)

#define KVC_8_ROUNDS(t)                                                                \
    KVC_ROUND(a, b, c, d, e, f, g, h, (t) + 0);                                        \
    KVC_ROUND(h, a, b, c, d, e, f, g, (t) + 1);                                        \
    KVC_ROUND(g, h, a, b, c, d, e, f, (t) + 2);                                        \
    KVC_ROUND(f, g, h, a, b, c, d, e, (t) + 3);                                        \
    KVC_ROUND(e, f, g, h, a, b, c, d, (t) + 4);                                        \
    KVC_ROUND(d, e, f, g, h, a, b, c, (t) + 5);                                        \
    KVC_ROUND(c, d, e, f, g, h, a, b, (t) + 6);                                        \
    KVC_ROUND(b, c, d, e, f, g, h, a, (t) + 7)

#define KVC_8_WORDS(t)                                                                 \
    KVC_WORD((t) + 0);                                                                 \
    KVC_WORD((t) + 1);                                                                 \
    KVC_WORD((t) + 2);                                                                 \
    KVC_WORD((t) + 3);                                                                 \
    KVC_WORD((t) + 4);                                                                 \
    KVC_WORD((t) + 5);                                                                 \
    KVC_WORD((t) + 6);                                                                 \
    KVC_WORD((t) + 7)

static void kvc_sha256_portable(const uint8_t* data, size_t length, uint8_t* digest) {
    kvc_sha256_message message;
    uint32_t state[8], w[16];
    size_t i;
    int t;
    kvc_sha256_pad(&message, data, length);
    memcpy(state, kvc_sha256_start, sizeof state);
    for (i = 0; i < message.blocks; i++) {
        const uint8_t* block = kvc_sha256_block(&message, i);
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (t = 0; t < 16; t++)
            w[t] = kvc_load_be32(block + 4 * t);
        KVC_8_ROUNDS(0);
        KVC_8_ROUNDS(8);
        for (t = 16; t < 64; t += 16) {
            KVC_8_WORDS(0);
            KVC_8_ROUNDS(t);
            KVC_8_WORDS(8);
            KVC_8_ROUNDS(t + 8);
        }
        state[0] += a;
        state[1] += b;
        state[2] += c;
        state[3] += d;
        state[4] += e;
        state[5] += f;
        state[6] += g;
        state[7] += h;
    }
    for (t = 0; t < 8; t++)
        kvc_store_be32(digest + 4 * t, state[t]);
}

static int kvc_sha256_always(void) {
    return 1;
}

/* -- x86: SHA-NI ------------------------------------------------------------------ */

#if defined(KVC_SHA256_X86)

/* sha256rnds2 does two rounds and wants the state as (f, e, b, a) and (h, g, d, c), low
 * word first: its result is the next (f, e, b, a), and what was that becomes the next
 * (h, g, d, c). So two of them, with the registers' parts exchanged, do four rounds. */
#define KVC_NI_ROUNDS(t, w)                                                            \
    sum = _mm_add_epi32(w, _mm_loadu_si128((const __m128i*)(kvc_sha256_k + (t))));     \
    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);                                     \
    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e))

/* Words t to t+3 into w0, from the 16 before: sha256msg1 adds sigma0 of the words 15
 * back, alignr gives those 7 back, sha256msg2 adds sigma1 of those 2 back. */
#define KVC_NI_WORDS(w0, w1, w2, w3)                                                   \
    w0 = _mm_sha256msg2_epu32(                                                         \
        _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4)), w3)

#define KVC_NI_16_ROUNDS(t)                                                            \
    KVC_NI_WORDS(w0, w1, w2, w3);                                                      \
    KVC_NI_ROUNDS((t), w0);                                                            \
    KVC_NI_WORDS(w1, w2, w3, w0);                                                      \
    KVC_NI_ROUNDS((t) + 4, w1);                                                        \
    KVC_NI_WORDS(w2, w3, w0, w1);                                                      \
    KVC_NI_ROUNDS((t) + 8, w2);                                                        \
    KVC_NI_WORDS(w3, w0, w1, w2);                                                      \
    KVC_NI_ROUNDS((t) + 12, w3)

#define KVC_NI_LOAD(p)                                                                 \
    _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(p)), swap_bytes)

KVC_SHA256_X86_TARGET
static void kvc_sha256_sha_ni(const uint8_t* data, size_t length, uint8_t* digest) {
    const __m128i swap_bytes =
        _mm_set_epi32(0x0c0d0e0f, 0x08090a0b, 0x04050607, 0x00010203);
    const __m128i swap_all =
        _mm_set_epi32(0x08090a0b, 0x0c0d0e0f, 0x00010203, 0x04050607);
    kvc_sha256_message message;
    __m128i abef = _mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f,
                                 (int)0x9b05688c);
    __m128i cdgh = _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19);
    __m128i w0, w1, w2, w3, sum;
    size_t i;
    kvc_sha256_pad(&message, data, length);
    for (i = 0; i < message.blocks; i++) {
        const uint8_t* block = kvc_sha256_block(&message, i);
        const __m128i abef_before = abef, cdgh_before = cdgh;
        w0 = KVC_NI_LOAD(block);
        KVC_NI_ROUNDS(0, w0);
        w1 = KVC_NI_LOAD(block + 16);
        KVC_NI_ROUNDS(4, w1);
        w2 = KVC_NI_LOAD(block + 32);
        KVC_NI_ROUNDS(8, w2);
        w3 = KVC_NI_LOAD(block + 48);
        KVC_NI_ROUNDS(12, w3);
        KVC_NI_16_ROUNDS(16);
        KVC_NI_16_ROUNDS(32);
        KVC_NI_16_ROUNDS(48);
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    /* (b, a, d, c) and (f, e, h, g) by now, each word still to be turned round. */
    _mm_storeu_si128((__m128i*)digest,
                     _mm_shuffle_epi8(_mm_unpackhi_epi64(abef, cdgh), swap_all));
    _mm_storeu_si128((__m128i*)(digest + 16),
                     _mm_shuffle_epi8(_mm_unpacklo_epi64(abef, cdgh), swap_all));
}

/* The instructions are there, and the system keeps the registers they use. */
static int kvc_sha256_has_sha_ni(void) {
    enum { SSSE3 = 1 << 9, SSE41 = 1 << 19, OSXSAVE = 1 << 27, SHA = 1 << 29, SSE = 2 };
    unsigned features, extended, saved = SSE;
#if defined(_MSC_VER)
    int leaf[4];
    __cpuid(leaf, 0);
    if (leaf[0] < 7)
        return 0;
    __cpuid(leaf, 1);
    features = (unsigned)leaf[2];
    __cpuidex(leaf, 7, 0);
    extended = (unsigned)leaf[1];
    if (features & OSXSAVE)
        saved = (unsigned)_xgetbv(0);
#else
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return 0;
    features = c;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    extended = b;
    if (features & OSXSAVE)
        __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
#endif
    return (features & SSSE3) && (features & SSE41) && (extended & SHA) &&
           (saved & SSE);
}

#endif

/* -- Armv8: the SHA-2 instructions ------------------------------------------------ */

#if defined(KVC_SHA256_ARM)

/* sha256h and sha256h2 do four rounds for one half of the state each, (a, b, c, d) and
 * (e, f, g, h), and both want the other half as it was before. */
#define KVC_ARM_ROUNDS(t, w)                                                           \
    sum = vaddq_u32(w, vld1q_u32(kvc_sha256_k + (t)));                                 \
    abcd_before = abcd;                                                                \
    abcd = vsha256hq_u32(abcd, efgh, sum);                                             \
    efgh = vsha256h2q_u32(efgh, abcd_before, sum)

/* Words t to t+3 into w0, from the 16 before: sigma0, then the rest. */
#define KVC_ARM_WORDS(w0, w1, w2, w3)                                                  \
    w0 = vsha256su1q_u32(vsha256su0q_u32(w0, w1), w2, w3)

#define KVC_ARM_16_ROUNDS(t)                                                           \
    KVC_ARM_WORDS(w0, w1, w2, w3);                                                     \
    KVC_ARM_ROUNDS((t), w0);                                                           \
    KVC_ARM_WORDS(w1, w2, w3, w0);                                                     \
    KVC_ARM_ROUNDS((t) + 4, w1);                                                       \
    KVC_ARM_WORDS(w2, w3, w0, w1);                                                     \
    KVC_ARM_ROUNDS((t) + 8, w2);                                                       \
    KVC_ARM_WORDS(w3, w0, w1, w2);                                                     \
    KVC_ARM_ROUNDS((t) + 12, w3)

#define KVC_ARM_LOAD(p) vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(p)))
#define KVC_ARM_STORE(p, words) vst1q_u8(p, vrev32q_u8(vreinterpretq_u8_u32(words)))

KVC_SHA256_ARM_TARGET
static void kvc_sha256_armv8(const uint8_t* data, size_t length, uint8_t* digest) {
    kvc_sha256_message message;
    uint32x4_t abcd = vld1q_u32(kvc_sha256_start);
    uint32x4_t efgh = vld1q_u32(kvc_sha256_start + 4);
    uint32x4_t w0, w1, w2, w3, sum, abcd_before;
    size_t i;
    kvc_sha256_pad(&message, data, length);
    for (i = 0; i < message.blocks; i++) {
        const uint8_t* block = kvc_sha256_block(&message, i);
        const uint32x4_t abcd_start = abcd, efgh_start = efgh;
        w0 = KVC_ARM_LOAD(block);
        KVC_ARM_ROUNDS(0, w0);
        w1 = KVC_ARM_LOAD(block + 16);
        KVC_ARM_ROUNDS(4, w1);
        w2 = KVC_ARM_LOAD(block + 32);
        KVC_ARM_ROUNDS(8, w2);
        w3 = KVC_ARM_LOAD(block + 48);
        KVC_ARM_ROUNDS(12, w3);
        KVC_ARM_16_ROUNDS(16);
        KVC_ARM_16_ROUNDS(32);
        KVC_ARM_16_ROUNDS(48);
        abcd = vaddq_u32(abcd, abcd_start);
        efgh = vaddq_u32(efgh, efgh_start);
    }
    KVC_ARM_STORE(digest, abcd);
    KVC_ARM_STORE(digest + 16, efgh);
}

static int kvc_sha256_has_armv8(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & (1UL << 6)) != 0; /* HWCAP_SHA2 */
#else
    return 1; /* what this is built for always has them */
#endif
}

#endif

/* -- the paths, best first -------------------------------------------------------- */

static const kvc_sha256_path kvc_sha256_paths[] = {
#if defined(KVC_SHA256_X86)
    {"sha_ni", kvc_sha256_sha_ni, kvc_sha256_has_sha_ni},
#endif
#if defined(KVC_SHA256_ARM)
    {"armv8", kvc_sha256_armv8, kvc_sha256_has_armv8},
#endif
    {"portable", kvc_sha256_portable, kvc_sha256_always},
};

enum { KVC_SHA256_PATHS = sizeof kvc_sha256_paths / sizeof kvc_sha256_paths[0] };

#endif
