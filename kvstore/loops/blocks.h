/* The checksum and the compression of the blocks of sorted files.
 *
 * XXH3, 64 bits wide, with seed 0 and the usual secret, as RocksDB takes it (its checksum type 4);
 * source: the specification of xxHash, version 0.8. The blocks of LZ4; source: its description of
 * the block format. The build needs a C compiler and nothing else, so both are here. Both are
 * compared with the packages `xxhash` and `pyarrow` by tests/loops/test_files.py.
 */

#ifndef KVSTORE_BLOCKS_H
#define KVSTORE_BLOCKS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define KV_PAD 32 /* bytes that may be written and read behind the end of a buffer of blocks */

/* -- numbers as they lie in a file: little endian ------------------------------------------- */

static inline uint32_t kv_read32(const unsigned char *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static inline uint64_t kv_read64(const unsigned char *at) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
#else
    return (uint64_t)kv_read32(at) | (uint64_t)kv_read32(at + 4) << 32;
#endif
}

/* -- XXH3 ----------------------------------------------------------------------------------- */

#define KV_P32_1 0x9E3779B1U
#define KV_P32_2 0x85EBCA77U
#define KV_P32_3 0xC2B2AE3DU
#define KV_P64_1 0x9E3779B185EBCA87ULL
#define KV_P64_2 0xC2B2AE3D27D4EB4FULL
#define KV_P64_3 0x165667B19E3779F9ULL
#define KV_P64_4 0x85EBCA77C2B2AE63ULL
#define KV_P64_5 0x27D4EB2F165667C5ULL
#define KV_SECRET_BYTES 192
#define KV_STRIPE_BYTES 64
#define KV_STRIPES ((KV_SECRET_BYTES - KV_STRIPE_BYTES) / 8) /* of a block of XXH3 */

