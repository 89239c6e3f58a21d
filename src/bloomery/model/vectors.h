// Vectors of a register's numbers, float32 and bfloat16, for the C++ of this package; `native.py` puts it in front of a
// file, behind `tiles.h`. Vectors wider than the CPU's would pass through memory at every operation.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#if defined __AVX512F__
constexpr Long LANES = 16;
#else
constexpr Long LANES = 8;
#endif
constexpr Long REGISTERS = 2 * LANES;  // of them a CPU has 32 with AVX-512, else 16
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef Word Words __attribute__((vector_size(4 * LANES)));
#if defined __AVX512F__
static const Ints ORDER = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
static const Ints ORDER = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

struct Half { uint16_t bits; };  // bfloat16

static inline Floats loaded(const void *from) { Floats x; memcpy(&x, from, sizeof x); return x; }
static inline Words words(const void *from) { Words x; memcpy(&x, from, sizeof x); return x; }
template <class V> static inline void store(void *into, V x) { memcpy(into, &x, sizeof x); }
static inline Floats all(float x) { return x - Floats{}; }
static inline Floats bits(Words x) { Floats y; memcpy(&y, &x, sizeof y); return y; }

static inline Half narrow(float x) {  // to the nearest, ties to even; no NaN comes here that must stay one
    Word word; memcpy(&word, &x, sizeof word);
    return {uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16)};
}
static inline void put(float *into, float x) { *into = x; }
static inline void put(Half *into, float x) { *into = narrow(x); }

// Two rows of floats as words: the first in the lower half. Rounds to the nearest, ties to even.
static inline Words joined(Floats low, Floats high) {
#if defined __AVX512BF16__
    const __m512i zipped = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                            4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Words)_mm512_permutexvar_epi16(zipped, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#endif
    Words a, b;
    memcpy(&a, &low, sizeof a);
    memcpy(&b, &high, sizeof b);
    a = (a + 0x7fff + ((a >> 16) & 1)) >> 16;
    b = (b + 0x7fff + ((b >> 16) & 1)) & 0xffff0000u;
    return a | b;
}

static inline float largest(Floats x) {
#if defined __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#elif defined __AVX2__
    __m128 y4 = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    y4 = _mm_max_ps(y4, _mm_movehl_ps(y4, y4));
    return _mm_cvtss_f32(_mm_max_ss(y4, _mm_movehdup_ps(y4)));
#endif
    float y = x[0];
    for (Long i = 1; i < LANES; i++) y = std::max(y, x[i]);
    return y;
}
static inline float total(Floats x) {
#if defined __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#elif defined __AVX2__
    __m128 y4 = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    y4 = _mm_add_ps(y4, _mm_movehl_ps(y4, y4));
    return _mm_cvtss_f32(_mm_add_ss(y4, _mm_movehdup_ps(y4)));
#endif
    float y = 0;
    for (Long i = 0; i < LANES; i++) y += x[i];
    return y;
}

// e^x within a few units in the last place, of x up to 0 or a little more; below -87 it is 0. NaN stays NaN.
static inline Floats exponential(Floats x) {
    Floats limited = x < -87.0f ? all(-87.0f) : x;
    Floats turns = limited * 1.44269504f + 12582912.0f;  // rounds to a whole number
    Words exponent; memcpy(&exponent, &turns, sizeof exponent);
    turns -= 12582912.0f;
    Floats rest = limited - turns * 0.693359375f + turns * 2.12194440e-4f;
    Floats y = 1.9875691500e-4f * rest + 1.3981999507e-3f;  // the polynomial of Cephes' expf
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    Words raised = ((exponent - 0x4b400000u) + 127) << 23;
    return x < -87.0f ? Floats{} : y * bits(raised);
}

// A register's numbers at once.
static inline void put_lanes(float *into, Floats x) { store(into, x); }
static inline void put_lanes(Half *into, Floats x) {
#if defined __AVX512BF16__
    store(into, _mm512_cvtneps_pbh((__m512)x));
#elif defined __AVX2__ && !defined __AVX512F__
    Words rounded; memcpy(&rounded, &x, sizeof rounded);
    rounded = (rounded + 0x7fff + ((rounded >> 16) & 1)) >> 16;
    __m256i twice = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)rounded, (__m256i)rounded), 0x08);
    store(into, _mm256_castsi256_si128(twice));
#else
    for (Long i = 0; i < LANES; i++) into[i] = narrow(x[i]);
#endif
}
template <class T> static inline void put_row(T *into, const float *from, Long count, float factor) {
    Long whole = count / LANES * LANES;
    for (Long e = 0; e < whole; e += LANES) put_lanes(into + e, loaded(from + e) * factor);
    for (Long e = whole; e < count; e++) put(into + e, from[e] * factor);
}

static inline Floats widened(const float *from) { return loaded(from); }
static inline Floats widened(const Half *from) {
#if defined __AVX512F__
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif defined __AVX2__
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    Floats x;
    for (Long i = 0; i < LANES; i++) { Word word = Word(from[i].bits) << 16; memcpy((char *)&x + 4 * i, &word, 4); }
    return x;
#endif
}
static inline float widened_one(const float *from) { return *from; }
static inline float widened_one(const Half *from) {
    Word word = Word(from->bits) << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

// Up to LANES numbers of a row; zeros behind them.
template <class T> static inline Floats some(const T *from, Long count) {
    if (count >= LANES) return widened(from);
    Floats x = {};
    for (Long i = 0; i < count; i++) x[i] = widened_one(from + i);
    return x;
}
template <class T> static inline void put_some(T *into, Floats x, Long count) {
    if (count >= LANES) return put_lanes(into, x);
    for (Long i = 0; i < count; i++) put(into + i, x[i]);
}
static inline Floats sigmoid(Floats x) {
    Floats small = exponential(x < 0.0f ? x : -x);
    return (x < 0.0f ? small : all(1.0f)) / (1.0f + small);
}

// LANES x LANES words; rows `from` apart and `into` apart.
static inline void transpose(Word *into, Long to_row, const Word *from, Long from_row) {
#if defined __AVX512F__
    transpose_tile(into, to_row, from, from_row);
#elif defined __AVX2__
    __m256 r[8], s[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps((const float *)(from + i * from_row));
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps((float *)(into + i * to_row), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps((float *)(into + (i + 4) * to_row), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
#else
    for (Long i = 0; i < LANES; i++)
        for (Long j = 0; j < LANES; j++) into[j * to_row + i] = from[i * from_row + j];
#endif
}

struct Scratch {  // one allocation a thread, cut into pieces
    char *memory = nullptr, *free = nullptr;
    explicit Scratch(Long bytes) { memory = free = (char *)aligned_alloc(64, (bytes + 63) / 64 * 64); }
    ~Scratch() { std::free(memory); }
    template <class V> V *take(Long count) {
        V *piece = (V *)free;
        free += (count * Long(sizeof(V)) + 63) / 64 * 64;
        return piece;
    }
};
