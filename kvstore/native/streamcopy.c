/*
 * Copy batches of blocks with streaming (non-temporal) stores.
 *
 * A block that goes into or out of the DRAM tier is not read again soon by the core that copies it, so
 * pulling its destination into the cache costs a read of memory and evicts something useful. Streaming
 * stores skip both. The best instruction set is chosen once at run time; where there is none (another
 * architecture), memcpy does the work.
 *
 * Chunks on their way to and from other hosts are hashed while they are copied (kv_copy_span).
 *
 * Loaded with ctypes, which lets go of Python's lock for the whole call. Nothing here knows Python.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define KV_X86 1
#include <immintrin.h>
#endif

#define KV_EXPORT __attribute__((visibility("default")))

enum { KV_PORTABLE = 0, KV_AVX2 = 1, KV_AVX512 = 2 };

/* Below this size the fixed cost of alignment and fence outweighs the gain. */
enum { STREAM_LEAST_BYTES = 4096, LINE = 64, PAGE = 4096 };
enum { MAX_THREADS = 16 };

#ifdef KV_X86

/* How far ahead of the loads lines are asked for. Measured on Zen 3 with blocks of 64 KiB to 4 MiB: 256 to
 * 1024 are alike, 2048 and more lose a tenth; several pages at a time lose more. */
enum { PREFETCH_BYTES = 512 };

