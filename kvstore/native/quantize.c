/*
 * KV rounded to 8, 4 or 2 bits, or to fp8, and back: rows of batches of page groups, heads shared among threads.
 * docs/FORMAT.md has the bytes. The arithmetic is in quantize_rows.h, compiled for AVX-512, AVX2 and anything else;
 * which copy runs is chosen at run time. They, and compression/quantize_numpy.py, give the same bytes.
 *
 * Loaded with ctypes, which lets go of Python's lock for the whole call. Nothing here knows Python.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "quantize.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define KV_X86 1
#include <immintrin.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "codes are packed on little-endian machines only; numpy does the work elsewhere"
#endif

#define KV_EXPORT __attribute__((visibility("default")))

/* A product and a sum stay two operations. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#define SHUFFLED(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#define SHUFFLED(x, ...) __builtin_shuffle(x, (I){__VA_ARGS__})
#endif

enum { KV_PORTABLE = 0, KV_AVX2 = 1, KV_AVX512 = 2 };
enum { MAX_THREADS = 16 };

#define KV_LEVEL 0
#define LANES 4
#define NAME(x) portable_##x
#include "quantize_rows.h"
#undef NAME
#undef LANES
#undef KV_LEVEL

#ifdef KV_X86
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define KV_LEVEL 1
#define LANES 8
#define NAME(x) avx2_##x
#include "quantize_rows.h"
#undef NAME
#undef LANES
#undef KV_LEVEL
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")
#define KV_LEVEL 2
#define LANES 16
#define NAME(x) avx512_##x
#include "quantize_rows.h"
#undef NAME
#undef LANES
#undef KV_LEVEL
#pragma GCC pop_options
#endif

/* The best of the levels above that this machine has. */
KV_EXPORT int kv_quantize_level(void) {
#ifdef KV_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return KV_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return KV_AVX2;
#endif
    return KV_PORTABLE;
}

typedef int (*Encode)(const Job *, const char *const *, int, uint8_t *, uint16_t *);
typedef void (*Decode)(const Job *, char *const *, int, const uint8_t *, const uint16_t *);

typedef struct {
    const Job *job;
    const uint64_t *kv, *codes, *numbers; /* addresses, one of each for a page group */
    const int32_t *tokens;                /* [page groups, heads, count], or NULL */
    uint8_t *lost;                        /* [page groups * heads] */
    Encode encode;
    Decode decode;
    int64_t first, end; /* of the page groups' heads, counted through */
} Part;

/* Rows whose numbers are worked out together. */
static int rows_of_step(const Job *job) { return job->scheme == PER_CHANNEL ? GROUP : BATCH; }

static void head_of(const Part *part, int64_t unit) {
    const Job *job = part->job;
    const int64_t i = unit / job->heads;
    const int head = (int)(unit % job->heads), step = rows_of_step(job);
    const int32_t *tokens = part->tokens ? part->tokens + i * job->heads * job->count : NULL;
    char *kv = (char *)(uintptr_t)part->kv[i];
    uint8_t *codes = (uint8_t *)(uintptr_t)part->codes[i] + head * job->count * code_row_bytes(job);
    uint16_t *numbers = (uint16_t *)(uintptr_t)part->numbers[i] + head * numbers_of_head(job);
    int lost = 0;
    for (int row = 0; row < job->count; row += step) {
        const int n = job->count - row < step ? job->count - row : step;
        char *rows[GROUP];
        find_rows(job, kv, head, tokens, row, n, rows);
        if (part->encode) lost |= part->encode(job, (const char *const *)rows, n, codes, numbers);
        else part->decode(job, rows, n, codes, numbers);
        codes += n * code_row_bytes(job);
        numbers += job->scheme == PER_CHANNEL ? 2 * job->dim : n;
    }
    if (part->lost) part->lost[unit] = (uint8_t)lost;
}

