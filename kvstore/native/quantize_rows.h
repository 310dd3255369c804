/*
 * Quantisation of rows of one head, in vectors of LANES floats. quantize.c includes this once for each instruction set,
 * with NAME(x) for the names of that copy, KV_LEVEL for its instructions and LANES for what one register holds.
 * docs/FORMAT.md has the arithmetic; each operation is a single IEEE one in fp32, so every copy, numpy and a GPU give
 * the same bytes.
 */
#include "quantize_vectors.h"

/* ---- Rows of floats. */

/* NaN becomes 0, all else is brought into range. */
static void NAME(clean)(float *row, int dim) {
    for (int c = 0; c < dim; c++) {
        float x = row[c] != row[c] ? 0.0f : row[c];
        row[c] = x > VALUE_MAX ? VALUE_MAX : x < -VALUE_MAX ? -VALUE_MAX : x;
    }
}

/* Smallest and largest of each of `n` rows of a buffer. */
INLINE void NAME(bounds)(const float *buffer, int n, int dim, float *least, float *most) {
    for (int r = 0; r < n; r++) {
        F low = NAME(get)(buffer + r * dim), high = low;
        for (int c = LANES; c < dim; c += LANES) {
            F x = NAME(get)(buffer + r * dim + c);
            low = NAME(min)(low, x), high = NAME(max)(high, x);
        }
        least[r] = NAME(min_of)(low), most[r] = NAME(max_of)(high);
    }
}

/* Rows as floats, with their bounds; 1 if there is something to clean, which the bounds may miss. */
INLINE int NAME(load_batch_as)(const char *const *rows, int n, int dim, float *buffer, float *least, float *most,
                               int dtype) {
    I seen = {0};
    for (int r = 0; r < n; r++) {
        F low = NAME(load)(rows[r], dtype), high = low;
        for (int c = 0; c < dim; c += LANES) {
            F x = NAME(load)(rows[r] + c * element_bytes(dtype), dtype);
            seen = NAME(max_int)(seen, (I)x & 0x7fffffff);
            low = NAME(min)(low, x), high = NAME(max)(high, x);
            NAME(put)(buffer + r * dim + c, x);
        }
        least[r] = NAME(min_of)(low), most[r] = NAME(max_of)(high);
    }
    return NAME(any_above)(seen, VALUE_MAX_BITS);
}

static int NAME(load_batch)(const Job *job, const char *const *rows, int n, float *buffer, float *least, float *most) {
    const int dim = job->dim;
    if (job->dtype == DTYPE_BF16) return NAME(load_batch_as)(rows, n, dim, buffer, least, most, DTYPE_BF16);
    if (job->dtype == DTYPE_FP16) return NAME(load_batch_as)(rows, n, dim, buffer, least, most, DTYPE_FP16);
    return NAME(load_batch_as)(rows, n, dim, buffer, least, most, DTYPE_FP32);
}

INLINE void NAME(store_row)(const Job *job, char *dst, const float *row, int dtype) {
    const int streams = can_stream(job, dst);
    for (int c = 0; c < job->dim; c += LANES)
        NAME(store)(dst + c * element_bytes(dtype), NAME(get)(row + c), dtype, streams);
}

/* Sums and differences at distance 1, 2, ... within a vector. */
INLINE F NAME(mixed)(F x) {
    const uint32_t m = 1u << 31;
#if LANES == 16
    x = SHUFFLED(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14) +
        (F)((U)x ^ (U){0, m, 0, m, 0, m, 0, m, 0, m, 0, m, 0, m, 0, m});
    x = SHUFFLED(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13) +
        (F)((U)x ^ (U){0, 0, m, m, 0, 0, m, m, 0, 0, m, m, 0, 0, m, m});
    x = SHUFFLED(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11) +
        (F)((U)x ^ (U){0, 0, 0, 0, m, m, m, m, 0, 0, 0, 0, m, m, m, m});
    return SHUFFLED(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7) +
           (F)((U)x ^ (U){0, 0, 0, 0, 0, 0, 0, 0, m, m, m, m, m, m, m, m});
#elif LANES == 8
    x = SHUFFLED(x, 1, 0, 3, 2, 5, 4, 7, 6) + (F)((U)x ^ (U){0, m, 0, m, 0, m, 0, m});
    x = SHUFFLED(x, 2, 3, 0, 1, 6, 7, 4, 5) + (F)((U)x ^ (U){0, 0, m, m, 0, 0, m, m});
    return SHUFFLED(x, 4, 5, 6, 7, 0, 1, 2, 3) + (F)((U)x ^ (U){0, 0, 0, 0, m, m, m, m});
#else
    x = SHUFFLED(x, 1, 0, 3, 2) + (F)((U)x ^ (U){0, m, 0, m});
    return SHUFFLED(x, 2, 3, 0, 1) + (F)((U)x ^ (U){0, 0, m, m});
#endif
}

