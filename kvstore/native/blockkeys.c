/*
 * Chains of block keys: BLAKE2b (RFC 7693) without a key, of 16 bytes, personalised. A prompt of a thousand blocks is a
 * thousand hashes, each of what comes before it; in Python each costs ten times as much as the hash itself.
 *
 * Loaded with ctypes, which lets go of Python's lock for the whole call. Nothing here knows Python.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KV_EXPORT __attribute__((visibility("default")))

enum { BLOCK = 128, KEY = 16, PERSON = 16, ROUNDS = 12 };

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u,
};

static const uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint64_t load(const uint8_t *at) {
    uint64_t word = 0;
    for (int i = 7; i >= 0; i--) word = word << 8 | at[i];
    return word;
}

static void store(uint8_t *at, uint64_t word) {
    for (int i = 0; i < 8; i++) at[i] = (uint8_t)(word >> 8 * i);
}

static inline uint64_t turned(uint64_t word, int by) { return word >> by | word << (64 - by); }

#define MIX(a, b, c, d, x, y)                                                                                          \
    do {                                                                                                               \
        v[a] += v[b] + (x), v[d] = turned(v[d] ^ v[a], 32), v[c] += v[d], v[b] = turned(v[b] ^ v[c], 24);             \
        v[a] += v[b] + (y), v[d] = turned(v[d] ^ v[a], 16), v[c] += v[d], v[b] = turned(v[b] ^ v[c], 63);             \
    } while (0)

/* `n_bytes` is how much was hashed with this block. */
static void compress(uint64_t h[8], const uint8_t *block, uint64_t n_bytes, int last) {
    uint64_t v[16], m[16];
    for (int i = 0; i < 16; i++) m[i] = load(block + 8 * i);
    for (int i = 0; i < 8; i++) v[i] = h[i], v[i + 8] = IV[i];
    v[12] ^= n_bytes;
    if (last) v[14] = ~v[14];
    for (int round = 0; round < ROUNDS; round++) {
        const uint8_t *s = SIGMA[round % 10];
        MIX(0, 4, 8, 12, m[s[0]], m[s[1]]);
        MIX(1, 5, 9, 13, m[s[2]], m[s[3]]);
        MIX(2, 6, 10, 14, m[s[4]], m[s[5]]);
        MIX(3, 7, 11, 15, m[s[6]], m[s[7]]);
        MIX(0, 5, 10, 15, m[s[8]], m[s[9]]);
        MIX(1, 6, 11, 12, m[s[10]], m[s[11]]);
        MIX(2, 7, 8, 13, m[s[12]], m[s[13]]);
        MIX(3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

/*
 * Keys of n plain rows that lie end to end, each of `row_bytes`: the hash of the key before (`parent` for the first), the
 * row, and a zero byte. They go to `out`, 16 bytes each.
 */
KV_EXPORT void kv_block_keys(const uint8_t *parent, const uint8_t *rows, size_t row_bytes, size_t n, const uint8_t *person,
                             uint8_t *out) {
    const size_t n_bytes = KEY + row_bytes + 1;
    for (size_t i = 0; i < n; i++, rows += row_bytes, parent = out, out += KEY) {
        uint8_t block[BLOCK];
        uint64_t h[8];
        memcpy(h, IV, sizeof h);
        h[0] ^= 0x01010000u ^ KEY;
        h[6] ^= load(person), h[7] ^= load(person + 8);
        memcpy(block, parent, KEY);
        /* What of the row is hashed, and where in the block the next byte goes. */
        size_t taken = 0, at = KEY;
        for (;;) {
            size_t part = row_bytes - taken < BLOCK - at ? row_bytes - taken : BLOCK - at;
            memcpy(block + at, rows + taken, part);
            taken += part, at += part;
            if (at < BLOCK) break;
            compress(h, block, (uint64_t)(KEY + taken), 0); /* the zero byte is still to come */
            at = 0;
        }
        memset(block + at, 0, BLOCK - at);
        compress(h, block, (uint64_t)n_bytes, 1);
        store(out, h[0]), store(out + 8, h[1]);
    }
}
