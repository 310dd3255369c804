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

/* ---- What vector extensions lack: smaller and larger, fp16, sums over lanes. */

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
    return (F)(__builtin_convertvector(h, U) << 16);
}

/* To the nearest, ties to even; fp16 stops at its largest. There is neither NaN nor infinity here. */
INLINE void NAME(store)(char *at, F f, int dtype) {
    if (dtype == DTYPE_FP32) {
        memcpy(at, &f, sizeof f);
        return;
    }
    H h;
    if (dtype == DTYPE_FP16) {
        h = NAME(to_half)(NAME(max)(NAME(min)(f, NAME(all)(VALUE_MAX)), NAME(all)(-VALUE_MAX)));
    } else {
        U u = (U)f;
        h = __builtin_convertvector((u + 0x7fff + (u >> 16 & 1)) >> 16, H);
    }
    memcpy(at, &h, sizeof h);
}

/* 16 codes, the first in the lowest bits. */
INLINE void NAME(pack)(uint8_t *at, I q, int bits) {
    B b = __builtin_convertvector((U)q, B);
    if (bits == 8) {
        memcpy(at, &b, 16);
    } else if (bits == 4) {
        H8 w = (H8)b;
        B8 packed = __builtin_convertvector(w | w >> 4, B8);
        memcpy(at, &packed, 8);
    } else {
        U4 w = (U4)b;
        w = (w | w >> 6) & 0x000f000f;
        B4 packed = __builtin_convertvector(w | w >> 12, B4);
        memcpy(at, &packed, 4);
    }
}