/* One run of `n` vectors: signs (unless on the way `back`), the Hadamard matrix, the norm, signs (on the way back). */
INLINE void NAME(turn_run)(float *run, const uint32_t *signs, float norm, int n, int back) {
    F x[DIM_MAX / LANES];
    U flips;
    for (int v = 0; v < n; v++) {
        x[v] = NAME(get)(run + v * LANES);
        memcpy(&flips, signs + v * LANES, sizeof flips);
        x[v] = NAME(mixed)(back ? x[v] : (F)((U)x[v] ^ flips));
    }
    for (int apart = 1; apart < n; apart *= 2)
        for (int v = 0; v < n; v++)
            if (!(v & apart)) {
                F a = x[v], b = x[v + apart];
                x[v] = a + b, x[v + apart] = a - b;
            }
    for (int v = 0; v < n; v++) {
        F y = x[v] * norm;
        memcpy(&flips, signs + v * LANES, sizeof flips);
        NAME(put)(run + v * LANES, back ? (F)((U)y ^ flips) : y);
    }
}

INLINE void NAME(turn)(const Job *job, float *row, int back) {
    for (int c = 0; c < job->dim; c += job->rotated_run) {
        const uint32_t *signs = job->signs + c;
        const int n = job->rotated_run / LANES;
        if (n == 1) NAME(turn_run)(row + c, signs, job->norm, 1, back);
        else if (n == 4) NAME(turn_run)(row + c, signs, job->norm, 4, back);
        else if (n == 8) NAME(turn_run)(row + c, signs, job->norm, 8, back);
        else if (n == 16) NAME(turn_run)(row + c, signs, job->norm, 16, back);
        else if (n == 32) NAME(turn_run)(row + c, signs, job->norm, 32, back);
        else NAME(turn_run)(row + c, signs, job->norm, n, back);
    }
}

static void NAME(rotate)(const Job *job, float *row) { NAME(turn)(job, row, 0); }
static void NAME(rotate_back)(const Job *job, float *row) { NAME(turn)(job, row, 1); }

/* ---- Scales and minima. */

typedef struct {
    F low, scale, inverse;
    H low16, scale16;
} NAME(Numbers);

/* The inverse of a scale that is 0 is 0. */
INLINE F NAME(inverse)(F scale) { return NAME(pick)(scale > 0, 1.0f / scale, (F){0}); }

INLINE NAME(Numbers) NAME(numbers_of)(F least, F most, int bits) {
    NAME(Numbers) n;
    n.low16 = NAME(to_half)(least + 0.0f); /* no negative zero */
    n.low = NAME(from_half)(n.low16);
    F range = NAME(max)(most - n.low, (F){0});
    n.scale16 = NAME(to_half)(range / (float)((1 << bits) - 1));
    n.scale = NAME(from_half)(n.scale16);
    n.inverse = NAME(inverse)(n.scale);
    return n;
}

INLINE NAME(Numbers) NAME(fp8_numbers)(F least, F most) {
    NAME(Numbers) n = {0};
    n.scale16 = NAME(to_half)(NAME(max)(most, -least) / 448.0f + 0.0f);
    n.inverse = NAME(inverse)(NAME(from_half)(n.scale16));
    return n;
}

/* Stored numbers; what is no finite one, and was never written, counts as 0. */
INLINE F NAME(number)(const uint16_t *at, int n) {
    H h = {0};
    if (n == LANES) memcpy(&h, at, sizeof h);
    else memcpy(&h, at, (size_t)n * 2);
    h &= (H)((h & 0x7c00) != 0x7c00);
    return NAME(from_half)(h);
}

