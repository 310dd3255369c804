/*
 * Vectors of LANES floats for quantize_rows.h, which includes this once for each instruction set: what vector extensions
 * lack, elements of the engine, and codes.
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
