/*
 * Quantisation of rows of one head, in vectors of 16 floats. quantize.c includes this once for each instruction set,
 * with NAME(x) for the names of that copy and KV_LEVEL for its instructions. docs/FORMAT.md has the arithmetic; each
 * operation is a single IEEE one in fp32, so every copy, numpy and a GPU give the same bytes.
 */
typedef float NAME(F) __attribute__((vector_size(64)));
typedef int32_t NAME(I) __attribute__((vector_size(64)));
typedef uint32_t NAME(U) __attribute__((vector_size(64)));
typedef uint16_t NAME(H) __attribute__((vector_size(32)));
typedef uint8_t NAME(B) __attribute__((vector_size(16)));
typedef uint16_t NAME(H8) __attribute__((vector_size(16)));
typedef uint8_t NAME(B8) __attribute__((vector_size(8)));
typedef uint32_t NAME(U4) __attribute__((vector_size(16)));
typedef uint8_t NAME(B4) __attribute__((vector_size(4)));

#define F NAME(F)
#define I NAME(I)
#define U NAME(U)
#define H NAME(H)
#define B NAME(B)
#define H8 NAME(H8)
#define B8 NAME(B8)
#define U4 NAME(U4)
#define B4 NAME(B4)
#define INLINE static inline __attribute__((always_inline))

/*
 * ---- What vector extensions lack, or compilers do lane by lane: smaller and larger, fp16, other widths. `picked` is
 * every second (fourth) byte, from the first on.
 */

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
#elif KV_LEVEL == 1
typedef union {
    F f;
    I i;
    __m256 f8[2];
    __m256i i8[2];
} NAME(Halves);
typedef union {
    H h;
    __m128i h8[2];
} NAME(HalfHalves);
INLINE F NAME(min)(F a, F b) {
    NAME(Halves) x = {a}, y = {b};
    for (int i = 0; i < 2; i++) x.f8[i] = _mm256_min_ps(x.f8[i], y.f8[i]);
    return x.f;
}
INLINE F NAME(max)(F a, F b) {
    NAME(Halves) x = {a}, y = {b};
    for (int i = 0; i < 2; i++) x.f8[i] = _mm256_max_ps(x.f8[i], y.f8[i]);
    return x.f;
}
INLINE I NAME(max_int)(I a, I b) {
    NAME(Halves) x = {.i = a}, y = {.i = b};
    for (int i = 0; i < 2; i++) x.i8[i] = _mm256_max_epi32(x.i8[i], y.i8[i]);
    return x.i;
}
INLINE float NAME(min_of)(F a) {
    NAME(Halves) x = {a};
    __m256 m = _mm256_min_ps(x.f8[0], x.f8[1]);
    __m128 n = _mm_min_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    n = _mm_min_ps(n, _mm_movehl_ps(n, n));
    return _mm_cvtss_f32(_mm_min_ss(n, _mm_shuffle_ps(n, n, 1)));
}
INLINE float NAME(max_of)(F a) {
    NAME(Halves) x = {a};
    __m256 m = _mm256_max_ps(x.f8[0], x.f8[1]);
    __m128 n = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    n = _mm_max_ps(n, _mm_movehl_ps(n, n));
    return _mm_cvtss_f32(_mm_max_ss(n, _mm_shuffle_ps(n, n, 1)));
}
INLINE int NAME(any_above)(I a, int32_t limit) {
    NAME(Halves) x = {.i = a};
    __m256i most = _mm256_set1_epi32(limit);
    __m256i above = _mm256_or_si256(_mm256_cmpgt_epi32(x.i8[0], most), _mm256_cmpgt_epi32(x.i8[1], most));
    return !_mm256_testz_si256(above, above);
}
INLINE F NAME(from_half)(H h) {
    NAME(HalfHalves) x = {h};
    NAME(Halves) y;
    for (int i = 0; i < 2; i++) y.f8[i] = _mm256_cvtph_ps(x.h8[i]);
    return y.f;
}
INLINE H NAME(to_half)(F f) {
    NAME(Halves) x = {f};
    NAME(HalfHalves) y;
    for (int i = 0; i < 2; i++) y.h8[i] = _mm256_cvtps_ph(x.f8[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return y.h;
}
INLINE I NAME(widened8)(B b) {
    NAME(Halves) y;
    y.i8[0] = _mm256_cvtepu8_epi32((__m128i)b);
    y.i8[1] = _mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)b, 8));
    return y.i;
}
INLINE H NAME(narrowed16)(U u) {
    NAME(Halves) x = {.i = (I)u};
    NAME(HalfHalves) y;
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.i8[0], x.i8[1]), 0xd8);
    y.h8[0] = _mm256_castsi256_si128(packed), y.h8[1] = _mm256_extracti128_si256(packed, 1);
    return y.h;
}
INLINE B NAME(narrowed8)(I q) {
    NAME(HalfHalves) x = {NAME(narrowed16)((U)q)};
    return (B)_mm_packus_epi16(x.h8[0], x.h8[1]);
}
INLINE U NAME(widened16)(H h) {
    NAME(HalfHalves) x = {h};
    NAME(Halves) y;
    for (int i = 0; i < 2; i++) y.i8[i] = _mm256_cvtepu16_epi32(x.h8[i]);
    return (U)y.i;
}
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
    for (int i = 0; i < LANES; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
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
#endif

#if KV_LEVEL
INLINE B8 NAME(picked2)(H8 w) {
    const __m128i order = _mm_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 14, 12, 10, 8, 6, 4, 2, 0);
    int64_t low = _mm_cvtsi128_si64(_mm_shuffle_epi8((__m128i)w, order));
    B8 b;
    memcpy(&b, &low, sizeof b);
    return b;
}
INLINE B4 NAME(picked4)(U4 w) {
    const __m128i order = _mm_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 12, 8, 4, 0);
    int32_t low = _mm_cvtsi128_si32(_mm_shuffle_epi8((__m128i)w, order));
    B4 b;
    memcpy(&b, &low, sizeof b);
    return b;
}
INLINE H8 NAME(spread2)(const uint8_t *at) { return (H8)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)at)); }
INLINE U4 NAME(spread4)(const uint8_t *at) {
    int32_t four;
    memcpy(&four, at, sizeof four);
    return (U4)_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four));
}
#else
INLINE B8 NAME(picked2)(H8 w) { return __builtin_convertvector(w, B8); }
INLINE B4 NAME(picked4)(U4 w) { return __builtin_convertvector(w, B4); }
INLINE H8 NAME(spread2)(const uint8_t *at) {
    B8 b;
    memcpy(&b, at, sizeof b);
    return __builtin_convertvector(b, H8);
}
INLINE U4 NAME(spread4)(const uint8_t *at) {
    B4 b;
    memcpy(&b, at, sizeof b);
    return __builtin_convertvector(b, U4);
}
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
#if KV_LEVEL
    if (streams) {
        _mm256_stream_si256((__m256i *)(void *)at, (__m256i)h);
        return;
    }
