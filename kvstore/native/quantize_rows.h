/*
 * Quantisation of rows of one head, in vectors of LANES floats. quantize.c includes this once for each instruction set,
 * with NAME(x) for the names of that copy, KV_LEVEL for its instructions and LANES for what one register holds.
 * docs/FORMAT.md has the arithmetic; each operation is a single IEEE one in fp32, so every copy, numpy and a GPU give
 * the same bytes.
 */
typedef float NAME(F) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(I) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(U) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(H) __attribute__((vector_size(2 * LANES)));
typedef uint8_t NAME(B) __attribute__((vector_size(LANES)));

#define F NAME(F)
#define I NAME(I)
#define U NAME(U)
#define H NAME(H)
#define B NAME(B)
#define INLINE static inline __attribute__((always_inline))

/* Channels that are worked on at a time. */
#define CHANNELS (4 * LANES)

/* ---- What vector extensions lack, or compilers do lane by lane: smaller and larger, fp16, other widths. */

#if KV_LEVEL == 2
INLINE F NAME(min)(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE F NAME(max)(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE I NAME(max_int)(I a, I b) { return (I)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE float NAME(min_of)(F a) { return _mm512_reduce_min_ps((__m512)a); }
INLINE float NAME(max_of)(F a) { return _mm512_reduce_max_ps((__m512)a); }
INLINE int NAME(any_above)(I a, int32_t limit) {
    return _mm512_cmpgt_epi32_mask((__m512i)a, _mm512_set1_epi32(limit)) != 0;
}
INLINE F NAME(from_half)(H h) { return (F)_mm512_cvtph_ps((__m256i)h); }
INLINE H NAME(to_half)(F f) { return (H)_mm512_cvtps_ph((__m512)f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE I NAME(widened8)(B b) { return (I)_mm512_cvtepu8_epi32((__m128i)b); }
INLINE B NAME(narrowed8)(I q) { return (B)_mm512_cvtepi32_epi8((__m512i)q); }
INLINE U NAME(widened16)(H h) { return (U)_mm512_cvtepu16_epi32((__m256i)h); }
INLINE H NAME(narrowed16)(U u) { return (H)_mm512_cvtepi32_epi16((__m512i)u); }
INLINE void NAME(stream)(char *at, H h) { _mm256_stream_si256((__m256i *)(void *)at, (__m256i)h); }
#elif KV_LEVEL == 1
INLINE F NAME(min)(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE F NAME(max)(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE I NAME(max_int)(I a, I b) { return (I)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE float NAME(min_of)(F a) {
    __m128 n = _mm_min_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
    n = _mm_min_ps(n, _mm_movehl_ps(n, n));
    return _mm_cvtss_f32(_mm_min_ss(n, _mm_shuffle_ps(n, n, 1)));
}
INLINE float NAME(max_of)(F a) {
    __m128 n = _mm_max_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
    n = _mm_max_ps(n, _mm_movehl_ps(n, n));
    return _mm_cvtss_f32(_mm_max_ss(n, _mm_shuffle_ps(n, n, 1)));
}
INLINE int NAME(any_above)(I a, int32_t limit) {
    __m256i above = _mm256_cmpgt_epi32((__m256i)a, _mm256_set1_epi32(limit));
    return !_mm256_testz_si256(above, above);
}
INLINE F NAME(from_half)(H h) { return (F)_mm256_cvtph_ps((__m128i)h); }
INLINE H NAME(to_half)(F f) { return (H)_mm256_cvtps_ph((__m256)f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE I NAME(widened8)(B b) {
    int64_t word;
    memcpy(&word, &b, sizeof word);
    return (I)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(word));
}
INLINE H NAME(narrowed16)(U u) {
    return (H)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)u), _mm256_extracti128_si256((__m256i)u, 1));
}
INLINE B NAME(narrowed8)(I q) {
    __m128i h = (__m128i)NAME(narrowed16)((U)q);
    int64_t word = _mm_cvtsi128_si64(_mm_packus_epi16(h, h));
    B b;
    memcpy(&b, &word, sizeof b);
    return b;
}
INLINE U NAME(widened16)(H h) { return (U)_mm256_cvtepu16_epi32((__m128i)h); }
INLINE void NAME(stream)(char *at, H h) { _mm_stream_si128((__m128i *)(void *)at, (__m128i)h); }
#else
INLINE F NAME(min)(F a, F b) {
    for (int i = 0; i < LANES; i++) a[i] = a[i] < b[i] ? a[i] : b[i];
    return a;
}
INLINE F NAME(max)(F a, F b) {
    for (int i = 0; i < LANES; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}
INLINE I NAME(max_int)(I a, I b) {
    const I larger = a > b;
    return (a & larger) | (b & ~larger);
}
INLINE float NAME(min_of)(F a) {
    float least = a[0];
    for (int i = 1; i < LANES; i++) least = a[i] < least ? a[i] : least;
    return least;
}
INLINE float NAME(max_of)(F a) {
    float most = a[0];
    for (int i = 1; i < LANES; i++) most = a[i] > most ? a[i] : most;
    return most;
}
INLINE int NAME(any_above)(I a, int32_t limit) {
    int above = 0;
    for (int i = 0; i < LANES; i++) above |= a[i] > limit;
    return above;
}
INLINE F NAME(from_half)(H h) {
    F f;
    for (int i = 0; i < LANES; i++) f[i] = half_float(h[i]);
    return f;
}
INLINE H NAME(to_half)(F f) {
    H h;
    for (int i = 0; i < LANES; i++) h[i] = float_half(f[i]);
    return h;
}
INLINE I NAME(widened8)(B b) { return __builtin_convertvector(b, I); }
INLINE B NAME(narrowed8)(I q) { return __builtin_convertvector((U)q, B); }
INLINE U NAME(widened16)(H h) { return __builtin_convertvector(h, U); }
INLINE H NAME(narrowed16)(U u) { return __builtin_convertvector(u, H); }
INLINE void NAME(stream)(char *at, H h) { memcpy(at, &h, sizeof h); }
#endif

INLINE F NAME(all)(float value) { return value - (F){0}; }
INLINE F NAME(pick)(I mask, F yes, F no) { return (F)((mask & (I)yes) | (~mask & (I)no)); }
INLINE F NAME(get)(const float *at) {
    F f;
    memcpy(&f, at, sizeof f);
    return f;
}
INLINE void NAME(put)(float *at, F f) { memcpy(at, &f, sizeof f); }

/* ---- Elements of the engine, and codes. */

INLINE F NAME(load)(const char *at, int dtype) {
    if (dtype == DTYPE_FP32) return NAME(get)((const float *)(const void *)at);
    H h;
    memcpy(&h, at, sizeof h);
    if (dtype == DTYPE_FP16) return NAME(from_half)(h);
    return (F)(NAME(widened16)(h) << 16);
}

/* To the nearest, ties to even; fp16 stops at its largest. There is neither NaN nor infinity here. Past the cache if it `streams`. */
INLINE void NAME(store)(char *at, F f, int dtype, int streams) {
    if (dtype == DTYPE_FP32) {
        memcpy(at, &f, sizeof f);
        return;
    }
    H h;
    if (dtype == DTYPE_FP16) {
        h = NAME(to_half)(NAME(max)(NAME(min)(f, NAME(all)(VALUE_MAX)), NAME(all)(-VALUE_MAX)));
    } else {
        U u = (U)f;
        h = NAME(narrowed16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    if (streams) NAME(stream)(at, h);
    else memcpy(at, &h, sizeof h);
}

/* Codes of less than 8 bits, one in each byte, to as many bits each and back. */
#if KV_LEVEL == 2
INLINE void NAME(pack_small)(uint8_t *at, B b, int bits) {
    __m128i w = (__m128i)b;
    if (bits == 4) {
        const __m128i even = _mm_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 14, 12, 10, 8, 6, 4, 2, 0);
        w = _mm_shuffle_epi8(_mm_or_si128(w, _mm_srli_epi16(w, 4)), even);
        _mm_storel_epi64((__m128i *)(void *)at, w);
        return;
    }
    const __m128i fourth = _mm_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 12, 8, 4, 0);
    w = _mm_and_si128(_mm_or_si128(w, _mm_srli_epi32(w, 6)), _mm_set1_epi32(0x000f000f));
    const int32_t packed = _mm_cvtsi128_si32(_mm_shuffle_epi8(_mm_or_si128(w, _mm_srli_epi32(w, 12)), fourth));
    memcpy(at, &packed, sizeof packed);
}
INLINE B NAME(unpack_small)(const uint8_t *at, int bits) {
    if (bits == 4) {
        __m128i w = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)at));
        return (B)_mm_and_si128(_mm_or_si128(w, _mm_slli_epi16(w, 4)), _mm_set1_epi16(0x0f0f));
    }
    int32_t packed;
    memcpy(&packed, at, sizeof packed);
    __m128i w = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(packed));
    w = _mm_and_si128(_mm_or_si128(w, _mm_slli_epi32(w, 12)), _mm_set1_epi32(0x000f000f));
    return (B)_mm_and_si128(_mm_or_si128(w, _mm_slli_epi32(w, 6)), _mm_set1_epi32(0x03030303));
}
#else
INLINE void NAME(pack_small)(uint8_t *at, B b, int bits) {
    uint64_t word = 0;
    memcpy(&word, &b, sizeof b);
    word = packed_codes(word, bits);
    memcpy(at, &word, LANES * (size_t)bits / 8);
}
INLINE B NAME(unpack_small)(const uint8_t *at, int bits) {
    uint64_t word = 0;
    memcpy(&word, at, LANES * (size_t)bits / 8);
    word = unpacked_codes(word, bits);
    B b;
    memcpy(&b, &word, sizeof b);
    return b;
}
#endif

/* LANES codes, the first in the lowest bits. */
INLINE void NAME(pack)(uint8_t *at, I q, int bits) {
    const B b = NAME(narrowed8)(q);
    if (bits == 8) memcpy(at, &b, sizeof b);
    else NAME(pack_small)(at, b, bits);
}

INLINE I NAME(unpack)(const uint8_t *at, int bits) {
    B b;
    if (bits == 8) memcpy(&b, at, sizeof b);
    else b = NAME(unpack_small)(at, bits);
    return NAME(widened8)(b);
}

/* e4m3 of at most 448, to the nearest, ties to even. */
INLINE I NAME(to_fp8)(F f) {
    U u = (U)f, sign = u >> 24 & 0x80, magnitude = u & 0x7fffffff;
    U normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    U small = (U)((F)magnitude + 0x1p14f) - 0x46800000u;
    I is_small = (I)magnitude < 121 << 23;
    return (I)(sign | ((U)is_small & small) | (~(U)is_small & normal));
}

INLINE F NAME(from_fp8)(I code) {
    U c = (U)code, magnitude = (c & 0x7f) << 20;
    F normal = (F)(magnitude + (120u << 23));
    F small = (F)(magnitude + (121u << 23)) - 0x1p-6f;
    F value = NAME(pick)((I)magnitude < 1 << 23, small, normal);
    return (F)((U)value | (c & 0x80) << 24);
}

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