static const unsigned char kv_secret[KV_SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t kv_product_folded(uint64_t one, uint64_t other) {
    __uint128_t product = (__uint128_t)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t kv_avalanche(uint64_t hash) {
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9ULL;
    return hash ^ hash >> 32;
}

static inline uint64_t kv_avalanche_64(uint64_t hash) {
    hash ^= hash >> 33;
    hash *= KV_P64_2;
    hash ^= hash >> 29;
    hash *= KV_P64_3;
    return hash ^ hash >> 32;
}

static inline uint64_t kv_mix_16(const unsigned char *data, const unsigned char *secret) {
    return kv_product_folded(kv_read64(data) ^ kv_read64(secret),
                             kv_read64(data + 8) ^ kv_read64(secret + 8));
}

static inline uint64_t kv_xxh3_short(const unsigned char *data, size_t size) {
    if (size > 8) {
        uint64_t low = kv_read64(data) ^ kv_read64(kv_secret + 24) ^ kv_read64(kv_secret + 32);
        uint64_t high =
            kv_read64(data + size - 8) ^ kv_read64(kv_secret + 40) ^ kv_read64(kv_secret + 48);
        uint64_t turned = __builtin_bswap64(low);
        return kv_avalanche(size + turned + high + kv_product_folded(low, high));
    }
    if (size >= 4) {
        uint64_t first = kv_read32(data), last = kv_read32(data + size - 4);
        uint64_t hash =
            (last + (first << 32)) ^ (kv_read64(kv_secret + 8) ^ kv_read64(kv_secret + 16));
        hash ^= (hash << 49 | hash >> 15) ^ (hash << 24 | hash >> 40);
        hash *= 0x9FB21C651E98DF25ULL;
        hash ^= (hash >> 35) + size;
        hash *= 0x9FB21C651E98DF25ULL;
        return hash ^ hash >> 28;
    }
    if (size) {
        uint32_t joined = (uint32_t)data[0] << 16 | (uint32_t)data[size >> 1] << 24 |
                          data[size - 1] | (uint32_t)size << 8;
        return kv_avalanche_64(joined ^ (uint64_t)(kv_read32(kv_secret) ^ kv_read32(kv_secret + 4)));
    }
    return kv_avalanche_64(kv_read64(kv_secret + 56) ^ kv_read64(kv_secret + 64));
}

static inline uint64_t kv_xxh3_middle(const unsigned char *data, size_t size) {
    uint64_t hash = size * KV_P64_1;
    size_t at;
    if (size <= 128) {
        for (at = (size - 1) / 32 + 1; at-- > 0;) {
            hash += kv_mix_16(data + 16 * at, kv_secret + 32 * at);
            hash += kv_mix_16(data + size - 16 * (at + 1), kv_secret + 32 * at + 16);
        }
        return kv_avalanche(hash);
    }
    for (at = 0; at < 8; at++) hash += kv_mix_16(data + 16 * at, kv_secret + 16 * at);
    hash = kv_avalanche(hash);
    for (; at < size / 16; at++) hash += kv_mix_16(data + 16 * at, kv_secret + 16 * (at - 8) + 3);
    hash += kv_mix_16(data + size - 16, kv_secret + 136 - 17);
    return kv_avalanche(hash);
}

static inline void kv_accumulate(uint64_t *sums, const unsigned char *data,
                                 const unsigned char *secret) {
#if defined(__SSE2__) /* each x86 of 64 bits has it; four times as fast as the loop below */
    for (int lane = 0; lane < 8; lane += 2) {
        const __m128i words = _mm_loadu_si128((const __m128i *)(data + 8 * lane));
        const __m128i keys = _mm_loadu_si128((const __m128i *)(secret + 8 * lane));
        const __m128i keyed = _mm_xor_si128(words, keys);
        const __m128i high = _mm_shuffle_epi32(keyed, _MM_SHUFFLE(0, 3, 0, 1));
        const __m128i swapped = _mm_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
        __m128i *sum = (__m128i *)(sums + lane);
        const __m128i added = _mm_add_epi64(_mm_loadu_si128(sum), swapped);
        _mm_storeu_si128(sum, _mm_add_epi64(_mm_mul_epu32(keyed, high), added));
    }
#else
    for (int lane = 0; lane < 8; lane++) {
        uint64_t word = kv_read64(data + 8 * lane);
        uint64_t keyed = word ^ kv_read64(secret + 8 * lane);
        sums[lane ^ 1] += word;
        sums[lane] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
#endif
}

static uint64_t kv_xxh3_long(const unsigned char *data, size_t size) {
    uint64_t sums[8] = {KV_P32_3, KV_P64_1, KV_P64_2, KV_P64_3,
                        KV_P64_4, KV_P32_2, KV_P64_5, KV_P32_1};
    const size_t block = KV_STRIPE_BYTES * KV_STRIPES;
    const unsigned char *end = data + size;
    uint64_t hash = size * KV_P64_1;
    while ((size_t)(end - data) > block) {
        for (size_t stripe = 0; stripe < KV_STRIPES; stripe++)
            kv_accumulate(sums, data + KV_STRIPE_BYTES * stripe, kv_secret + 8 * stripe);
        for (int lane = 0; lane < 8; lane++) {
            const uint64_t secret =
                kv_read64(kv_secret + KV_SECRET_BYTES - KV_STRIPE_BYTES + 8 * lane);
            sums[lane] = (sums[lane] ^ sums[lane] >> 47 ^ secret) * KV_P32_1;
        }
        data += block;
    }
    for (size_t stripe = 0; stripe < (size_t)(end - data - 1) / KV_STRIPE_BYTES; stripe++)
        kv_accumulate(sums, data + KV_STRIPE_BYTES * stripe, kv_secret + 8 * stripe);
    kv_accumulate(sums, end - KV_STRIPE_BYTES, kv_secret + KV_SECRET_BYTES - KV_STRIPE_BYTES - 7);
    for (int lane = 0; lane < 8; lane += 2)
        hash += kv_product_folded(sums[lane] ^ kv_read64(kv_secret + 11 + 8 * lane),
                                  sums[lane + 1] ^ kv_read64(kv_secret + 19 + 8 * lane));
    return kv_avalanche(hash);
}

static inline uint64_t kv_xxh3(const unsigned char *data, size_t size) {
    if (size > 240) return kv_xxh3_long(data, size);
    return size > 16 ? kv_xxh3_middle(data, size) : kv_xxh3_short(data, size);
}

/* -- LZ4 ------------------------------------------------------------------------------------ */

/* Unpack a block of `size` bytes into exactly `wanted` bytes. Returns 0, or -1 where the block is
 * damaged. Both buffers have KV_PAD bytes more, which are read and written, and never used. */
static inline int kv_unpack_lz4(const unsigned char *from, size_t size, unsigned char *to, size_t wanted) {
    const unsigned char *const from_end = from + size;
    unsigned char *const begin = to, *const to_end = to + wanted;
    while (from < from_end) {
        const unsigned token = *from++;
        size_t length = token >> 4;
        if (length == 15) {
            unsigned more;
            do {
                if (from >= from_end) return -1;
                more = *from++;
                length += more;
            } while (more == 255);
        }
        if (length > (size_t)(from_end - from) || length > (size_t)(to_end - to)) return -1;
        if (length <= 32) {
            memcpy(to, from, 32);
        } else {
            memcpy(to, from, length);
        }
        to += length;
        from += length;
        if (from == from_end) return to == to_end ? 0 : -1;
        if (from_end - from < 2) return -1;
        const size_t back = (size_t)from[0] | (size_t)from[1] << 8;
        from += 2;
        if (!back || back > (size_t)(to - begin)) return -1;
        length = token & 15;
        if (length == 15) {
            unsigned more;
            do {
                if (from >= from_end) return -1;
                more = *from++;
                length += more;
            } while (more == 255);
        }
        length += 4;
        if (length > (size_t)(to_end - to)) return -1;
        const unsigned char *match = to - back;
        unsigned char *const end = to + length;
        if (back >= 16) {
            do {
                memcpy(to, match, 16);
                to += 16;
                match += 16;
            } while (to < end);
        } else if (back >= 8) {
            do {
                memcpy(to, match, 8);
                to += 8;
                match += 8;
            } while (to < end);
        } else {
            /* What repeats with `back` repeats with its multiples too: the first above 7 bytes. */
            for (int at = 0; at < 8; at++) to[at] = match[at];
            to += 8;
            match = to - (7 / back + 1) * back;
            while (to < end) {
                memcpy(to, match, 8);
                to += 8;
                match += 8;
            }
        }
        to = end;
    }
    return -1;
}

#define KV_HASH_BITS 12
#define KV_WINDOW 65535 /* how far back a match lies at most */
#define KV_MATCH_LEAST 4
#define KV_TAIL_LITERALS 5 /* the last bytes of a block are literals */
#define KV_TAIL_SEARCHED 12 /* no match begins in the last bytes of a block */

/* Where four bytes were met last, by their hash. The places count on from block to block, so that
 * the places of an earlier block are below `base`, and need not be cleared. */
struct kv_places {
    uint32_t base;
    uint32_t at[1 << KV_HASH_BITS];
};

static inline uint32_t kv_place_of(const unsigned char *at) {
    return (uint32_t)((kv_read64(at) << 24) * KV_P64_1 >> (64 - KV_HASH_BITS));
}

/* Where the bytes at `at` were met last, perhaps; the first byte of the block where they were not.
 * No branch: whether a place is of an earlier block cannot be foretold, and wrong guesses took two
 * thirds of the time. */
static inline const unsigned char *kv_met(struct kv_places *places, uint32_t base,
                                          const unsigned char *from, const unsigned char *at) {
    uint32_t *const place = &places->at[kv_place_of(at)];
    const uint32_t met = *place, back = met - base;
    *place = base + (uint32_t)(at - from);
    return from + (back & -(uint32_t)(met > base));
}

/* How many bytes from `one` and `other` on are the same; `one` is the later one and ends at `end`. */
static inline size_t kv_same(const unsigned char *one, const unsigned char *other,
                             const unsigned char *end) {
    const unsigned char *const begin = one;
    while (end - one >= 8) {
        const uint64_t difference = kv_read64(one) ^ kv_read64(other);
        if (difference) return (size_t)(one - begin) + (size_t)(__builtin_ctzll(difference) >> 3);
        one += 8;
        other += 8;
    }
    while (one < end && *one == *other) {
        one++;
        other++;
    }
    return (size_t)(one - begin);
}

static inline unsigned char *kv_put_length(unsigned char *to, size_t left) {
    for (; left >= 255; left -= 255) *to++ = 255;
    *to++ = (unsigned char)left;
    return to;
}

/* Pack a block of `size` bytes, below 2 GiB, into at most `room` bytes. Returns how many it took, 0
 * where it does not fit. Both buffers have KV_PAD bytes more, which are read and written. */
static inline size_t kv_pack_lz4(const unsigned char *from, size_t size, unsigned char *to, size_t room,
                          struct kv_places *places) {
    const unsigned char *at = from, *unpacked = from, *match;
    const unsigned char *const end = from + size;
    unsigned char *const begin = to, *const to_end = to + room, *token;
    size_t length;
    if (!places->base || places->base + size > UINT32_MAX) {
        memset(places->at, 0, sizeof places->at);
        places->base = 1;
    }
    const uint32_t base = places->base;
    places->base += (uint32_t)size;
    if (size > KV_TAIL_SEARCHED) {
        const unsigned char *const last = end - KV_TAIL_SEARCHED;
        const unsigned char *const match_end = end - KV_TAIL_LITERALS;
        places->at[kv_place_of(at)] = base;
        at++;
        while (at <= last) {
            /* Look for four bytes that were there before, in longer and longer steps. */
            uint32_t tries = 1 << 5;
            for (;;) {
                match = kv_met(places, base, from, at);
                if (kv_read32(match) == kv_read32(at) && at - match <= KV_WINDOW) break;
                at += tries++ >> 5;
                if (at > last) goto ending;
            }
            while (at > unpacked && match > from && at[-1] == match[-1]) {
                at--;
                match--;
            }
            length = (size_t)(at - unpacked);
            if ((size_t)(to_end - to) < length + length / 255 + 16) return 0;
            token = to++;
            if (length < 15) {
                *token = (unsigned char)(length << 4);
                memcpy(to, unpacked, 16);
            } else {
                *token = 15 << 4;
                to = kv_put_length(to, length - 15);
                if (length <= KV_PAD) {
                    memcpy(to, unpacked, KV_PAD);
                } else {
                    memcpy(to, unpacked, length);
                }
            }
            to += length;
            for (;;) {
                const size_t back = (size_t)(at - match);
                *to++ = (unsigned char)back;
                *to++ = (unsigned char)(back >> 8);
                length = kv_same(at + KV_MATCH_LEAST, match + KV_MATCH_LEAST, match_end);
                at += length + KV_MATCH_LEAST;
                if ((size_t)(to_end - to) < length / 255 + 16) return 0;
                if (length < 15) {
                    *token |= (unsigned char)length;
                } else {
                    *token |= 15;
                    to = kv_put_length(to, length - 15);
                }
                unpacked = at;
                if (at > last) goto ending;
                places->at[kv_place_of(at - 2)] = base + (uint32_t)(at - 2 - from);
                match = kv_met(places, base, from, at);
                if (kv_read32(match) != kv_read32(at) || at - match > KV_WINDOW) break;
                token = to++; /* a match right behind a match */
                *token = 0;
            }
            at++;
        }
    }
ending:
    length = (size_t)(end - unpacked);
    if ((size_t)(to_end - to) < length + length / 255 + 16) return 0;
    if (length < 15) {
        *to++ = (unsigned char)(length << 4);
    } else {
        *to++ = 15 << 4;
        to = kv_put_length(to, length - 15);
    }
    memcpy(to, unpacked, length);
    return (size_t)(to + length - begin);
}

#endif