/* dst is aligned to a line and n is a multiple of one. */
__attribute__((target("avx2"))) static void lines_avx2(char *dst, const char *src, size_t n) {
    for (size_t i = 0; i < n; i += LINE) {
        _mm_prefetch(src + i + PREFETCH_BYTES, _MM_HINT_NTA);
        __m256i a = _mm256_loadu_si256((const __m256i *)(src + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(src + i + 32));
        _mm256_stream_si256((__m256i *)(dst + i), a);
        _mm256_stream_si256((__m256i *)(dst + i + 32), b);
    }
}

__attribute__((target("avx512f"))) static void lines_avx512(char *dst, const char *src, size_t n) {
    for (size_t i = 0; i < n; i += LINE) {
        _mm_prefetch(src + i + PREFETCH_BYTES, _MM_HINT_NTA);
        __m512i a = _mm512_loadu_si512((const void *)(src + i));
        _mm512_stream_si512((__m512i *)(dst + i), a);
    }
}

static int detect(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return KV_AVX512;
    if (__builtin_cpu_supports("avx2")) return KV_AVX2;
    return KV_PORTABLE;
}

static void stream_copy(char *dst, const char *src, size_t n, int level) {
    size_t head = (size_t)(-(uintptr_t)dst & (LINE - 1));
    if (level == KV_PORTABLE || n < STREAM_LEAST_BYTES) {
        memcpy(dst, src, n);
        return;
    }
    memcpy(dst, src, head);
    size_t body = (n - head) & ~(size_t)(LINE - 1);
    if (level == KV_AVX512) lines_avx512(dst + head, src + head, body);
    else lines_avx2(dst + head, src + head, body);
    memcpy(dst + head + body, src + head + body, n - head - body);
}

static void fence(void) { _mm_sfence(); }

#else

static int detect(void) { return KV_PORTABLE; }
static void stream_copy(char *dst, const char *src, size_t n, int level) {
    (void)level;
    memcpy(dst, src, n);
}
static void fence(void) {}

#endif

typedef struct {
    const uint64_t *dst, *src, *sizes; /* sizes may be NULL: all blocks have `size` bytes */
    uint64_t size;
    size_t n;
    uint64_t first_byte, end_byte; /* this part's slice of all the bytes laid end to end */
    int level;
} Part;

/* The slice of a block that belongs to the part [first_byte, end_byte) of the whole batch. */
static void *copy_part(void *argument) {
    const Part *p = argument;
    uint64_t begin = 0;
    for (size_t i = 0; i < p->n && begin < p->end_byte; i++) {
        uint64_t size = p->sizes ? p->sizes[i] : p->size, end = begin + size;
        uint64_t from = begin > p->first_byte ? begin : p->first_byte;
        uint64_t to = end < p->end_byte ? end : p->end_byte;
        if (from < to) {
            char *dst = (char *)(uintptr_t)p->dst[i] + (from - begin);
            const char *src = (const char *)(uintptr_t)p->src[i] + (from - begin);
            if (p->level < 0) memcpy(dst, src, to - from);
            else stream_copy(dst, src, to - from, p->level);
        }
        begin = end;
    }
    /* Streaming stores are weakly ordered: nobody may be told of the bytes before they are visible. */
    fence();
    return NULL;
}

KV_EXPORT int kv_level(void) { return detect(); }

/*
 * Copy n blocks; sizes is NULL when every block has `size` bytes. Source and destination must not
 * overlap. `level` < 0 is memcpy, otherwise a KV_ level that this machine has. Blocks until all bytes
 * are visible to other threads.
 */
KV_EXPORT void kv_copy_batch(const uint64_t *dst, const uint64_t *src, const uint64_t *sizes, uint64_t size,
                             size_t n, int threads, int level) {
    uint64_t total = 0;
    if (sizes)
        for (size_t i = 0; i < n; i++) total += sizes[i];
    else total = size * n;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads < 1) threads = 1;

    Part parts[MAX_THREADS];
    pthread_t ids[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    uint64_t share = (total / (uint64_t)threads + PAGE - 1) & ~(uint64_t)(PAGE - 1);
    for (int t = 0; t < threads; t++) {
        uint64_t first = share * (uint64_t)t, end = first + share;
        if (first > total) first = total;
        if (t == threads - 1 || end > total) end = total;
        parts[t] = (Part){dst, src, sizes, size, n, first, end, level};
    }
    for (int t = 1; t < threads; t++)
        if (parts[t].first_byte < parts[t].end_byte)
            started[t] = pthread_create(&ids[t], NULL, copy_part, &parts[t]) == 0;
    copy_part(&parts[0]);
    for (int t = 1; t < threads; t++) {
        if (started[t]) pthread_join(ids[t], NULL);
        else copy_part(&parts[t]); /* no thread to be had: the bytes still have to go */
    }
}

/* A hash function of another library over n pieces of memory: one call instead of n, so that Python's lock
 * is let go of once and not for every piece. */
KV_EXPORT void kv_hash_batch(uint64_t (*hash)(const void *, size_t), const uint64_t *addresses,
                             const uint64_t *sizes, uint64_t *out, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = hash((const void *)(uintptr_t)addresses[i], (size_t)sizes[i]);
}

typedef struct {
    uint64_t (*whole)(const void *, size_t);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    uint64_t (*digest)(const void *);
    void *state;
} Hasher;

/* What is copied before it is hashed, or the other way round: the second of the two finds it in the cache. */
enum { HASHED_PIECE_BYTES = 32 << 10 };

static void copy_hashed(const Hasher *h, char *block, char *flat, uint64_t n, int to_flat, int level) {
    for (uint64_t at = 0; at < n; at += HASHED_PIECE_BYTES) {
        size_t piece = n - at < HASHED_PIECE_BYTES ? (size_t)(n - at) : HASHED_PIECE_BYTES;
        if (to_flat) memcpy(flat + at, block + at, piece);
        h->update(h->state, flat + at, piece);
        if (!to_flat) stream_copy(block + at, flat + at, piece, level);
    }
}

/*
 * Copy the bytes [offset, offset + n_bytes) of equally long blocks, counted as lying end to end, to `flat` or from
 * there, and hash every block that ends among them: what lies in `flat` of it, and of what came before whatever the
 * hasher's state has seen (`resumed`: it saw all of the block up to `offset`), else where the block lies. The hashes go
 * to `sums`. Blocks until all bytes are visible to other threads.
 */
KV_EXPORT void kv_copy_span(const uint64_t *blocks, uint64_t block_bytes, uint64_t offset, uint64_t n_bytes, char *flat,
                            int to_flat, int resumed, const Hasher *h, uint64_t *sums, int level) {
    while (n_bytes) {
        uint64_t begun = offset % block_bytes, left = block_bytes - begun, n = left < n_bytes ? left : n_bytes;
        char *block = (char *)(uintptr_t)blocks[offset / block_bytes];
        if (n == block_bytes && n <= HASHED_PIECE_BYTES) {
            if (to_flat) memcpy(flat, block, n);
            *sums++ = h->whole(flat, n);
            if (!to_flat) stream_copy(block, flat, n, level);
        } else {
            if (!begun || !resumed) h->reset(h->state);
            if (begun && !resumed) h->update(h->state, block, begun);
            copy_hashed(h, block + begun, flat, n, to_flat, level);
            if (n == left) *sums++ = h->digest(h->state);
        }
        resumed = 1;
        offset += n, flat += n, n_bytes -= n;
    }
    fence();
}
