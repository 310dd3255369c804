/* What quantize.c and quantize_rows.h share: the job, and how rows are found. */
#ifndef KV_QUANTIZE_H
#define KV_QUANTIZE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { DTYPE_BF16 = 0, DTYPE_FP16 = 1, DTYPE_FP32 = 2 };
enum { PER_TOKEN = 0, PER_TOKEN_ROTATED = 1, PER_CHANNEL = 2, FP8 = 3 };

/* Rows of a batch, rows of a group of channels, longest row. Rows have a multiple of 16 elements. */
enum { BATCH = 16, GROUP = 32, DIM_MAX = 1024 };

/* The largest fp16: nothing beyond it is stored, so that a scale and a minimum always fit. */
#define VALUE_MAX 65504.0f
#define VALUE_MAX_BITS 0x477fe000

/* Mirrored field by field by kvstore/native/quantize.py. */
typedef struct {
    int32_t dtype, scheme, bits, heads, dim;
    int32_t count; /* rows of every head */
    int32_t first; /* the token of row 0, where there is no list of tokens */
    int32_t page_tokens;
    int32_t streams;     /* rows are written past the cache, where they can be */
    int32_t rotated_run; /* elements that one Hadamard matrix mixes: a power of two that divides dim */
    float norm;          /* 1 / sqrt(rotated_run) */
    int64_t page_stride, token_stride, head_stride;
    const uint32_t *signs; /* [dim], 0 or the sign bit */
} Job;

static inline int element_bytes(int dtype) { return dtype == DTYPE_FP32 ? 4 : 2; }

/* Where `n` rows of a head lie, from `row` on; `tokens`: [heads, count], or NULL for those from job->first on. */
static inline void find_rows(const Job *job, char *kv, int head, const int32_t *tokens, int row, int n, char **rows) {
    kv += head * job->head_stride;
    if (tokens) {
        tokens += (int64_t)head * job->count + row;
        for (int r = 0; r < n; r++)
            rows[r] = kv + tokens[r] / job->page_tokens * job->page_stride +
                      tokens[r] % job->page_tokens * job->token_stride;
        return;
    }
    int32_t page = (job->first + row) / job->page_tokens, at = (job->first + row) % job->page_tokens;
    for (int r = 0; r < n; r++) {
        rows[r] = kv + page * job->page_stride + at * job->token_stride;
        if (++at == job->page_tokens) at = 0, page++;
    }
}

/* Whole vectors of a row can be written past the cache. */
static inline int can_stream(const Job *job, const char *row) {
    return job->streams && (uintptr_t)row % 32 == 0;
}

/* Of one head: where in a payload's codes and numbers it begins. */
static inline int64_t code_row_bytes(const Job *job) { return (int64_t)job->dim * job->bits / 8; }

static inline int64_t numbers_of_head(const Job *job) {
    if (job->scheme == PER_CHANNEL) return (int64_t)(job->count + GROUP - 1) / GROUP * 2 * job->dim;
    return (int64_t)job->count * (job->scheme == FP8 ? 1 : 2);
}

static inline float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* IEEE fp16 to fp32, exactly. */
static inline float half_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000 | magnitude << 13);
    if (magnitude >= 0x0400) return bits_float(sign | ((magnitude << 13) + (112u << 23)));
    return bits_float(sign | float_bits((float)magnitude * 0x1p-24f));
}

/* fp32 of at most VALUE_MAX to fp16, to the nearest, ties to even. */
static inline uint16_t float_half(float value) {
    uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude < 113u << 23) /* below the normal fp16: the sum rounds to multiples of 2^-24 */
        return (uint16_t)(sign | (float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f)));
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((magnitude >> 13) - (112u << 10)));
}

/* 8 codes at a time, one in each byte: to 4 or 2 bits each, the first in the lowest, and back. */
static inline uint64_t packed_codes(uint64_t w, int bits) {
    if (bits == 4) {
        w = (w | w >> 4) & 0x00ff00ff00ff00ff;
        w = (w | w >> 8) & 0x0000ffff0000ffff;
        return (w | w >> 16) & 0xffffffff;
    }
    w = (w | w >> 6) & 0x000f000f000f000f;
    w = (w | w >> 12) & 0x000000ff000000ff;
    return (w | w >> 24) & 0xffff;
}

static inline uint64_t unpacked_codes(uint64_t w, int bits) {
    if (bits == 4) {
        w = (w | w << 16) & 0x0000ffff0000ffff;
        w = (w | w << 8) & 0x00ff00ff00ff00ff;
        return (w | w << 4) & 0x0f0f0f0f0f0f0f0f;
    }
    w = (w | w << 24) & 0x000000ff000000ff;
    w = (w | w << 12) & 0x000f000f000f000f;
    return (w | w << 6) & 0x0303030303030303;
}

#endif
