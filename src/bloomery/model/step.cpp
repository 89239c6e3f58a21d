// One step of a decoder on a CPU: the next tokens of several texts in one pass over the weights.
//
// Weights are float32, bfloat16 or int8 in blocks of 64; everything between them is float32. Each sum is added in an
// order that depends neither on the number of threads nor on that of texts: a text decoded with others, or checked
// several tokens at a time, gives the same numbers to the bit. Where the CPU has the tiles of AMX, they multiply every
// bfloat16 matrix, of one text, too. `compiled_step.py` fills the structures.

#include <algorithm>
#include <cmath>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

// The numbers of a register, and how many texts, with some rows of a matrix, or heads, with some keys, have their sums in
// registers at once: more sums, or vectors wider than the CPU's, would pass through memory at every addition.
#ifdef __AVX512F__
constexpr Long LANES = 16, TEXTS = 8, HEADS = 4;
#else
constexpr Long LANES = 8, TEXTS = 3, HEADS = 2;
#endif
constexpr Long BLOCK = 64, ROWS = 4;
constexpr Long LINE = 64, AHEAD = 8192, CACHED = 1 << 17;  // bytes
constexpr Long TILE = 16, DEPTH = 32, PARTS = 2, TILED = 64;  // rows and columns of a tile; numbers of a row; see `Inputs`
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

enum QueryNorm { NONE, HEAD, ROTATED_HEAD, FULL };

struct Half { uint16_t bits; };  // bfloat16
enum Kind { FLOAT32, BFLOAT16, INT8 };
enum Activation { SILU, GELU, GELU_TANH, RELU, RELU2 };
enum Mixer { ATTENTION, DELTA_NET, SHORT_CONVOLUTION };

struct Matrix {  // weight [outputs, inputs]; LoRA adds B A, whose rank is a multiple of LANES, or 0
    const void *weight;
    const float *scales, *bias, *A, *B;
    Long outputs, inputs, kind, rank;
};
// In place of an MLP: `per_token` of `count` MLPs of a token, which a router chooses. Beside them stands, as the matrices of
// the layer, one that every token meets, times the sigmoid of what `shared_gate` makes.
struct Mixture {
    Matrix router, gate_up, down, shared_gate;  // gate_up and down: of the first expert; the others follow
    const float *choice_bias;  // [count], added to scores for the choice alone
    Long count, per_token, width, gated, sigmoid, softmax_of_chosen, normalize, clamps_sum;
    Long groups, groups_per_token, best_of_group, clamped;
    float least_sum, weight_scale, clamp, slope;
};
struct Norm { const float *gain, *bias; Long centered; double eps; };  // no gain: nothing is normed
struct Layer {
    // Of a delta net q makes queries, keys and values, k the gate of what is read, v strengths; of a short convolution q
    // makes both gates and what is convolved. o is the way back to the residual stream.
    Matrix q, k, v, decay, o, gate, up, down;
    Norm before_attention, after_attention, before_mlp, after_mlp, q_norm, k_norm;  // q_norm: also of what a delta net reads
    const float *cos, *sin;  // [positions, half]; null: nothing rotates
    const float *growth;     // [positions], of queries; null: 1
    void *keys, *values;     // [slots, kv_heads, capacity, width]; a ring where more positions than `capacity` came
    Long capacity;
    // Heads of queries, or of values; heads of keys, and their width; numbers of it that turn, halved.
    Long mixer, inner, heads, kv_heads, width, value_width, half;
    Long gated;              // q makes, head by head, a query and the gate of its output
    const float *taps, *tap_bias;      // [kernel, C]: of the oldest token first
    const float *step_bias, *rate;     // [heads]: exp(rate softplus(decay + step_bias)) of a state is left
    void *convolved;         // [slots, kernel - 1, C]: before the new token
    float *memory;           // [slots, heads, width, value_width]
    Long kernel;
    float scale;             // of attention
    const float *sinks;      // [heads]: a logit without a value; null: none
    const Mixture *mixture;  // null: the MLP alone
};
struct Model {
    const Layer *layers;
    Norm norm;
    Matrix head;
    Long num_layers, hidden, activation, cache_kind, qk_norm;
    Long interleave, shared_norm;  // neighbors rotate, not halves; the MLP reads what attention reads
    float softcap;         // of attention; none: 0
    float multiplier;      // of what is added to the residual stream
};

static inline Floats load(const float *from) { Floats x; memcpy(&x, from, sizeof x); return x; }
static inline void store(float *into, Floats x) { memcpy(into, &x, sizeof x); }
// Compilers widen vectors number by number where they are not told the instruction.
static inline Floats load(const Half *from) {
#if defined __AVX512F__
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif defined __AVX2__
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    Halves halves; memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}
static inline Floats load(const int8_t *from) {
#if defined __AVX512F__
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined __AVX2__
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    Bytes bytes; memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}
// Compilers read a number again for each product, and the CPU reads no more than one vector per product.
static inline Floats in_register(Floats x) {
#if defined __AVX512F__
    __asm__("" : "+v"(x));
#elif defined __AVX2__
    __asm__("" : "+x"(x));
#endif
    return x;
}
static inline float sum(Floats x) {
#if defined __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#elif defined __AVX2__
    __m256 pairs = _mm256_hadd_ps((__m256)x, (__m256)x), fours = _mm256_hadd_ps(pairs, pairs);
    return _mm256_cvtss_f32(fours) + _mm_cvtss_f32(_mm256_extractf128_ps(fours, 1));
#else
    for (Long size = LANES / 2; size; size /= 2) for (Long i = 0; i < size; i++) x[i] += x[i + size];
    return x[0];
#endif
}
#ifdef __AVX512F__
// The sum of each of 4 vectors in a quarter of the register, and then of 16 vectors: number 4 q + e is that of vector
// [e][q]. Numbers are added in the order of `sum`, of many vectors with one instruction.
static inline __m512 quarters(Floats a, Floats b, Floats c, Floats d) {
    __m512 x = (__m512)a, y = (__m512)b, z = (__m512)c, w = (__m512)d;
    __m512 xy = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    __m512 zw = _mm512_add_ps(_mm512_shuffle_f32x4(z, w, 0x44), _mm512_shuffle_f32x4(z, w, 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(xy, zw, 0x88), _mm512_shuffle_f32x4(xy, zw, 0xdd));
}
static inline __m512 sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_ps(c, d, 0x44), _mm512_shuffle_ps(c, d, 0xee));
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
}
#endif
// Of R rows and one text: the sums of the rows, each added in the order of `sum`.
template <Long R, Long N>
static inline void sum_rows(const Floats (&total)[R][N], Long n, float *into) {
#if defined __AVX512F__
    if constexpr (R == 4) {
        __m512 quarter = quarters(total[0][n], total[1][n], total[2][n], total[3][n]);
        __m512 repeated = sums(quarter, quarter, quarter, quarter);
        _mm_storeu_ps(into, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, repeated)));
        return;
    }