INLINE void NAME(quantize)(uint8_t *codes, const float *row, int dim, F low, F inverse, int bits) {
    const F most = NAME(all)((float)((1 << bits) - 1));
    for (int c = 0; c < dim; c += LANES) {
        F t = (NAME(get)(row + c) - low) * inverse + 0.5f;
        t = NAME(min)(NAME(max)(t, (F){0}), most);
        NAME(pack)(codes + c * bits / 8, __builtin_convertvector(t, I), bits);
    }
}

/* ---- Batches of rows with numbers of their own. */

static int NAME(encode_batch)(const Job *job, const char *const *rows, int n, uint8_t *codes, uint16_t *numbers) {
    float buffer[BATCH * DIM_MAX] __attribute__((aligned(64))), least[BATCH] = {0}, most[BATCH] = {0};
    const int dim = job->dim, bits = job->bits;
    const int64_t code_bytes = code_row_bytes(job);
    int lost = NAME(load_batch)(job, rows, n, buffer, least, most);
    if (lost) NAME(clean)(buffer, n * dim);
    if (job->scheme == PER_TOKEN_ROTATED)
        for (int r = 0; r < n; r++) NAME(rotate)(job, buffer + r * dim);
    if (lost || job->scheme == PER_TOKEN_ROTATED) NAME(bounds)(buffer, n, dim, least, most);
    int beyond = 0;
    for (int r = 0; r < n; r++) beyond |= least[r] < -VALUE_MAX || most[r] > VALUE_MAX;
    if (beyond) { /* rotation has made it so */
        lost = 1;
        NAME(clean)(buffer, n * dim);
        NAME(bounds)(buffer, n, dim, least, most);
    }
    uint16_t low16[BATCH], scale16[BATCH];
    for (int r = 0; r < BATCH; r += LANES) {
        NAME(Numbers) found = job->scheme == FP8 ? NAME(fp8_numbers)(NAME(get)(least + r), NAME(get)(most + r))
                                                 : NAME(numbers_of)(NAME(get)(least + r), NAME(get)(most + r), bits);
        memcpy(low16 + r, &found.low16, sizeof found.low16), memcpy(scale16 + r, &found.scale16, sizeof found.scale16);
        NAME(put)(least + r, found.low), NAME(put)(most + r, found.inverse);
    }
    if (job->scheme == FP8) {
        memcpy(numbers, scale16, (size_t)n * 2);
        for (int r = 0; r < n; r++) {
            const F by = NAME(all)(most[r]), end = NAME(all)(448.0f);
            for (int c = 0; c < dim; c += LANES) {
                F x = NAME(get)(buffer + r * dim + c) * by;
                NAME(pack)(codes + r * code_bytes + c, NAME(to_fp8)(NAME(min)(NAME(max)(x, -end), end)), 8);
            }
        }
        return lost;
    }
    memcpy(numbers, low16, (size_t)n * 2);
    memcpy(numbers + job->count, scale16, (size_t)n * 2);
#define QUANTIZE(bits)                                                                                                 \
    for (int r = 0; r < n; r++)                                                                                        \
        NAME(quantize)(codes + r * code_bytes, buffer + r * dim, dim, NAME(all)(least[r]), NAME(all)(most[r]), bits)
    if (bits == 8) QUANTIZE(8);
    else if (bits == 4) QUANTIZE(4);
    else QUANTIZE(2);
#undef QUANTIZE
    return lost;
}

INLINE void NAME(dequantize)(const uint8_t *codes, char *dst, int dim, F low, F scale, int bits, int dtype, int fp8,
                             int streams) {
    for (int c = 0; c < dim; c += LANES) {
        I q = NAME(unpack)(codes + c * bits / 8, bits);
        F x = fp8 ? NAME(from_fp8)(q) * scale : __builtin_convertvector(q, F) * scale + low;
        NAME(store)(dst + c * element_bytes(dtype), x, dtype, streams);
    }
}

INLINE void NAME(decode_rows)(const Job *job, char *const *rows, int n, const uint8_t *codes, const float *lows,
                              const float *scales, int bits, int dtype, int fp8) {
    for (int r = 0; r < n; r++, codes += code_row_bytes(job)) {
        const F low = NAME(all)(lows[r]), scale = NAME(all)(scales[r]);
        if (dtype == job->dtype && can_stream(job, rows[r]))
            NAME(dequantize)(codes, rows[r], job->dim, low, scale, bits, dtype, fp8, 1);
        else NAME(dequantize)(codes, rows[r], job->dim, low, scale, bits, dtype, fp8, 0);
    }
}

