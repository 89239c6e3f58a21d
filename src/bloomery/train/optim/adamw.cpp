// AdamW of one parameter in one pass: moments of float32, bfloat16 or 8 bits, weights of float32 or bfloat16.
//
// Every operation is the one of `adamw.py`, in its order and rounded as it is there, so that the results are the same to
// the bit, and so are the bits of stochastic rounding: those of PyTorch's generator. No two operations may be contracted
// to one (-ffp-contract=off), but where PyTorch does it itself. `compiled_adamw.py` compiles and calls this.

constexpr Long BLOCK = 256;  // levels of 8 bits that share a scale

#include <type_traits>

typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(LANES)));
typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));

template <bool SIGNED> struct Level { int8_t bits; };

// Whole numbers of 8 and 16 bits as ones of 32 bits and back, which takes the lower bits. (GCC 12 converts vectors of them
// one number after the other.)
#if defined __AVX512F__
static inline Ints ints(Bytes x) { return (Ints)_mm512_cvtepi8_epi32((__m128i)x); }
static inline Ints ints(UnsignedBytes x) { return (Ints)_mm512_cvtepu8_epi32((__m128i)x); }
static inline Ints ints(Shorts x) { return (Ints)_mm512_cvtepi16_epi32((__m256i)x); }
static inline Shorts shorts(Ints x) { return (Shorts)_mm512_cvtepi32_epi16((__m512i)x); }
static inline Bytes bytes(Ints x) { return (Bytes)_mm512_cvtepi32_epi8((__m512i)x); }
#elif defined __AVX2__
template <class V> static inline __m128i padded(V x) { __m128i y = {}; memcpy(&y, &x, sizeof x); return y; }
static inline Ints ints(Bytes x) { return (Ints)_mm256_cvtepi8_epi32(padded(x)); }
static inline Ints ints(UnsignedBytes x) { return (Ints)_mm256_cvtepu8_epi32(padded(x)); }
static inline Ints ints(Shorts x) { return (Ints)_mm256_cvtepi16_epi32(padded(x)); }
static inline Shorts shorts(Ints x) {
    const __m256i lower = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xffff));
    const __m256i twice = _mm256_permute4x64_epi64(_mm256_packus_epi32(lower, lower), 0x08);
    return (Shorts)_mm256_castsi256_si128(twice);
}
static inline Bytes bytes(Ints x) {
    const __m128i lower = _mm_and_si128((__m128i)shorts(x), _mm_set1_epi16(0xff));
    const __m128i packed = _mm_packus_epi16(lower, lower);
    Bytes y; memcpy(&y, &packed, sizeof y);
    return y;
}
#else
template <class V> static inline Ints ints(V x) { return __builtin_convertvector(x, Ints); }
static inline Shorts shorts(Ints x) { return __builtin_convertvector(x, Shorts); }
static inline Bytes bytes(Ints x) { return __builtin_convertvector(x, Bytes); }
#endif

// ---- Random bits ----------------------------------------------------------------------------------------------------

// The Mersenne twister MT19937 (Matsumoto and Nishimura, 1998) as PyTorch draws 64 bits from it: of two words the first
// is the upper one. In memory they are four numbers of 16 bits.
struct RandomBits {
    static constexpr Long SIZE = 624, FAR = 397;
    Word state[SIZE];
    Word drawn[SIZE];
    Long used = SIZE;