INLINE I NAME(unpack)(const uint8_t *at, int bits) {
    B b;
    if (bits == 8) {
        memcpy(&b, at, 16);
    } else if (bits == 4) {
        B8 packed;
        memcpy(&packed, at, 8);
        H8 w = __builtin_convertvector(packed, H8);
        b = (B)((w | w << 4) & 0x0f0f);
    } else {
        B4 packed;
        memcpy(&packed, at, 4);
        U4 w = __builtin_convertvector(packed, U4);
        w = (w | w << 12) & 0x000f000f;
        b = (B)((w | w << 6) & 0x03030303);
    }
    return __builtin_convertvector(b, I);
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

/* Returns the largest magnitudes, lane by lane, as bits: above VALUE_MAX_BITS there is something to clean. */
INLINE I NAME(load_row_as)(const char *src, float *row, int dim, int dtype) {
    I most = {0};
    for (int c = 0; c < dim; c += LANES) {
        F x = NAME(load)(src + c * element_bytes(dtype), dtype);
        most = NAME(max_int)(most, (I)x & 0x7fffffff);
        NAME(put)(row + c, x);
    }
    return most;
}

static I NAME(load_row)(const char *src, float *row, int dim, int dtype) {
    if (dtype == DTYPE_BF16) return NAME(load_row_as)(src, row, dim, DTYPE_BF16);
    if (dtype == DTYPE_FP16) return NAME(load_row_as)(src, row, dim, DTYPE_FP16);
    return NAME(load_row_as)(src, row, dim, DTYPE_FP32);
}

/* NaN becomes 0, all else is brought into range. */
static void NAME(clean)(float *row, int dim) {
    for (int c = 0; c < dim; c++) {
        float x = row[c] != row[c] ? 0.0f : row[c];
        row[c] = x > VALUE_MAX ? VALUE_MAX : x < -VALUE_MAX ? -VALUE_MAX : x;
    }
}

INLINE void NAME(store_row)(char *dst, const float *row, int dim, int dtype) {
    for (int c = 0; c < dim; c += LANES) NAME(store)(dst + c * element_bytes(dtype), NAME(get)(row + c), dtype);
}

/* The Hadamard matrix over each run of job->rotated_run elements, times norm: sums and differences at distance 1, 2, ... */
static void NAME(hadamard)(const Job *job, float *row) {
    static const U high[4] = {
        {0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31},
        {0, 0, 1u << 31, 1u << 31, 0, 0, 1u << 31, 1u << 31, 0, 0, 1u << 31, 1u << 31, 0, 0, 1u << 31, 1u << 31},
        {0, 0, 0, 0, 1u << 31, 1u << 31, 1u << 31, 1u << 31, 0, 0, 0, 0, 1u << 31, 1u << 31, 1u << 31, 1u << 31},
        {0, 0, 0, 0, 0, 0, 0, 0, 1u << 31, 1u << 31, 1u << 31, 1u << 31, 1u << 31, 1u << 31, 1u << 31, 1u << 31},
    };
    for (int c = 0; c < job->dim; c += LANES) {
        F x = NAME(get)(row + c);
        x = SHUFFLED(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14) + (F)((U)x ^ high[0]);
        x = SHUFFLED(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13) + (F)((U)x ^ high[1]);
        x = SHUFFLED(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11) + (F)((U)x ^ high[2]);
        x = SHUFFLED(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7) + (F)((U)x ^ high[3]);
        NAME(put)(row + c, x);
    }
    for (int apart = LANES; apart < job->rotated_run; apart *= 2)
        for (int start = 0; start < job->dim; start += 2 * apart)
            for (int c = start; c < start + apart; c += LANES) {
                F a = NAME(get)(row + c), b = NAME(get)(row + c + apart);
                NAME(put)(row + c, a + b);
                NAME(put)(row + c + apart, a - b);
            }
    for (int c = 0; c < job->dim; c += LANES) NAME(put)(row + c, NAME(get)(row + c) * NAME(all)(job->norm));
}

static void NAME(flip)(const Job *job, float *row) {
    for (int c = 0; c < job->dim; c += LANES) {
        U signs;
        memcpy(&signs, job->signs + c, sizeof signs);
        NAME(put)(row + c, (F)((U)NAME(get)(row + c) ^ signs));
    }
}

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
    int lost = 0;
    for (int r = 0; r < n; r++) {
        float *row = buffer + r * dim;
        if (NAME(any_above)(NAME(load_row)(rows[r], row, dim, job->dtype), VALUE_MAX_BITS)) lost = 1, NAME(clean)(row, dim);
        if (job->scheme == PER_TOKEN_ROTATED) NAME(flip)(job, row), NAME(hadamard)(job, row);
        F low = NAME(get)(row), high = low;
        for (int c = LANES; c < dim; c += LANES)
            low = NAME(min)(low, NAME(get)(row + c)), high = NAME(max)(high, NAME(get)(row + c));
        least[r] = NAME(min_of)(low), most[r] = NAME(max_of)(high);
        if (least[r] < -VALUE_MAX || most[r] > VALUE_MAX) { /* rotation has made it so */
            lost = 1;
            NAME(clean)(row, dim);
            least[r] = least[r] < -VALUE_MAX ? -VALUE_MAX : least[r];
            most[r] = most[r] > VALUE_MAX ? VALUE_MAX : most[r];
        }
    }
    F low = NAME(get)(least), high = NAME(get)(most);
    if (job->scheme == FP8) {
        F magnitude = NAME(max)(high, -low);
        H scale16 = NAME(to_half)(magnitude / 448.0f + 0.0f);
        F inverse = NAME(inverse)(NAME(from_half)(scale16));
        memcpy(numbers, &scale16, (size_t)n * 2);
        for (int r = 0; r < n; r++) {
            F by = NAME(all)(inverse[r]);
            for (int c = 0; c < dim; c += LANES) {
                F x = NAME(get)(buffer + r * dim + c) * by;
                x = NAME(min)(NAME(max)(x, NAME(all)(-448.0f)), NAME(all)(448.0f));
                NAME(pack)(codes + r * code_bytes + c, NAME(to_fp8)(x), 8);
            }
        }
        return lost;
    }
    NAME(Numbers) found = NAME(numbers_of)(low, high, bits);
    memcpy(numbers, &found.low16, (size_t)n * 2);
    memcpy(numbers + job->count, &found.scale16, (size_t)n * 2);
    float lows[LANES], inverses[LANES];
    memcpy(lows, &found.low, sizeof lows), memcpy(inverses, &found.inverse, sizeof inverses);
    for (int r = 0; r < n; r++, codes += code_bytes) {
        const float *row = buffer + r * dim;
        F by = NAME(all)(inverses[r]), from = NAME(all)(lows[r]);
        if (bits == 8) NAME(quantize)(codes, row, dim, from, by, 8);
        else if (bits == 4) NAME(quantize)(codes, row, dim, from, by, 4);
        else NAME(quantize)(codes, row, dim, from, by, 2);
    }
    return lost;
}

INLINE void NAME(dequantize)(const uint8_t *codes, char *dst, int dim, F low, F scale, int bits, int dtype, int fp8) {
    for (int c = 0; c < dim; c += LANES) {
        I q = NAME(unpack)(codes + c * bits / 8, bits);
        F x = fp8 ? NAME(from_fp8)(q) * scale : __builtin_convertvector(q, F) * scale + low;
        NAME(store)(dst + c * element_bytes(dtype), x, dtype);
    }
}

#define BY_DTYPE(call, dtype)                                                                                          \
    do {                                                                                                               \
        if ((dtype) == DTYPE_BF16) call(DTYPE_BF16);                                                                   \
        else if ((dtype) == DTYPE_FP16) call(DTYPE_FP16);                                                              \
        else call(DTYPE_FP32);                                                                                         \
    } while (0)