#endif
    (void)streams;
    memcpy(at, &h, sizeof h);
}

/* 16 codes, the first in the lowest bits. */
INLINE void NAME(pack)(uint8_t *at, I q, int bits) {
    B b = NAME(narrowed8)(q);
    if (bits == 8) {
        memcpy(at, &b, 16);
    } else if (bits == 4) {
        H8 w = (H8)b;
        B8 packed = NAME(picked2)(w | w >> 4);
        memcpy(at, &packed, 8);
    } else {
        U4 w = (U4)b;
        w = (w | w >> 6) & 0x000f000f;
        B4 packed = NAME(picked4)(w | w >> 12);
        memcpy(at, &packed, 4);
    }
}

INLINE I NAME(unpack)(const uint8_t *at, int bits) {
    B b;
    if (bits == 8) {
        memcpy(&b, at, 16);
    } else if (bits == 4) {
        H8 w = NAME(spread2)(at);
        b = (B)((w | w << 4) & 0x0f0f);
    } else {
        U4 w = NAME(spread4)(at);
        w = (w | w << 12) & 0x000f000f;
        b = (B)((w | w << 6) & 0x03030303);
    }
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

/* Sums and differences at distance 1, 2, 4 and 8 within a vector. */
INLINE F NAME(mixed)(F x) {
    const uint32_t m = 1u << 31;
    x = SHUFFLED(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14) +
        (F)((U)x ^ (U){0, m, 0, m, 0, m, 0, m, 0, m, 0, m, 0, m, 0, m});
    x = SHUFFLED(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13) +
        (F)((U)x ^ (U){0, 0, m, m, 0, 0, m, m, 0, 0, m, m, 0, 0, m, m});
    x = SHUFFLED(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11) +
        (F)((U)x ^ (U){0, 0, 0, 0, m, m, m, m, 0, 0, 0, 0, m, m, m, m});
    return SHUFFLED(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7) +
           (F)((U)x ^ (U){0, 0, 0, 0, 0, 0, 0, 0, m, m, m, m, m, m, m, m});
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
    F low = NAME(get)(least), high = NAME(get)(most);
    if (job->scheme == FP8) {
        H scale16 = NAME(to_half)(NAME(max)(high, -low) / 448.0f + 0.0f);
        NAME(put)(least, NAME(inverse)(NAME(from_half)(scale16)));
        memcpy(numbers, &scale16, (size_t)n * 2);
        for (int r = 0; r < n; r++) {
            const F by = NAME(all)(least[r]), end = NAME(all)(448.0f);
            for (int c = 0; c < dim; c += LANES) {
                F x = NAME(get)(buffer + r * dim + c) * by;
                NAME(pack)(codes + r * code_bytes + c, NAME(to_fp8)(NAME(min)(NAME(max)(x, -end), end)), 8);
            }
        }
        return lost;
    }
    NAME(Numbers) found = NAME(numbers_of)(low, high, bits);
    memcpy(numbers, &found.low16, (size_t)n * 2);
    memcpy(numbers + job->count, &found.scale16, (size_t)n * 2);
    NAME(put)(least, found.low), NAME(put)(most, found.inverse);
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
    float buffer[BATCH * DIM_MAX] __attribute__((aligned(64))), lows[BATCH], scales[BATCH];
    NAME(put)(lows, job->scheme == FP8 ? (F){0} : NAME(number)(numbers, n));
    NAME(put)(scales, NAME(number)(job->scheme == FP8 ? numbers : numbers + job->count, n));
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
#undef H8
#undef B8
#undef U4
#undef B4
#undef INLINE