    explicit RandomBits(Word seed) {
        state[0] = seed;
        for (Long i = 1; i < SIZE; i++) state[i] = 1812433253u * (state[i - 1] ^ (state[i - 1] >> 30)) + Word(i);
    }
    static Word twisted(Word upper, Word lower, Word far) {
        Word y = (upper & 0x80000000u) | (lower & 0x7fffffffu);
        return far ^ (y >> 1) ^ (-(y & 1) & 0x9908b0dfu);
    }
    // From `from` to `end`: what stands `offset` words behind is of this turn already where that is negative.
    void twist(Long from, Long end, Long offset) {
        Long i = from;
        for (; i + LANES <= end; i += LANES) {
            Words y = (words(state + i) & 0x80000000u) | (words(state + i + 1) & 0x7fffffffu);
            store(state + i, words(state + i + offset) ^ (y >> 1) ^ (-(y & 1) & 0x9908b0dfu));
        }
        for (; i < end; i++) state[i] = twisted(state[i], state[i + 1], state[i + offset]);
    }
    void draw() {
        twist(0, SIZE - FAR, FAR);
        twist(SIZE - FAR, SIZE - 1, FAR - SIZE);
        state[SIZE - 1] = twisted(state[SIZE - 1], state[0], state[FAR - 1]);
        for (Long i = 0; i < SIZE; i += LANES) {
            Words y = words(state + i);
            y ^= y >> 11;
            y ^= (y << 7) & 0x9d2c5680u;
            y ^= (y << 15) & 0xefc60000u;
            y ^= y >> 18;
            store(drawn + i, __builtin_shuffle(y, (Words)(ORDER ^ 1)));  // the first of two is the upper one
        }
        used = 0;
    }
    Ints next() {
        if (used == SIZE) draw();
        Shorts bits;
        memcpy(&bits, drawn + used, sizeof bits);
        used += LANES / 2;
        return ints(bits);
    }
};
static_assert(RandomBits::SIZE % LANES == 0, "a turn is whole vectors");

extern "C" void random_bits(Word seed, int16_t *into, Long count) {
    RandomBits random(seed);
    for (Long n = 0; n < count; n += LANES) {
        Shorts bits = shorts(random.next());
        memcpy(into + n, &bits, 2 * std::min(LANES, count - n));
    }
}

// ---- Numbers --------------------------------------------------------------------------------------------------------