static void NAME(dequantize_row)(const Job *job, const uint8_t *codes, char *dst, F low, F scale, int dtype) {
    const int dim = job->dim;
#define CALL8(d) NAME(dequantize)(codes, dst, dim, low, scale, 8, d, 0)
#define CALL4(d) NAME(dequantize)(codes, dst, dim, low, scale, 4, d, 0)
#define CALL2(d) NAME(dequantize)(codes, dst, dim, low, scale, 2, d, 0)
#define CALLF(d) NAME(dequantize)(codes, dst, dim, low, scale, 8, d, 1)
    if (job->scheme == FP8) BY_DTYPE(CALLF, dtype);
    else if (job->bits == 8) BY_DTYPE(CALL8, dtype);
    else if (job->bits == 4) BY_DTYPE(CALL4, dtype);
    else BY_DTYPE(CALL2, dtype);
#undef CALL8
#undef CALL4
#undef CALL2
#undef CALLF
}

static void NAME(decode_batch)(const Job *job, char *const *rows, int n, const uint8_t *codes, const uint16_t *numbers) {
    float buffer[DIM_MAX] __attribute__((aligned(64)));
    const F low = job->scheme == FP8 ? (F){0} : NAME(number)(numbers, n);
    const F scale = NAME(number)(job->scheme == FP8 ? numbers : numbers + job->count, n);
    for (int r = 0; r < n; r++, codes += code_row_bytes(job)) {
        if (job->scheme != PER_TOKEN_ROTATED) {
            NAME(dequantize_row)(job, codes, rows[r], NAME(all)(low[r]), NAME(all)(scale[r]), job->dtype);
            continue;
        }
        NAME(dequantize_row)(job, codes, (char *)buffer, NAME(all)(low[r]), NAME(all)(scale[r]), DTYPE_FP32);
        NAME(hadamard)(job, buffer);
        NAME(flip)(job, buffer);
#define CALL(d) NAME(store_row)(rows[r], buffer, job->dim, d)
        BY_DTYPE(CALL, job->dtype);
#undef CALL
    }
}

/* ---- Groups of rows whose channels have numbers of their own. */

static int NAME(encode_group)(const Job *job, const char *const *rows, int n, uint8_t *codes, uint16_t *numbers) {
    float buffer[GROUP * CHANNELS] __attribute__((aligned(64)));
    const int dim = job->dim, bits = job->bits;
    const int64_t code_bytes = code_row_bytes(job);
    int lost = 0;
    for (int at = 0; at < dim; at += CHANNELS) {
        const int width = dim - at < CHANNELS ? dim - at : CHANNELS;
        I most = {0};
        for (int r = 0; r < n; r++) {
            const char *src = rows[r] + at * element_bytes(job->dtype);
            most = NAME(max_int)(most, NAME(load_row)(src, buffer + r * CHANNELS, width, job->dtype));
        }
        if (NAME(any_above)(most, VALUE_MAX_BITS)) {
            lost = 1;
            for (int r = 0; r < n; r++) NAME(clean)(buffer + r * CHANNELS, width);
        }
        for (int c = 0; c < width; c += LANES) {
            F low = NAME(get)(buffer + c), high = low;
            for (int r = 1; r < n; r++) {
                F x = NAME(get)(buffer + r * CHANNELS + c);
                low = NAME(min)(low, x), high = NAME(max)(high, x);
            }
            NAME(Numbers) found = NAME(numbers_of)(low, high, bits);
            memcpy(numbers + at + c, &found.low16, sizeof found.low16);
            memcpy(numbers + dim + at + c, &found.scale16, sizeof found.scale16);
            uint8_t *to = codes + (at + c) * bits / 8;
            for (int r = 0; r < n; r++, to += code_bytes) {
                const float *row = buffer + r * CHANNELS + c;
                if (bits == 8) NAME(quantize)(to, row, LANES, found.low, found.inverse, 8);
                else if (bits == 4) NAME(quantize)(to, row, LANES, found.low, found.inverse, 4);
                else NAME(quantize)(to, row, LANES, found.low, found.inverse, 2);
            }
        }
    }
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
    for (int r = 0; r < n; r++, codes += code_bytes)
        for (int c = 0; c < dim; c += LANES)
            NAME(dequantize)(codes + c * bits / 8, rows[r] + c * element_bytes(dtype), LANES, NAME(get)(lows + c),
                             NAME(get)(scales + c), bits, dtype, 0);
}

static void NAME(decode_group)(const Job *job, char *const *rows, int n, const uint8_t *codes, const uint16_t *numbers) {
#define CALL8(d) NAME(decode_channels)(job, rows, n, codes, numbers, 8, d)
#define CALL4(d) NAME(decode_channels)(job, rows, n, codes, numbers, 4, d)
#define CALL2(d) NAME(decode_channels)(job, rows, n, codes, numbers, 2, d)
    if (job->bits == 8) BY_DTYPE(CALL8, job->dtype);
    else if (job->bits == 4) BY_DTYPE(CALL4, job->dtype);
    else BY_DTYPE(CALL2, job->dtype);
#undef CALL8
#undef CALL4
#undef CALL2
}

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