#define BY_BITS(call, bits)                                                                                            \
    do {                                                                                                               \
        if ((bits) == 8) call(8);                                                                                      \
        else if ((bits) == 4) call(4);                                                                                 \
        else call(2);                                                                                                  \
    } while (0)
#define BY_DTYPE(call, dtype)                                                                                          \
    do {                                                                                                               \
        if ((dtype) == DTYPE_BF16) call(DTYPE_BF16);                                                                   \
        else if ((dtype) == DTYPE_FP16) call(DTYPE_FP16);                                                              \
        else call(DTYPE_FP32);                                                                                         \
    } while (0)

static void NAME(decode_batch)(const Job *job, char *const *rows, int n, const uint8_t *codes, const uint16_t *numbers) {
    float buffer[BATCH * DIM_MAX] __attribute__((aligned(64))), lows[BATCH] = {0}, scales[BATCH];
    for (int r = 0; r < n; r += LANES) {
        const int some = n - r < LANES ? n - r : LANES;
        if (job->scheme == FP8) {
            NAME(put)(scales + r, NAME(number)(numbers + r, some));
            continue;
        }
        NAME(put)(lows + r, NAME(number)(numbers + r, some));
        NAME(put)(scales + r, NAME(number)(numbers + job->count + r, some));
    }
    if (job->scheme == FP8) {
#define FROM_FP8(dtype) NAME(decode_rows)(job, rows, n, codes, lows, scales, 8, dtype, 1)
        BY_DTYPE(FROM_FP8, job->dtype);
#undef FROM_FP8
    } else if (job->scheme == PER_TOKEN_ROTATED) {
        char *turned[BATCH];
        for (int r = 0; r < n; r++) turned[r] = (char *)(buffer + r * job->dim);
#define TO_FLOATS(bits) NAME(decode_rows)(job, turned, n, codes, lows, scales, bits, DTYPE_FP32, 0)
        BY_BITS(TO_FLOATS, job->bits);
#undef TO_FLOATS
        for (int r = 0; r < n; r++) {
            NAME(rotate_back)(job, buffer + r * job->dim);
#define STORE(dtype) NAME(store_row)(job, rows[r], buffer + r * job->dim, dtype)
            BY_DTYPE(STORE, job->dtype);
#undef STORE
        }
    } else {
#define TO_BF16(bits) NAME(decode_rows)(job, rows, n, codes, lows, scales, bits, DTYPE_BF16, 0)
#define TO_FP16(bits) NAME(decode_rows)(job, rows, n, codes, lows, scales, bits, DTYPE_FP16, 0)
#define TO_FP32(bits) NAME(decode_rows)(job, rows, n, codes, lows, scales, bits, DTYPE_FP32, 0)
        if (job->dtype == DTYPE_BF16) BY_BITS(TO_BF16, job->bits);
        else if (job->dtype == DTYPE_FP16) BY_BITS(TO_FP16, job->bits);
        else BY_BITS(TO_FP32, job->bits);
#undef TO_BF16
#undef TO_FP16
#undef TO_FP32
    }
}

/* ---- Groups of rows whose channels have numbers of their own: some vectors of channels at a time. */