static inline Floats root(Floats x) {
#if defined __AVX512F__
    return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined __AVX2__
    return (Floats)_mm256_sqrt_ps((__m256)x);
#else
    for (Long i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}
// x y + z, rounded once where the CPU can.
#if defined __AVX512F__ || (defined __AVX2__ && defined __FMA__) || defined __ARM_FEATURE_FMA
constexpr bool ROUNDS_ONCE = true;
#else
constexpr bool ROUNDS_ONCE = false;
#endif
static inline Floats product_sum(Floats x, Floats y, Floats z) {
#if defined __AVX512F__
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined __AVX2__ && defined __FMA__
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined __ARM_FEATURE_FMA
    for (Long i = 0; i < LANES; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
    return z;
#else
    return x * y + z;
#endif
}
static inline Floats magnitude(Floats x) {
    Words y; memcpy(&y, &x, sizeof y);
    return bits(y & 0x7fffffffu);
}
static inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }
static inline Floats rounded(Floats x) { return (x + 12582912.0f) - 12582912.0f; }  // ties to even, of |x| < 2^22
// From x toward y, by the formula of torch.lerp.
static inline Floats between(Floats x, Floats y, float weight) {
    return weight < 0.5f ? product_sum(all(weight), y - x, x) : product_sum(all(weight - 1.0f), y - x, y);
}

// x / y to the bit, of finite numbers that are not tiny: the quotient by the inverse, and what it leaves (P. Markstein,
// Computation of elementary functions on the IBM RISC System/6000 processor, 1990, theorem 7).
struct Divisor {
    float y, inverse;
    explicit Divisor(float y) : y(y), inverse(1.0f / y) {}
};
static inline Floats operator/(Floats x, Divisor by) {
    if (!ROUNDS_ONCE || by.y < 1e-30f) return x / by.y;
    Floats quotient = x * by.inverse, rest = product_sum(-quotient, all(by.y), x);
    return product_sum(rest, all(by.inverse), quotient);
}

// factor x^(1/4), x from 0 to 1, as the root of a root and rounded to a whole number. A CPU's estimate of an inverse root
// and one step of Newton's are off by a few units in the last place: roots are computed where it could decide.
static inline Floats whole_fourth_root(Floats x, float factor) {
#if defined __AVX2__
    Floats near = larger(x, all(1e-37f));
    for (int times = 0; times < 2; times++) {
#if defined __AVX512F__
        Floats inverse = (Floats)_mm512_rsqrt14_ps((__m512)near);
#else
        Floats inverse = (Floats)_mm256_rsqrt_ps((__m256)near);
#endif
        Floats root = near * inverse;
        near = root + 0.5f * root * (1.0f - root * inverse);
    }
    near *= factor;
    Floats level = rounded(near), distance = magnitude(near - level);
#if defined __AVX512F__
    bool decides = _mm512_cmp_ps_mask((__m512)distance, _mm512_set1_ps(0.499f), _CMP_GT_OQ);
#else
    bool decides = _mm256_movemask_ps(_mm256_cmp_ps((__m256)distance, _mm256_set1_ps(0.499f), _CMP_GT_OQ));
#endif
    if (__builtin_expect(!decides, 1)) return level;
#endif
    return rounded(root(root(x)) * factor);
}

static inline void put_upper(Half *into, Words x, Long count) {
    Shorts halves = shorts((Ints)(x >> 16));
    if (count >= LANES) memcpy(into, &halves, sizeof halves);
    else if (count > 0) memcpy(into, &halves, count * sizeof *into);
}
static inline void put_nearest(float *into, Floats x, Long count) { put_some(into, x, count); }
static inline Words nearest_words(Floats x) {  // of bfloat16, in the upper halves
    Words y; memcpy(&y, &x, sizeof y);
    return y + 0x7fff + ((y >> 16) & 1);
}
static inline Floats nearest(Floats x) { return bits(nearest_words(x) & 0xffff0000u); }
static inline void put_nearest(Half *into, Floats x, Long count) { put_upper(into, nearest_words(x), count); }
static inline void put_random(Half *into, Floats x, RandomBits &random, Long count) {
    const Floats infinity = all(INFINITY);
    x = x == x ? x : infinity;  // the bits of NaN could overflow to zero
    Words y; memcpy(&y, &x, sizeof y);
    put_upper(into, y + (Words)random.next() + 0x8000u, count);
}

extern "C" void round_at_random(Word seed, const float *from, Half *into, Long count) {
    RandomBits random(seed);
    for (Long n = 0; n < count; n += LANES) put_random(into + n, some(from + n, count - n), random, count - n);
}

template <bool SIGNED> static inline Floats shares(const Level<SIGNED> *from) {
    if constexpr (SIGNED) {
        Bytes levels; memcpy(&levels, from, sizeof levels);
        return __builtin_convertvector(ints(levels), Floats) / Divisor(127);
    } else {
        UnsignedBytes levels; memcpy(&levels, from, sizeof levels);
        return __builtin_convertvector(ints(levels), Floats) / Divisor(255);
    }
}
template <bool SIGNED> static inline Floats decoded(const Level<SIGNED> *from, float scale) {
    Floats share = shares(from), square = share * share;
    return (SIGNED ? share * magnitude(share) * square : square * square) * scale;
}
template <bool SIGNED> static inline void encode(Level<SIGNED> *into, Floats x, Divisor scale) {
    Floats share = x / scale;
    Floats level = whole_fourth_root(SIGNED ? magnitude(share) : share, SIGNED ? 127.0f : 255.0f);
    level = SIGNED ? (share < 0.0f ? -level : level) : larger(level, all(1.0f));
    Bytes levels = bytes(__builtin_convertvector(level, Ints));
    memcpy(into, &levels, sizeof levels);
}

// ---- AdamW ----------------------------------------------------------------------------------------------------------

struct Adam {
    void *weights;
    const void *gradients;                // of the dtype of weights
    void *first, *second;
    float *first_scales, *second_scales;  // [blocks], of moments of 8 bits
    const Word *seeds;                    // [pieces, 3]: of the weights and both moments, where they are rounded at random
    Long count, piece;
    float first_weight, second_weight;    // of the gradient and its square
    float correction, eps, rate, kept, factor;
    int rounds_gradients;                 // to their dtype, once they are multiplied by the factor
};

template <class W> static inline Floats gradient_at(const Adam &call, Long n, Long count) {
    Floats gradient = some((const W *)call.gradients + n, count) * call.factor;
    if (std::is_same<W, Half>::value && call.rounds_gradients) gradient = nearest(gradient);
    return gradient;
}
template <class W, bool RANDOM>
static inline void move_weights(const Adam &call, Long n, Long count, Floats first, Floats second, RandomBits *random) {
    W *weights = (W *)call.weights + n;
    Floats update = first / (root(second) / Divisor(call.correction) + call.eps) * call.rate;
    Floats moved = some(weights, count) * call.kept + update;
    if constexpr (RANDOM) put_random(weights, moved, *random, count);
    else put_nearest(weights, moved, count);
}

template <class W, class M, bool RANDOM> static void update_floats(const Adam &call, Long piece) {
    constexpr bool RANDOM_MOMENTS = std::is_same<M, Half>::value;
    const Word *seeds = call.seeds + 3 * piece;
    RandomBits weight_bits(RANDOM ? seeds[0] : 0), first_bits(RANDOM_MOMENTS ? seeds[1] : 0);
    RandomBits second_bits(RANDOM_MOMENTS ? seeds[2] : 0);
    Long end = std::min(call.count, (piece + 1) * call.piece);
    for (Long n = piece * call.piece; n < end; n += LANES) {
        Long count = end - n;
        M *firsts = (M *)call.first + n, *seconds = (M *)call.second + n;
        Floats gradient = gradient_at<W>(call, n, count);
        Floats first = between(some(firsts, count), gradient, call.first_weight);
        Floats second = between(some(seconds, count), gradient * gradient, call.second_weight);
        move_weights<W, RANDOM>(call, n, count, first, second, &weight_bits);
        if constexpr (RANDOM_MOMENTS) {
            put_random(firsts, first, first_bits, count);
            put_random(seconds, second, second_bits, count);
        } else {
            put_some(firsts, first, count);
            put_some(seconds, second, count);
        }
    }
}

template <class W, bool RANDOM> static void update_levels(const Adam &call, Long piece) {
    RandomBits weight_bits(RANDOM ? call.seeds[3 * piece] : 0);
    Long end = std::min(call.count, (piece + 1) * call.piece);
    for (Long from = piece * call.piece; from < end; from += BLOCK) {
        Level<true> *firsts = (Level<true> *)call.first + from;
        Level<false> *seconds = (Level<false> *)call.second + from;
        float &first_scale = call.first_scales[from / BLOCK], &second_scale = call.second_scales[from / BLOCK];
        Floats first[BLOCK / LANES], second[BLOCK / LANES], first_most = {}, second_most = {};
        for (Long e = 0; e < BLOCK; e += LANES) {  // the last block is padded
            Floats gradient = gradient_at<W>(call, from + e, end - from - e);
            Floats &one = first[e / LANES], &other = second[e / LANES];
            one = between(decoded(firsts + e, first_scale), gradient, call.first_weight);
            other = between(decoded(seconds + e, second_scale), gradient * gradient, call.second_weight);
            first_most = larger(first_most, magnitude(one));
            second_most = larger(second_most, other);
        }
        first_scale = largest(first_most);
        second_scale = largest(second_most);
        const Divisor first_divisor(first_scale > 0 ? first_scale : 1.0f);
        const Divisor second_divisor(second_scale > 0 ? second_scale : 1.0f);
        for (Long e = 0; e < BLOCK; e += LANES) {
            encode(firsts + e, first[e / LANES], first_divisor);
            encode(seconds + e, second[e / LANES], second_divisor);
            if (from + e < end)
                move_weights<W, RANDOM>(call, from + e, end - from - e, first[e / LANES], second[e / LANES], &weight_bits);
        }
    }
}

enum Moments { FLOATS, HALVES, LEVELS };

template <class W, bool RANDOM> static void update_piece(const Adam &call, Long piece, int moments) {
    if (moments == FLOATS) update_floats<W, float, RANDOM>(call, piece);
    else if (moments == HALVES) update_floats<W, Half, RANDOM>(call, piece);
    else update_levels<W, RANDOM>(call, piece);
}

extern "C" void adamw(const Adam *call, int is_half, int moments, int at_random, int threads) {
    Long pieces = (call->count + call->piece - 1) / call->piece;
#pragma omp parallel for num_threads(threads) schedule(static) if (pieces > 1 && threads > 1)
    for (Long piece = 0; piece < pieces; piece++) {
        if (!is_half) update_piece<float, false>(*call, piece, moments);
        else if (at_random) update_piece<Half, true>(*call, piece, moments);
        else update_piece<Half, false>(*call, piece, moments);
    }
}