#elif defined __AVX2__
    if constexpr (R == 4) {
        __m256 first = _mm256_hadd_ps((__m256)total[0][n], (__m256)total[1][n]);
        __m256 fours = _mm256_hadd_ps(first, _mm256_hadd_ps((__m256)total[2][n], (__m256)total[3][n]));
        _mm_storeu_ps(into, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
        return;
    }
#endif
    for (Long r = 0; r < R; r++) into[r] = sum(total[r][n]);
}
template <Long R, Long N>
static inline void sum_all(const Floats (&total)[R][N], float (&into)[N][R]) {
#ifdef __AVX512F__
    if constexpr (R * N == 16) {  // the sums of text n follow each other: vector [e][q] is that of number 4 q + e
        __m512 quarter[4];
#pragma GCC unroll 4
        for (Long e = 0; e < 4; e++)
            quarter[e] = quarters(total[e % R][e / R], total[e % R][(4 + e) / R], total[e % R][(8 + e) / R],
                                  total[e % R][(12 + e) / R]);
        _mm512_storeu_ps(&into[0][0], sums(quarter[0], quarter[1], quarter[2], quarter[3]));
        return;
    }
#endif
    for (Long n = 0; n < N; n++) sum_rows(total, n, into[n]);
}
static inline Half rounded(float x) {
    uint32_t bits; memcpy(&bits, &x, sizeof bits);
    if (x != x) return Half{0x7fc0};
    return Half{uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
static inline void put(float *into, float x) { *into = x; }
static inline void put(Half *into, float x) { *into = rounded(x); }

// e^x to two units in the last place (Cephes); NaN stays.
static inline Floats exponential(Floats x) {
    x = x < -87.0f ? Floats{} - 87.0f : x;
    x = x > 88.0f ? Floats{} + 88.0f : x;
    Floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounded to an integer
    Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
    Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f; p = p * r + 1.6666665459e-1f; p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
}
static inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// R rows of a matrix times N inputs. One chain of sums for each product, whatever R and N are. The processor does not
// see by itself that the rows after these come next: what will be needed of them is asked for.
template <class T, Long R, Long N>
static inline void dots(const T *weight, const float *scales, Long inputs, const float *x, Floats (&total)[R][N]) {
    constexpr Long line = LINE / sizeof(T);
    Floats sums[R][N] = {};  // without the pragmas, compilers keep it in memory
    for (Long c = 0; c < inputs; c += line) {
        for (Long r = 0; r < R; r++) __builtin_prefetch((const char *)(weight + r * inputs + c) + AHEAD);
        if constexpr (sizeof(T) > 1) {
#pragma GCC unroll 8
            for (Long i = c; i < c + line; i += LANES) {
                Floats w[R];
#pragma GCC unroll 8
                for (Long r = 0; r < R; r++) w[r] = load(weight + r * inputs + i);
#pragma GCC unroll 8
                for (Long n = 0; n < N; n++) {
                    Floats given = in_register(load(x + n * inputs + i));
#pragma GCC unroll 8
                    for (Long r = 0; r < R; r++) sums[r][n] += w[r] * given;
                }
            }
        } else {  // a line is a block, whose scale its sum gets
#pragma GCC unroll 8
            for (Long r = 0; r < R; r++) {
                Floats part[N] = {};
#pragma GCC unroll 8
                for (Long i = c; i < c + line; i += LANES) {
                    Floats w = load(weight + r * inputs + i);
#pragma GCC unroll 8
                    for (Long n = 0; n < N; n++) part[n] += w * load(x + n * inputs + i);
                }
#pragma GCC unroll 8
                for (Long n = 0; n < N; n++) sums[r][n] += part[n] * scales[(r * inputs + c) / BLOCK];
            }
        }
    }
#pragma GCC unroll 8
    for (Long r = 0; r < R; r++)
#pragma GCC unroll 8
        for (Long n = 0; n < N; n++) total[r][n] = sums[r][n];
}

template <class T, Long R, Long N>
static inline void block(const Matrix &m, Long row, const float *x, float *y) {
    Floats total[R][N];
    const float *scales = m.scales ? m.scales + row * m.inputs / BLOCK : nullptr;
    dots<T, R, N>((const T *)m.weight + row * m.inputs, scales, m.inputs, x, total);
    float products[N][R];
    sum_all(total, products);
    for (Long n = 0; n < N; n++) {
        float *into = y + n * m.outputs + row;
        for (Long r = 0; r < R; r++) into[r] = m.bias ? products[n][r] + m.bias[row + r] : products[n][r];
    }
}

// The rows from `first` to before `last`, whose number is a multiple of ROWS, times up to TEXTS inputs.
template <class T>
static inline void rows(const Matrix &m, Long first, Long last, const float *x, Long count, float *y) {
    for (Long row = first; row < last; row += ROWS)
        for (Long n = 0; n < count;) {
            const float *from = x + n * m.inputs;
            float *into = y + n * m.outputs;
            Long left = count - n;
            if (left == 8) { for (Long r = 0; r < ROWS; r += 2) block<T, 2, 8>(m, row + r, from, into); n += 8; }
            else if (left >= 4) { block<T, ROWS, 4>(m, row, from, into); n += 4; }
            else if (left == 3) { block<T, ROWS, 3>(m, row, from, into); n += 3; }
            else if (left == 2) { block<T, ROWS, 2>(m, row, from, into); n += 2; }
            else { block<T, ROWS, 1>(m, row, from, into); n += 1; }
        }
}

// Rows [count, size] that matrices multiply, as float32 and, once a matrix needs them, as tiles: of each number the nearest of
// bfloat16, and the nearest to what is missing, 17 bits together. Elsewhere a number is rounded nowhere; rounded once, as
// AVX512-BF16 does it, it would have 8 bits. What is infinite comes out as NaN. A tile is 32 numbers deep, a pair in a word,
// and 16 texts wide; of one text [depth], and what stands in the other columns is never read.
struct Inputs {
    const float *x = nullptr;
    Long count = 0;
    std::vector<Word> tiles;  // [texts / TILE, depth / DEPTH, PARTS, words_of_tile]: of `number` texts from `first` on
    Long first = -1, number = 0;

    void hold(const float *rows, Long texts) { x = rows; count = texts; first = -1; }
    Long words_of_tile() const { return number == 1 ? TILE : TILE * TILE; }
    Long words_of_group(Long size) const { return size / DEPTH * PARTS * words_of_tile(); }
    Long bytes_of_tile_row() const { return number == 1 ? sizeof(Word) : TILE * sizeof(Word); }
#ifdef __AMX_BF16__
    // Tiles of the texts from `begin` on, as many as the cache holds.
    void tile(Long size, Long begin) {
        if (first == begin) return;
        first = begin;
        number = std::min(count - begin, TILED);
        tiles.resize((number + TILE - 1) / TILE * words_of_group(size) + TILE);
        Word *into = tiles.data(), words[PARTS][TILE][TILE] = {};
        for (Long group = 0; group < number; group += TILE) {
            const Long texts = std::min(number - group, TILE);
            for (Long part = 0; part < PARTS; part++) memset(words[part][texts % TILE], 0, texts % TILE ? (TILE - texts) * TILE * sizeof(Word) : 0);
            for (Long depth = 0; depth < size; depth += DEPTH) {
                for (Long t = 0; t < texts; t++) split(x + (begin + group + t) * size + depth, words[0][t], words[1][t]);
                for (Long part = 0; part < PARTS; part++, into += words_of_tile()) {
                    if (number == 1) memcpy(into, words[part][0], TILE * sizeof(Word));
                    else transpose_tile(into, TILE, words[part][0], TILE);
                }
            }
        }
    }
    // 32 numbers as two rows of bfloat16, whose sums they are.
    static void split(const float *from, Word *rounded, Word *rest) {
        const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + TILE);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        const Floats first = load((const Half *)&both), second = load((const Half *)&both + TILE);
        _mm512_storeu_si512(rounded, both);
        _mm512_storeu_si512(rest, (__m512i)_mm512_cvtne2ps_pbh((__m512)((Floats)b - second), (__m512)((Floats)a - first)));
    }
#endif
};

struct Part { Long first, last; };
static Part part_of(Long size, Long unit, Long thread, Long threads) {
    Long units = (size + unit - 1) / unit;
    return {std::min(size, units * thread / threads * unit), std::min(size, units * (thread + 1) / threads * unit)};
}
// A thread's rows of a matrix with so many.
static Part rows_of(Long outputs, Long thread, Long threads) { return part_of(outputs, has_tiles ? TILE : ROWS, thread, threads); }

#ifdef __AMX_BF16__
// R times 16 rows of a matrix times N times 16 texts, and into [R][N] [row, text]. A sum gets the products of 32 inputs with
// the rounded numbers of a text, then those with the rest of them, whatever R and N are. The processor does not see that the
// rows after these come next: `lines` of them are asked for at each depth, from `ahead` on.
template <Long R, Long N>
static inline void tile_sums(const Half *weight, Long inputs, const Word *given, const Inputs &x, const char *ahead, Long lines, float *into) {
    const Long row = inputs * sizeof(Half), row_of_given = x.bytes_of_tile_row(), tile = x.words_of_tile(), group = x.words_of_group(inputs);
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (R > 1) _tile_zero(2);
    if constexpr (R * N > 2) _tile_zero(3);
    for (Long depth = 0; depth < inputs; depth += DEPTH, weight += DEPTH) {
        for (const char *end = ahead + lines * LINE; ahead < end; ahead += LINE) __builtin_prefetch(ahead, 0, 2);
        _tile_loadd(4, weight, row);
        if constexpr (R > 1) _tile_loadd(5, weight + TILE * inputs, row);
#pragma GCC unroll 2
        for (Long part = 0; part < PARTS; part++, given += tile) {
            _tile_loadd(6, given, row_of_given);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (R > 1) _tile_dpbf16ps(2, 5, 6);
            if constexpr (N > 1) {
                _tile_loadd(7, given + group, row_of_given);
                _tile_dpbf16ps(1, 4, 7);
                if constexpr (R > 1) _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    constexpr Long size = TILE * TILE;
    _tile_stored(0, into, TILE * sizeof(float));
    if constexpr (N > 1) _tile_stored(1, into + size, TILE * sizeof(float));
    if constexpr (R > 1) _tile_stored(2, into + N * size, TILE * sizeof(float));
    if constexpr (R * N > 2) _tile_stored(3, into + (N + 1) * size, TILE * sizeof(float));
}

// R times 16 rows of a matrix from `begin` on times the texts that are tiled; only rows from `first` on are written.
template <Long R>
static inline void tile_rows(const Matrix &m, Long begin, Long first, const Inputs &x, const char *ahead, float *y) {
    const Half *weight = (const Half *)m.weight + begin * m.inputs;
    alignas(64) float sums[4 * TILE * TILE], turned[TILE * TILE];
    // Each pass over these rows asks for a share of the next ones.
    const Long passes = (x.number + 2 * TILE - 1) / (2 * TILE), lines = (R * TILE + passes - 1) / passes;
    for (Long n = 0; n < x.number;) {
        const Word *given = x.tiles.data() + n / TILE * x.words_of_group(m.inputs);
        const Long groups = x.number - n > TILE ? 2 : 1;
        if (groups == 2) tile_sums<R, 2>(weight, m.inputs, given, x, ahead, lines, sums);
        else tile_sums<R, 1>(weight, m.inputs, given, x, ahead, lines, sums);
        ahead += m.inputs / DEPTH * lines * LINE;
        for (Long r = 0; r < R; r++)
            for (Long group = 0; group < groups; group++) {
                const Long row = begin + r * TILE, skipped = std::max<Long>(first - row, 0);
                const Long texts = std::min(x.number - n - group * TILE, TILE);
                const Word *tile = (const Word *)(sums + (r * groups + group) * TILE * TILE);
                float *into = y + (n + group * TILE) * m.outputs + row;
                if (texts == TILE && !skipped && !m.bias) { transpose_tile((Word *)into, m.outputs, tile, TILE); continue; }
                transpose_tile((Word *)turned, TILE, tile, TILE);
                for (Long t = 0; t < texts; t++, into += m.outputs) {
                    Floats products = load(turned + t * TILE);
                    if (m.bias) products += load(m.bias + row);
                    if (!skipped) store(into, products);
                    else for (Long i = skipped; i < TILE; i++) into[i] = products[i];
                }
            }
        n += groups * TILE;
    }
}

static void product_of_tiles(const Matrix &m, Inputs &x, float *y, Part part) {
    for (Long text = 0; text < x.count; text += TILED, y += TILED * m.outputs) {
        x.tile(m.inputs, text);
        for (Long row = part.first; row < part.last;) {
            const bool two = x.number > TILE && part.last - row >= 2 * TILE;
            // The last tile of a matrix that does not fill it begins earlier.
            const Long begin = std::min(row, m.outputs - TILE), end = std::min(row + (two ? 2 : 1) * TILE, part.last);
            const char *ahead = (const char *)((const Half *)m.weight + end * m.inputs);
            if (two) tile_rows<2>(m, begin, row, x, ahead, y);
            else tile_rows<1>(m, begin, row, x, ahead, y);
            row = end;
        }
    }
}
#endif

// y [count, outputs] = x [count, inputs] W^T + bias, for the rows of W in `part`.
template <class T>
static void product(const Matrix &m, const float *x, Long count, float *y, Part part) {
    Long row = part.first;
    // The inputs of a few texts stay in the first cache while the rows that stay in the second pass by.
    Long height = std::max<Long>(ROWS, CACHED / (m.inputs * sizeof(T)) / ROWS * ROWS);
    const Long end = part.first + (part.last - part.first) / ROWS * ROWS;
    for (; row < end; row = std::min(row + height, end))
        for (Long n = 0; n < count; n += TEXTS)
            rows<T>(m, row, std::min(row + height, end), x + n * m.inputs, std::min(count - n, TEXTS), y + n * m.outputs);
    for (; row < part.last; row++)
        for (Long n = 0; n < count; n++) block<T, 1, 1>(m, row, x + n * m.inputs, y + n * m.outputs);
}
static void product(const Matrix &m, Inputs &given, float *y, Long thread, Long threads) {
    const Part part = rows_of(m.outputs, thread, threads);
    const float *x = given.x;
    const Long count = given.count;
    if (m.kind == FLOAT32) product<float>(m, x, count, y, part);
#ifdef __AMX_BF16__
    else if (m.kind == BFLOAT16 && has_tiles && m.outputs >= TILE) product_of_tiles(m, given, y, part);
#endif
    else if (m.kind == BFLOAT16) product<Half>(m, x, count, y, part);
    else product<int8_t>(m, x, count, y, part);
    if (m.rank) {
        std::vector<float> inner(count * m.rank), update(count * m.outputs);
        product<float>({m.A, nullptr, nullptr, nullptr, nullptr, m.rank, m.inputs}, x, count, inner.data(), {0, m.rank});
        product<float>({m.B, nullptr, nullptr, nullptr, nullptr, m.outputs, m.rank}, inner.data(), count, update.data(), part);
        for (Long n = 0; n < count; n++)
            for (Long row = part.first; row < part.last; row++) y[n * m.outputs + row] += update[n * m.outputs + row];
    }
}

static void normed(const Norm &norm, const float *x, Long size, float *y) {
    float mean = 0.0f;
    if (norm.centered) {
        Floats total = {};
        for (Long i = 0; i < size; i += LANES) total += load(x + i);
        mean = sum(total) / size;
    }
    Floats squares = {};
    for (Long i = 0; i < size; i += LANES) { Floats d = load(x + i) - mean; squares += d * d; }
    float scale = 1.0f / std::sqrt(sum(squares) / size + (float)norm.eps);
    for (Long i = 0; i < size; i += LANES) {
        Floats value = (load(x + i) - mean) * scale * load(norm.gain + i);
        store(y + i, norm.bias ? value + load(norm.bias + i) : value);
    }
}

static void activate(Long kind, float *x, Long size) {
    if (kind == SILU) {
        Long i = 0;
        for (; i + LANES <= size; i += LANES) { Floats v = load(x + i); store(x + i, v / (1.0f + exponential(-v))); }
        for (; i < size; i++) { Floats v = Floats{} + x[i]; x[i] = (v / (1.0f + exponential(-v)))[0]; }
    } else
        for (Long i = 0; i < size; i++) {
            float v = x[i];
            if (kind == GELU) v = 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
            else if (kind == GELU_TANH) v = 0.5f * v * (1.0f + std::tanh(0.79788456f * (v + 0.044715f * v * v * v)));
            else v = v > 0.0f || v != v ? v : 0.0f;
            if (kind == RELU2) v *= v;
            x[i] = v;
        }
}

// Neighbors that turn together come out `half` apart, as in PyTorch.
static void turned(const float *x, Long width, Long half, const float *cos, const float *sin, Long interleave,
                   float *y) {
    memcpy(y, x, width * sizeof *y);
    if (cos)
        for (Long i = 0; i < half; i++) {
            float first = interleave ? x[2 * i] : x[i], second = interleave ? x[2 * i + 1] : x[half + i];
            y[i] = first * cos[i] - second * sin[i];
            y[half + i] = second * cos[i] + first * sin[i];
        }
}

// The products of G queries with R keys in a row: those of a query `length` from those of the one before.
template <class T, Long R, Long G>
static inline void score(const T *keys, Long width, const float *q, float *into, Long length) {
    Floats total[R][G] = {};
    for (Long i = 0; i < width; i += LANES) {
        Floats key[R];
#pragma GCC unroll 8
        for (Long r = 0; r < R; r++) key[r] = load(keys + r * width + i);
#pragma GCC unroll 8
        for (Long g = 0; g < G; g++) {
            Floats asked = in_register(load(q + g * width + i));
#pragma GCC unroll 8
            for (Long r = 0; r < R; r++) total[r][g] += asked * key[r];
        }
    }
#pragma GCC unroll 8
    for (Long g = 0; g < G; g++) sum_rows(total, g, into + g * length);
}

// The weighted sums of all values for G queries, R registers of each.
template <class T, Long R, Long G>
static inline void mix(const T *values, Long width, Long seen, const float *shares, Long length, const float *wholes, float *y) {
    Floats mixed[R][G] = {};
    for (Long s = 0; s < seen; s++) {
        Floats value[R];
#pragma GCC unroll 8
        for (Long r = 0; r < R; r++) value[r] = load(values + s * width + r * LANES);
#pragma GCC unroll 8
        for (Long g = 0; g < G; g++)
#pragma GCC unroll 8
            for (Long r = 0; r < R; r++) mixed[r][g] += shares[g * length + s] * value[r];
    }
    for (Long g = 0; g < G; g++)
        for (Long r = 0; r < R; r++) store(y + g * width + r * LANES, mixed[r][g] / wholes[g]);
}

// Turns the products with `seen` keys into shares; behind them stand zeros. Returns the sum of the shares.
static float to_shares(const Model &model, float scale, Long seen, const float *sink, float *scores) {
    const Long end = (seen + LANES - 1) / LANES * LANES;  // `scores` has so much room
    Floats largest = Floats{} + (sink ? *sink : -INFINITY);
    for (Long s = 0; s < end; s += LANES) {
        Floats logits = load(scores + s) * scale;
        if (model.softcap)
            for (Long i = 0; i < LANES; i++) logits[i] = model.softcap * std::tanh(logits[i] / model.softcap);
        for (Long i = seen - s; i < LANES; i++) logits[i] = -INFINITY;
        store(scores + s, logits);
        largest = logits > largest ? logits : largest;
    }
    float most = largest[0];
    for (Long i = 1; i < LANES; i++) most = std::max(most, largest[i]);
    Floats total = {};
    for (Long s = 0; s < end; s += LANES) {
        Floats share = exponential(load(scores + s) - most);
        for (Long i = seen - s; i < LANES; i++) share[i] = 0.0f;
        total += share;
        store(scores + s, share);
    }
    return sum(total) + (sink ? std::exp(*sink - most) : 0.0f);
}

// G heads of a text's queries that share keys: their rows in q and y follow each other, and each has its sink.
template <class T, Long G>
static void attend(const Model &model, const Layer &layer, const T *keys, const T *values, Long seen, const float *q, const float *sinks,
                   float *scores, Long length, float *y) {
    Long width = layer.width, at = 0;
    for (; at + ROWS <= seen; at += ROWS) score<T, ROWS, G>(keys + at * width, width, q, scores + at, length);
    for (; at < seen; at++) score<T, 1, G>(keys + at * width, width, q, scores + at, length);
    float wholes[G];
    for (Long g = 0; g < G; g++) wholes[g] = to_shares(model, layer.scale, seen, sinks ? sinks + g : nullptr, scores + g * length);
    Long i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) mix<T, 4, G>(values + i, width, seen, scores, length, wholes, y + i);
    for (; i < width; i += LANES) mix<T, 1, G>(values + i, width, seen, scores, length, wholes, y + i);
}

// `width` numbers of a token, a multiple of LANES, convolved with those of the tokens before it, whose place it takes.
template <class T>
static void convolve(const Layer &layer, T *past, Long channels, Long channel, const float *x, Long width, float *y) {
    for (Long i = 0; i < width; i += LANES) {
        Floats sum = layer.tap_bias ? load(layer.tap_bias + channel + i) : Floats{};
        for (Long tap = 0; tap + 1 < layer.kernel; tap++)
            sum += load(past + tap * channels + channel + i) * load(layer.taps + tap * channels + channel + i);
        store(y + i, sum + load(x + i) * load(layer.taps + (layer.kernel - 1) * channels + channel + i));
    }
    for (Long tap = 0; tap + 2 < layer.kernel; tap++)
        memcpy(past + tap * channels + channel, past + (tap + 1) * channels + channel, width * sizeof(T));
    for (Long i = 0; i < width && layer.kernel > 1; i++) put(past + (layer.kernel - 2) * channels + channel + i, x[i]);
}

static float unit_scale(const float *x, Long width) {
    Floats squares = {};
    for (Long i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
    return 1.0f / std::sqrt(sum(squares) + 1e-6f);
}

// R registers of a value head's state: forget, find what the key has, write what it lacks, read with the query.
template <Long R>
static inline void remember(float *state, Long E, Long F, const float *q, const float *k, const float *v, float left, float beta, float *y) {
    Floats found[R] = {}, written[R], read[R] = {};
    for (Long e = 0; e < E; e++)
#pragma GCC unroll 4
        for (Long r = 0; r < R; r++) found[r] += k[e] * load(state + e * F + r * LANES);
    for (Long r = 0; r < R; r++) written[r] = (load(v + r * LANES) - left * found[r]) * beta;
    for (Long e = 0; e < E; e++)
#pragma GCC unroll 4
        for (Long r = 0; r < R; r++) {
            Floats kept = load(state + e * F + r * LANES) * left + k[e] * written[r];
            store(state + e * F + r * LANES, kept);
            read[r] += q[e] * kept;
        }
    for (Long r = 0; r < R; r++) store(y + r * LANES, read[r]);
}

// What a layer's projections made of the tokens: [count, outputs] of each matrix.
struct Projected { const float *q, *k, *v, *decay; };
struct Run { Long slot, first, last; };  // tokens of one text, in order

// A key head of one text in a delta net, with its value heads: into `mixed` [count, heads value_width].
template <class T>
static void delta_head(const Layer &layer, const Run &tokens, Long key_head, const Projected &projected, float *row, float *mixed) {
    const Long E = layer.width, F = layer.value_width, keys = layer.kv_heads * E, group = layer.heads / layer.kv_heads;
    const Long channels = layer.q.outputs, values = group * F, width = layer.heads * F;
    float *q = row, *k = q + E, *v = k + E;
    T *past = (T *)layer.convolved + tokens.slot * (layer.kernel - 1) * channels;
    for (Long t = tokens.first; t < tokens.last; t++) {
        const float *from = projected.q + t * channels;
        Long at[] = {key_head * E, keys + key_head * E, 2 * keys + key_head * values};
        convolve(layer, past, channels, at[0], from + at[0], E, q);
        convolve(layer, past, channels, at[1], from + at[1], E, k);
        convolve(layer, past, channels, at[2], from + at[2], values, v);
        for (Long i = 0; i < 2 * E + values; i += LANES) store(row + i, load(row + i) * sigmoid(load(row + i)));
        float q_scale = unit_scale(q, E) / std::sqrt((float)E), k_scale = unit_scale(k, E);
        for (Long i = 0; i < E; i += LANES) { store(q + i, load(q + i) * q_scale); store(k + i, load(k + i) * k_scale); }
        for (Long g = 0; g < group; g++) {
            Long head = key_head * group + g, gate = t * layer.heads + head;
            float step = projected.decay[gate] + layer.step_bias[head];
            step = step > 20.0f ? step : std::log1p(std::exp(step));  // softplus, as in PyTorch
            float left = std::exp(layer.rate[head] * step), beta = 1.0f / (1.0f + std::exp(-projected.v[gate]));
            float *state = layer.memory + (tokens.slot * layer.heads + head) * E * F, *y = mixed + t * width + head * F;
            Long i = 0;
            for (; i + 4 * LANES <= F; i += 4 * LANES) remember<4>(state + i, E, F, q, k, v + g * F + i, left, beta, y + i);
            for (; i < F; i += LANES) remember<1>(state + i, E, F, q, k, v + g * F + i, left, beta, y + i);
            normed(layer.q_norm, y, F, y);
            const float *z = projected.k + t * width + head * F;
            for (i = 0; i < F; i += LANES) store(y + i, load(y + i) * load(z + i) * sigmoid(load(z + i)));
        }
    }
}

// Some numbers of one text in a short convolution: the gates before and after it, and what is convolved.
template <class T>
static void convolution_part(const Layer &layer, const Run &tokens, Long channel, Long size, const Projected &projected, float *row,
                             float *mixed) {
    const Long channels = layer.o.inputs;
    T *past = (T *)layer.convolved + tokens.slot * (layer.kernel - 1) * channels;
    for (Long t = tokens.first; t < tokens.last; t++) {
        const float *before = projected.q + t * layer.q.outputs + channel, *after = before + channels, *x = after + channels;
        float *into = mixed + t * channels + channel;
        for (Long i = 0; i < size; i += LANES) store(row + i, load(before + i) * load(x + i));
        convolve(layer, past, channels, channel, row, size, into);
        for (Long i = 0; i < size; i += LANES) store(into + i, load(into + i) * load(after + i));
    }
}

// A query head, or a head of keys or values, normed and turned: queries to `turned_q`, the others to the cache.
template <class T>
static void place_head(const Model &model, const Layer &layer, Long t, Long head, Long slot, Long position, const Projected &projected,
                       float *whole, float *scratch, float *turned_q) {
    const Long heads = layer.heads, kv = layer.kv_heads, width = layer.width;
    const float *cos = layer.cos ? layer.cos + position * layer.half : nullptr;
    const float *sin = layer.sin ? layer.sin + position * layer.half : nullptr;
    const bool query = head < heads, key = !query && head < heads + kv;
    const Long own = query ? head : (head - heads) % kv, apart = query && layer.gated ? 2 * width : width;
    const Matrix &matrix = query ? layer.q : key ? layer.k : layer.v;
    const float *from = (query ? projected.q : key ? projected.k : projected.v) + t * matrix.outputs + own * apart;
    const Norm &norm = query ? layer.q_norm : layer.k_norm;
    if ((query || key) && norm.gain && model.qk_norm == FULL) {
        normed(norm, from - own * width, matrix.outputs, whole);
        from = whole + own * width;
    } else if ((query || key) && norm.gain && model.qk_norm == HEAD) {
        normed(norm, from, width, whole);
        from = whole;
    }
    float *final = query ? turned_q + (t * heads + own) * width : scratch;
    turned(from, width, layer.half, query || key ? cos : nullptr, sin, model.interleave, final);
    if ((query || key) && norm.gain && model.qk_norm == ROTATED_HEAD) normed(norm, final, width, final);
    if (query) {
        if (layer.growth) for (Long i = 0; i < width; i++) final[i] *= layer.growth[position];
        return;
    }
    T *into = (T *)(key ? layer.keys : layer.values);
    into += ((slot * kv + own) * layer.capacity + position % layer.capacity) * width;
    for (Long i = 0; i < width; i++) put(into + i, final[i]);
}

// ---- Mixtures of experts --------------------------------------------------------------------------------------------

// Whether a number is chosen before another; NaN before all, as in PyTorch, so that it is seen.
static inline bool is_better(float x, float y) { return x > y || (x != x && y == y); }

// The places of the `most` best of `count` numbers, the best first, of equal ones the first.
static void best_of(const float *numbers, Long count, Long most, Long *places) {
    Long found = 0;
    for (Long i = 0; i < count; i++) {
        if (found == most && !is_better(numbers[i], numbers[places[most - 1]])) continue;
        Long at = found < most ? found++ : most - 1;
        for (; at && is_better(numbers[i], numbers[places[at - 1]]); at--) places[at] = places[at - 1];
        places[at] = i;
    }
}

static void softmax(float *x, Long count) {
    float most = *std::max_element(x, x + count), whole = 0.0f;
    for (Long i = 0; i < count; i++) whole += x[i] = std::exp(x[i] - most);
    for (Long i = 0; i < count; i++) x[i] /= whole;
}

// What a router decides of one token, of its logits [count]: experts and weights [per_token].
static void choose(const Mixture &m, const float *logits, Long *experts, float *weights) {
    std::vector<float> scores(logits, logits + m.count);
    if (m.sigmoid) for (float &score : scores) score = 1.0f / (1.0f + std::exp(-score));
    else softmax(scores.data(), m.count);
    std::vector<float> numbers = scores;
    for (Long e = 0; e < m.count && m.choice_bias; e++) numbers[e] += m.choice_bias[e];
    if (m.groups > 1) {
        const Long size = m.count / m.groups;
        std::vector<float> of_groups(m.groups);
        std::vector<Long> places(std::max(m.best_of_group, m.groups_per_token));
        for (Long g = 0; g < m.groups; g++) {
            best_of(&numbers[g * size], size, m.best_of_group, places.data());
            for (Long k = 0; k < m.best_of_group; k++) of_groups[g] += numbers[g * size + places[k]];
        }
        best_of(of_groups.data(), m.groups, m.groups_per_token, places.data());
        for (Long g = 0; g < m.groups; g++)
            if (std::find(places.begin(), places.begin() + m.groups_per_token, g) == places.begin() + m.groups_per_token)
                std::fill_n(numbers.begin() + g * size, size, -INFINITY);
    }
    best_of(numbers.data(), m.count, m.per_token, experts);
    for (Long k = 0; k < m.per_token; k++) weights[k] = (m.softmax_of_chosen ? logits : scores.data())[experts[k]];
    if (m.softmax_of_chosen) softmax(weights, m.per_token);
    float whole = 0.0f;
    for (Long k = 0; k < m.per_token; k++) whole += weights[k];
    whole = m.clamps_sum ? std::max(whole, m.least_sum) : whole + m.least_sum;
    for (Long k = 0; k < m.per_token; k++) weights[k] = (m.normalize ? weights[k] / whole : weights[k]) * m.weight_scale;
}

// Rows of one expert's matrix, of which `stack` is the first expert's.
static Matrix rows_of_expert(const Matrix &stack, Long expert, Long first, Long outputs) {
    const Long row = expert * stack.outputs + first, bytes = stack.kind == FLOAT32 ? 4 : stack.kind == BFLOAT16 ? 2 : 1;
    return {(const char *)stack.weight + row * stack.inputs * bytes, stack.scales ? stack.scales + row * stack.inputs / BLOCK : nullptr,
            stack.bias ? stack.bias + row : nullptr, nullptr, nullptr, outputs, stack.inputs, stack.kind, 0};
}

// The pairs of a token and an expert, sorted by expert: `pairs` in that order, pair p being of token p / per_token, `place`
// of each pair in it, and where the rows of each expert end.
struct Sorted {
    std::vector<Long> pairs, place, ends;
    Sorted(const Long *experts, Long size, Long count) : pairs(size), place(size), ends(count) {
        for (Long p = 0; p < size; p++) ends[experts[p]]++;
        for (Long e = 1; e < count; e++) ends[e] += ends[e - 1];
        for (Long p = size - 1; p >= 0; p--) { place[p] = --ends[experts[p]]; pairs[place[p]] = p; }
        for (Long e = 0; e < count; e++) ends[e] = e + 1 < count ? ends[e + 1] : size;  // they were the beginnings
    }
};

// gate = activation(gate) up weight, of `size` numbers of a pair.
static void open_gate(const Model &model, const Mixture &m, float *gate, const float *up, Long size, float weight) {
    if (m.clamped) {
        const Floats limit = Floats{} + m.clamp;
        for (Long i = 0; i < size; i += LANES) {
            const Long bytes = std::min(LANES, size - i) * sizeof(float);
            Floats g = {}, u = {};
            memcpy(&g, gate + i, bytes);
            memcpy(&u, up + i, bytes);
            g = g > limit ? limit : g;
            u = u > limit ? limit : u < -limit ? -limit : u;
            g = g * sigmoid(m.slope * g) * (u + 1.0f) * weight;
            memcpy(gate + i, &g, bytes);
        }
        return;
    }
    activate(model.activation, gate, size);
    for (Long i = 0; i < size; i++) gate[i] *= m.gated ? up[i] * weight : weight;
}

// What experts make inside them of the rows n [count, D], in the order of `sorted`: a thread's part of each row of `inner`
// [pairs, width]. Weights multiply it here, as the last product is linear.
static void enter_experts(const Model &model, const Mixture &m, const Sorted &sorted, const float *weights, const float *n, float *inner,
                          float *up, Inputs &given, Long thread, Long team) {
    const Long hidden = m.gate_up.inputs;
    const Part own = rows_of(m.width, thread, team);
    std::vector<float> gathered;
    for (Long e = 0, first = 0; e < m.count; first = sorted.ends[e++]) {
        const Long rows = sorted.ends[e] - first;
        if (!rows) continue;
        const float *from = n + sorted.pairs[first] / m.per_token * hidden;
        if (rows > 1) {
            gathered.resize(rows * hidden);
            for (Long r = 0; r < rows; r++)
                memcpy(&gathered[r * hidden], n + sorted.pairs[first + r] / m.per_token * hidden, hidden * sizeof(float));
            from = gathered.data();
        }
        given.hold(from, rows);
        product(rows_of_expert(m.gate_up, e, 0, m.width), given, inner + first * m.width, thread, team);
        if (m.gated) product(rows_of_expert(m.gate_up, e, m.width, m.width), given, up + first * m.width, thread, team);
        for (Long r = first; r < first + rows; r++)
            open_gate(model, m, inner + r * m.width + own.first, up + r * m.width + own.first, own.last - own.first, weights[sorted.pairs[r]]);
    }
}

// The sum of what the experts of each token make, and of what the shared one made, in z [count, D]: a thread's part of rows.
static void leave_experts(const Mixture &m, const Sorted &sorted, const Long *experts, const float *weights, const float *inner, Long count,
                          const float *opened, float *outer, float *z, Inputs &given, Long thread, Long team) {
    const Long hidden = m.down.outputs;
    const Part own = rows_of(hidden, thread, team);
    Matrix unbiased = m.down;
    unbiased.bias = nullptr;
    for (Long e = 0, first = 0; e < m.count; first = sorted.ends[e++])
        if (Long rows = sorted.ends[e] - first) {
            given.hold(inner + first * m.width, rows);
            product(rows_of_expert(unbiased, e, 0, hidden), given, outer + first * hidden, thread, team);
        }
    for (Long t = 0; t < count; t++) {
        const float share = opened ? 1.0f / (1.0f + std::exp(-opened[t])) : 1.0f;
        for (Long i = own.first; i < own.last; i++) {
            float total = 0.0f;
            for (Long p = t * m.per_token; p < (t + 1) * m.per_token; p++) {
                total += outer[sorted.place[p] * hidden + i];
                if (m.down.bias) total += weights[p] * m.down.bias[experts[p] * hidden + i];
            }
            z[t * hidden + i] = z[t * hidden + i] * share + total;
        }
    }
}

template <class T>
static void run(const Model &model, Long count, const Long *slots, const Long *positions, const float *embedded,
                Long num_wanted, const Long *wanted, float *logits, Long threads) {
    const Long hidden = model.hidden;
    // What the widest layer makes.
    Long wide_q = 0, wide_k = 0, wide_v = 0, wide_decay = 0, wide_mixed = 0, inner = 0, row = 0;
    Long experts = 0, chosen = 0, expert_inner = 0;
    for (Long at = 0; at < model.num_layers; at++) {
        const Layer &layer = model.layers[at];
        wide_q = std::max(wide_q, layer.q.outputs);
        wide_k = std::max(wide_k, layer.k.outputs);
        wide_v = std::max(wide_v, layer.v.outputs);
        wide_decay = std::max(wide_decay, layer.decay.outputs);
        wide_mixed = std::max(wide_mixed, layer.o.inputs);
        inner = std::max(inner, layer.inner);
        row = std::max({row, layer.q.outputs, layer.k.outputs, layer.width});
        if (const Mixture *m = layer.mixture) {
            experts = std::max(experts, m->count);
            chosen = std::max(chosen, m->per_token);
            expert_inner = std::max(expert_inner, m->per_token * m->width);
        }
    }
    std::vector<float> q(count * wide_q), k(count * wide_k), v(count * wide_v), decay(count * wide_decay);
    std::vector<float> turned_q(count * wide_mixed), mixed(count * wide_mixed), y(count * hidden), z(count * hidden);
    std::vector<float> gate(count * inner), up(count * inner);
    std::vector<float> routed(count * experts), weights(count * chosen), opened(count), outer(count * chosen * hidden);
    std::vector<float> expert_gate(count * expert_inner), expert_up(count * expert_inner);
    std::vector<Long> choices(count * chosen);
    const Projected projected = {q.data(), k.data(), v.data(), decay.data()};
    std::vector<Run> texts;
    for (Long t = 0; t < count; t++) {
        if (t && slots[t] == slots[t - 1]) texts.back().last = t + 1;
        else texts.push_back({slots[t], t, t + 1});
    }
    Long longest = *std::max_element(positions, positions + count) + 1 + LANES;
#pragma omp parallel num_threads(threads)
    {
        Long thread = 0, team = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num(); team = omp_get_num_threads();
#endif
        // Each thread keeps the residual stream: norming it again costs less than waiting for another's.
        std::vector<float> x(embedded, embedded + count * hidden), n(count * hidden), scores(std::max(HEADS * longest, row));
        std::vector<float> whole(row);
        Inputs of_norm, of_part;  // what the matrices after a norm multiply, and the other ones
        TileUnit unit;
        auto norm_all = [&](const Norm &norm) {
            for (Long t = 0; t < count; t++) {
                if (norm.gain) normed(norm, &x[t * hidden], hidden, &n[t * hidden]);
                else memcpy(&n[t * hidden], &x[t * hidden], hidden * sizeof(float));
            }
            of_norm.hold(n.data(), count);
        };
        auto add = [&](const std::vector<float> &more, const Norm &norm) {
            for (Long t = 0; t < count; t++) {
                const float *from = &more[t * hidden];
                if (norm.gain) { normed(norm, from, hidden, &n[t * hidden]); from = &n[t * hidden]; }
                for (Long i = 0; i < hidden; i++) x[t * hidden + i] += model.multiplier * from[i];
            }
        };
        for (Long at = 0; at < model.num_layers; at++) {
            const Layer &layer = model.layers[at];
            const Long heads = layer.heads, kv = layer.kv_heads, width = layer.width;
            norm_all(layer.before_attention);
            product(layer.q, of_norm, q.data(), thread, team);
            if (layer.k.weight) product(layer.k, of_norm, k.data(), thread, team);
            if (layer.v.weight) product(layer.v, of_norm, v.data(), thread, team);
            if (layer.decay.weight) product(layer.decay, of_norm, decay.data(), thread, team);
#pragma omp barrier
            if (layer.mixer == DELTA_NET) {
                Part items = part_of((Long)texts.size() * kv, 1, thread, team);
                for (Long item = items.first; item < items.last; item++)
                    delta_head<T>(layer, texts[item / kv], item % kv, projected, whole.data(), mixed.data());
            } else if (layer.mixer == SHORT_CONVOLUTION) {
                Long parts = layer.o.inputs / BLOCK;
                Part items = part_of((Long)texts.size() * parts, 1, thread, team);
                for (Long item = items.first; item < items.last; item++)
                    convolution_part<T>(layer, texts[item / parts], item % parts * BLOCK, BLOCK, projected, whole.data(), mixed.data());
            } else {
                Part items = part_of(count * (heads + 2 * kv), 1, thread, team);
                for (Long item = items.first; item < items.last; item++) {
                    Long t = item / (heads + 2 * kv);
                    place_head<T>(model, layer, t, item % (heads + 2 * kv), slots[t], positions[t], projected, whole.data(),
                                  scores.data(), turned_q.data());
                }
#pragma omp barrier
                // Heads that share keys are computed together where there is work for all threads. Bits are the same.
                const Long sharing = heads / kv, together = count * kv >= 4 * team ? std::min(sharing, HEADS) : 1;
                const Long pieces = (sharing + together - 1) / together;
                items = part_of(count * kv * pieces, 1, thread, team);
                for (Long item = items.first; item < items.last; item++) {
                    const Long t = item / (kv * pieces), kv_head = item / pieces % kv, piece = item % pieces * together;
                    const Long head = kv_head * sharing + piece, number = std::min(together, sharing - piece);
                    const Long first_key = (slots[t] * kv + kv_head) * layer.capacity * width;
                    float *into = &mixed[(t * heads + head) * width];
                    auto attend_heads = number == 1 ? attend<T, 1> : number == 2 ? attend<T, 2> : number == 3 ? attend<T, 3> : attend<T, 4>;
                    attend_heads(model, layer, (const T *)layer.keys + first_key, (const T *)layer.values + first_key,
                                 std::min(positions[t] + 1, layer.capacity), &turned_q[(t * heads + head) * width],
                                 layer.sinks ? layer.sinks + head : nullptr, scores.data(), longest, into);
                    const float *opened = &q[t * layer.q.outputs + (2 * head + 1) * width];
                    for (Long g = 0; g < number && layer.gated; g++)
                        for (Long i = g * width; i < (g + 1) * width; i += LANES)
                            store(into + i, load(into + i) * sigmoid(load(opened + g * width + i)));
                }
            }
#pragma omp barrier
            of_part.hold(mixed.data(), count);
            product(layer.o, of_part, y.data(), thread, team);
#pragma omp barrier
            add(y, layer.after_attention);
            if (!model.shared_norm) norm_all(layer.before_mlp);  // else n still has what attention read
            const Mixture *m = layer.mixture;
            if (m) {
                product(m->router, of_norm, routed.data(), thread, team);
                if (m->shared_gate.weight) product(m->shared_gate, of_norm, opened.data(), thread, team);
            }
            Part own = rows_of(layer.inner, thread, team);
            if (layer.gate.weight) product(layer.gate, of_norm, gate.data(), thread, team);
            if (layer.up.weight) product(layer.up, of_norm, up.data(), thread, team);
            for (Long t = 0; t < count && layer.up.weight; t++) {
                float *made = &up[t * layer.inner], *opened = layer.gate.weight ? &gate[t * layer.inner] : made;
                activate(model.activation, opened + own.first, own.last - own.first);
                if (opened != made) for (Long i = own.first; i < own.last; i++) made[i] *= opened[i];
            }
#pragma omp barrier
            of_part.hold(up.data(), count);
            if (layer.down.weight) product(layer.down, of_part, z.data(), thread, team);
            if (m) {
                Part tokens = part_of(count, 1, thread, team);
                for (Long t = tokens.first; t < tokens.last; t++)
                    choose(*m, &routed[t * m->count], &choices[t * m->per_token], &weights[t * m->per_token]);
                if (!layer.down.weight) {  // z begins with zeros, where no shared expert filled it
                    Part part = rows_of(hidden, thread, team);
                    for (Long t = 0; t < count; t++) std::fill(&z[t * hidden] + part.first, &z[t * hidden] + part.last, 0.0f);
                }
#pragma omp barrier
                const Sorted sorted(choices.data(), count * m->per_token, m->count);
                enter_experts(model, *m, sorted, weights.data(), n.data(), expert_gate.data(), expert_up.data(), of_part, thread, team);
#pragma omp barrier
                leave_experts(*m, sorted, choices.data(), weights.data(), expert_gate.data(), count,
                              m->shared_gate.weight ? opened.data() : nullptr, outer.data(), z.data(), of_part, thread, team);
            }
#pragma omp barrier
            add(z, layer.after_mlp);
        }
        norm_all(model.norm);
        for (Long t = 0; t < num_wanted; t++) memcpy(&x[t * hidden], &n[wanted[t] * hidden], hidden * sizeof(float));
        of_part.hold(x.data(), num_wanted);
        product(model.head, of_part, logits, thread, team);
    }
}

// Must run once before `step`. `wanted`: whether AMX may multiply. Returns whether it does.
extern "C" int step_begin(int wanted) { return ask_for_tiles(wanted); }

// `slots` and `positions` of the tokens whose embeddings are given; those of one slot are in order, one after another.
// `logits` [num_wanted, V] of the tokens at the places `wanted`.
extern "C" void step(const Model *model, Long count, const Long *slots, const Long *positions, const float *embedded,
                     Long num_wanted, const Long *wanted, float *logits, Long threads) {
    auto kind = model->cache_kind == BFLOAT16 ? run<Half> : run<float>;
    kind(*model, count, slots, positions, embedded, num_wanted, wanted, logits, threads);
}