static void *run_part(void *arg) {
    Part *part = arg;
#ifdef KV_X86
    const unsigned int mode = _mm_getcsr();
    _mm_setcsr(0x1f80); /* round to nearest, denormals as they are, no traps */
#endif
    for (int64_t unit = part->first; unit < part->end; unit++) head_of(part, unit);
#ifdef KV_X86
    _mm_setcsr(mode);
    _mm_sfence();
#endif
    return NULL;
}

static void run(Part part, int64_t units, int threads) {
    Part parts[MAX_THREADS];
    pthread_t ids[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > units) threads = units > 0 ? (int)units : 1;
    for (int t = 0; t < threads; t++) {
        parts[t] = part;
        parts[t].first = units * t / threads;
        parts[t].end = units * (t + 1) / threads;
    }
    for (int t = 1; t < threads; t++) started[t] = pthread_create(&ids[t], NULL, run_part, &parts[t]) == 0;
    run_part(&parts[0]);
    for (int t = 1; t < threads; t++) {
        if (started[t]) pthread_join(ids[t], NULL);
        else run_part(&parts[t]); /* no thread to be had: the rows still have to go */
    }
}

/*
 * Quantise `n` page groups. `lost`, [n * heads]: 1 where something was no number or too large. The caller answers for
 * the job (dim a multiple of 16, at most DIM_MAX; bits 8, 4 or 2), the tokens and the memory.
 */
KV_EXPORT void kv_quantize(const Job *job, size_t n, const uint64_t *kv, const uint64_t *codes, const uint64_t *numbers,
                           const int32_t *tokens, uint8_t *lost, int level, int threads) {
    const int by_channel = job->scheme == PER_CHANNEL;
    Part part = {.job = job, .kv = kv, .codes = codes, .numbers = numbers, .tokens = tokens, .lost = lost};
    part.encode = by_channel ? portable_encode_group : portable_encode_batch;
#ifdef KV_X86
    if (level == KV_AVX512) part.encode = by_channel ? avx512_encode_group : avx512_encode_batch;
    if (level == KV_AVX2) part.encode = by_channel ? avx2_encode_group : avx2_encode_batch;
#endif
    (void)level;
    run(part, (int64_t)n * job->heads, threads);
}

/* The way back; codes and numbers may be any bytes. */
KV_EXPORT void kv_dequantize(const Job *job, size_t n, const uint64_t *kv, const uint64_t *codes, const uint64_t *numbers,
                             const int32_t *tokens, int level, int threads) {
    const int by_channel = job->scheme == PER_CHANNEL;
    Part part = {.job = job, .kv = kv, .codes = codes, .numbers = numbers, .tokens = tokens};
    part.decode = by_channel ? portable_decode_group : portable_decode_batch;
#ifdef KV_X86
    if (level == KV_AVX512) part.decode = by_channel ? avx512_decode_group : avx512_decode_batch;
    if (level == KV_AVX2) part.decode = by_channel ? avx2_decode_group : avx2_decode_batch;
#endif
    (void)level;
    run(part, (int64_t)n * job->heads, threads);
}

/* Rows as they are, one behind the other at `flat` ([heads, count, row] for each page group), or from there. */
KV_EXPORT void kv_copy_rows(const Job *job, size_t n, const uint64_t *kv, const uint64_t *flat, const int32_t *tokens,
                            int to_flat) {
    const size_t row_bytes = (size_t)job->dim * (size_t)element_bytes(job->dtype);
    for (size_t i = 0; i < n; i++) {
        const int32_t *mine = tokens ? tokens + (int64_t)i * job->heads * job->count : NULL;
        char *at = (char *)(uintptr_t)flat[i];
        for (int head = 0; head < job->heads; head++)
            for (int row = 0; row < job->count; row++, at += row_bytes) {
                char *kv_row;
                find_rows(job, (char *)(uintptr_t)kv[i], head, mine, row, 1, &kv_row);
                if (to_flat) memcpy(at, kv_row, row_bytes);
                else memcpy(kv_row, at, row_bytes);
            }
    }
}