INLINE int NAME(encode_channels_as)(const Job *job, const char *const *rows, int n, int at, uint8_t *codes,
                                    uint16_t *numbers, int vectors, int dtype) {
    float buffer[GROUP * CHANNELS] __attribute__((aligned(64)));
    const int width = vectors * LANES, bits = job->bits;
    const int64_t code_bytes = code_row_bytes(job);
    F low[CHANNELS / LANES] = {{0}}, high[CHANNELS / LANES] = {{0}};
    I seen = {0};
    for (int r = 0; r < n; r++)
        for (int v = 0; v < vectors; v++) {
            F x = NAME(load)(rows[r] + (at + v * LANES) * element_bytes(dtype), dtype);
            seen = NAME(max_int)(seen, (I)x & 0x7fffffff);
            low[v] = r ? NAME(min)(low[v], x) : x, high[v] = r ? NAME(max)(high[v], x) : x;
            NAME(put)(buffer + r * width + v * LANES, x);
        }
    const int lost = NAME(any_above)(seen, VALUE_MAX_BITS);
    if (lost) {
        NAME(clean)(buffer, n * width);
        for (int r = 0; r < n; r++)
            for (int v = 0; v < vectors; v++) {
                F x = NAME(get)(buffer + r * width + v * LANES);
                low[v] = r ? NAME(min)(low[v], x) : x, high[v] = r ? NAME(max)(high[v], x) : x;
            }
    }
    for (int v = 0; v < vectors; v++) {
        NAME(Numbers) found = NAME(numbers_of)(low[v], high[v], bits);
        memcpy(numbers + at + v * LANES, &found.low16, sizeof found.low16);
        memcpy(numbers + job->dim + at + v * LANES, &found.scale16, sizeof found.scale16);
        low[v] = found.low, high[v] = found.inverse;
    }
#define QUANTIZE(bits)                                                                                                 \
    for (int r = 0; r < n; r++)                                                                                        \
        for (int v = 0; v < vectors; v++)                                                                              \
            NAME(quantize)(codes + r * code_bytes + (at + v * LANES) * bits / 8, buffer + r * width + v * LANES, LANES,  \
                           low[v], high[v], bits)
    if (bits == 8) QUANTIZE(8);
    else if (bits == 4) QUANTIZE(4);
    else QUANTIZE(2);
#undef QUANTIZE
    return lost;
}

static int NAME(encode_group)(const Job *job, const char *const *rows, int n, uint8_t *codes, uint16_t *numbers) {
    int lost = 0, at = 0;
#define MANY(dtype) lost |= NAME(encode_channels_as)(job, rows, n, at, codes, numbers, CHANNELS / LANES, dtype)
#define ONE(dtype) lost |= NAME(encode_channels_as)(job, rows, n, at, codes, numbers, 1, dtype)
    for (; job->dim - at >= CHANNELS; at += CHANNELS) BY_DTYPE(MANY, job->dtype);
    for (; at < job->dim; at += LANES) BY_DTYPE(ONE, job->dtype);
#undef MANY
#undef ONE
    return lost;
}

INLINE void NAME(decode_channels)(const Job *job, char *const *rows, int n, const uint8_t *codes, const uint16_t *numbers,
                                  int bits, int dtype) {
    const int dim = job->dim;
    const int64_t code_bytes = code_row_bytes(job);
    float lows[DIM_MAX], scales[DIM_MAX];
    for (int c = 0; c < dim; c += LANES) {
        NAME(put)(lows + c, NAME(number)(numbers + c, LANES));
        NAME(put)(scales + c, NAME(number)(numbers + dim + c, LANES));
    }
    for (int r = 0; r < n; r++, codes += code_bytes) {
        const int streams = can_stream(job, rows[r]);
        for (int c = 0; c < dim; c += LANES)
            NAME(dequantize)(codes + c * bits / 8, rows[r] + c * element_bytes(dtype), LANES, NAME(get)(lows + c),
                             NAME(get)(scales + c), bits, dtype, 0, streams);
    }
}

static void NAME(decode_group)(const Job *job, char *const *rows, int n, const uint8_t *codes, const uint16_t *numbers) {
#define TO_BF16(bits) NAME(decode_channels)(job, rows, n, codes, numbers, bits, DTYPE_BF16)
#define TO_FP16(bits) NAME(decode_channels)(job, rows, n, codes, numbers, bits, DTYPE_FP16)
#define TO_FP32(bits) NAME(decode_channels)(job, rows, n, codes, numbers, bits, DTYPE_FP32)
    if (job->dtype == DTYPE_BF16) BY_BITS(TO_BF16, job->bits);
    else if (job->dtype == DTYPE_FP16) BY_BITS(TO_FP16, job->bits);
    else BY_BITS(TO_FP32, job->bits);
#undef TO_BF16
#undef TO_FP16
#undef TO_FP32
}

#undef BY_BITS
#undef BY_DTYPE
#undef F
#undef I
#undef U
#undef H
#undef B
#undef CHANNELS
#undef INLINE
