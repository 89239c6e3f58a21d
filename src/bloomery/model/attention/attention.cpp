// Causal attention over documents laid end to end, on a CPU: forward and backward.
//
// One task is one query head of one document, whatever the number of threads, and its sums are added in a fixed order:
// results are the same to the bit. No key behind a query's block is touched, no [T, T] tensor exists, and q, k and v
// are read where the projections left them. `compiled.py` compiles and calls this.
//
// Products take 32-bit words: a float, or two neighbours in bfloat16 along the summed axis, which is what the matrix
// instructions of AMX and AVX512-BF16 multiply. Elsewhere bfloat16 is widened word by word. Sums are float32.
//
// Legend: L tokens of a document, E width of a head; padded with zeros to multiples of 32.

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <tuple>

constexpr Long TILE = LANES * LANES;     // a tile is LANES words deep and LANES columns wide
constexpr Long COLUMNS = 2 * LANES;      // of a product that share registers
constexpr Long ROWS = REGISTERS / 4;     // with so many rows: half of the registers hold sums
constexpr Long STEP = 32;                // rows and columns of matrices are multiples of it
constexpr Long QUERIES = 64, KEYS = 256;          // of a block in backward
constexpr Long FORWARD_QUERIES = 32;

struct Input {  // [tokens, heads, E]; strides in numbers, the last axis is contiguous
    const void *numbers;
    Long token, head;
};
struct Call {
    Input q, k, v, out, grad;            // the last two in backward alone
    void *into, *dq, *dk, *dv;           // dense
    float *sums;                         // log-sum-exp [tokens, heads]
    float *dk_heads, *dv_heads;          // [tokens, heads, E]: of each query head, where several share keys
    const Long *bounds;                  // where documents begin, and the end of the last one
    Long documents, heads, kv_heads, width;
    float scale;
};

template <class T> struct Kind;
template <> struct Kind<float> { static constexpr Long PER_WORD = 1; };
template <> struct Kind<Half> { static constexpr Long PER_WORD = 2; };

static inline Long padded(Long count) { return (count + STEP - 1) / STEP * STEP; }
// ---- products -------------------------------------------------------------------------------------------------------

template <class T> static inline Floats multiplied(Floats sum, Word a, Words b);
template <> inline Floats multiplied<float>(Floats sum, Word a, Words b) {
    float x; memcpy(&x, &a, sizeof x);
    return sum + x * bits(b);
}
template <> inline Floats multiplied<Half>(Floats sum, Word a, Words b) {
#if defined __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
#else
    Word low = a << 16, high = a & 0xffff0000u;
    float x, y;
    memcpy(&x, &low, sizeof x);
    memcpy(&y, &high, sizeof y);
    return sum + x * bits(b << 16) + y * bits(b & 0xffff0000u);
#endif
}

// The tiles of a matrix: element (depth, column) in words lies in tile (depth / 16, column / 16).
struct Tiles { const Word *first; Long deeper, across; };  // words from a tile to the next one

template <class T>
static inline void product_rows(float *C, Long ldc, const Word *A, Long lda, const Word *left, const Word *right, Long deeper,
                                Long depth, bool add) {
    Floats sums[ROWS][2];
    for (Long i = 0; i < ROWS; i++)
        for (Long half = 0; half < 2; half++) sums[i][half] = add ? loaded(C + i * ldc + half * LANES) : Floats{};
    for (Long tile = 0; tile < depth / LANES; tile++)
        for (Long k = 0; k < LANES; k++) {
            Words b0 = words(left + tile * deeper + k * LANES), b1 = words(right + tile * deeper + k * LANES);
#pragma GCC unroll 8
            for (Long i = 0; i < ROWS; i++) {
                Word a = A[i * lda + tile * LANES + k];
                sums[i][0] = multiplied<T>(sums[i][0], a, b0);
                sums[i][1] = multiplied<T>(sums[i][1], a, b1);
            }
        }
    for (Long i = 0; i < ROWS; i++)
        for (Long half = 0; half < 2; half++) store(C + i * ldc + half * LANES, sums[i][half]);
}

#if defined __AMX_BF16__
static inline void product_tiles(float *C, Long ldc, const Word *A, Long lda, const Word *left, const Word *right, Long deeper,
                                 Long depth, bool add) {
    if (add) {
        _tile_loadd(0, C, ldc * 4);
        _tile_loadd(1, C + 16, ldc * 4);
        _tile_loadd(2, C + 16 * ldc, ldc * 4);
        _tile_loadd(3, C + 16 * ldc + 16, ldc * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (Long tile = 0; tile < depth / LANES; tile++) {
        _tile_loadd(4, A + tile * LANES, lda * 4);
        _tile_loadd(6, left + tile * deeper, 64);
        _tile_loadd(5, A + 16 * lda + tile * LANES, lda * 4);
        _tile_loadd(7, right + tile * deeper, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, C, ldc * 4);
    _tile_stored(1, C + 16, ldc * 4);
    _tile_stored(2, C + 16 * ldc, ldc * 4);
    _tile_stored(3, C + 16 * ldc + 16, ldc * 4);
}
#endif

// C [rows, columns] (+)= A [rows, depth] B [depth, columns]; rows and columns are multiples of 32, the depth of LANES words.
template <class T>
static void product(float *C, Long ldc, const Word *A, Long lda, Tiles B, Long rows, Long columns, Long depth, bool add) {
    for (Long n = 0; n < columns; n += COLUMNS) {
        const Word *left = B.first + n / LANES * B.across, *right = left + B.across;
        for (Long m = 0; m < rows; m += STEP) {
            float *into = C + m * ldc + n;
            const Word *from = A + m * lda;
#if defined __AMX_BF16__
            if (Kind<T>::PER_WORD == 2 && has_tiles) {
                product_tiles(into, ldc, from, lda, left, right, B.deeper, depth, add);
                continue;
            }
#endif
            for (Long i = 0; i < STEP; i += ROWS)
                product_rows<T>(into + i * ldc, ldc, from + i * lda, lda, left, right, B.deeper, depth, add);
        }
    }
}

// ---- layouts --------------------------------------------------------------------------------------------------------

// The sum of products of two rows of words.
static inline Floats dot(const float *a, const float *b, Long width) {
    Floats sum = {};
    for (Long e = 0; e < width; e += LANES) sum += loaded(a + e) * loaded(b + e);
    return sum;
}
static inline Floats dot(const Half *a, const Half *b, Long width) {
    Floats sum = {};
    for (Long e = 0; e < width; e += 2 * LANES) {
        Words x = words(a + e), y = words(b + e);
        sum += bits(x << 16) * bits(y << 16) + bits(x & 0xffff0000u) * bits(y & 0xffff0000u);
    }
    return sum;
}

// `count` rows of a head as words, then zeros: [padded rows, padded E / PER_WORD].
template <class T>
static void copy_rows(Word *into, Input x, Long head, Long from, Long count, Long rows, Long width) {
    Long bytes = padded(width) * Long(sizeof(T));
    const T *source = (const T *)x.numbers + head * x.head;
    for (Long i = 0; i < rows; i++) {
        char *row = (char *)into + i * bytes;
        Long filled = i < count ? width * Long(sizeof(T)) : 0;
        const char *given = (const char *)(source + (from + i) * x.token);
        Long whole = filled / 64 * 64;  // calls of memcpy cost as much as so small a copy
        for (Long at = 0; at < whole; at += sizeof(Words)) store(row + at, words(given + at));
        if (filled > whole) memcpy(row + whole, given + whole, filled - whole);
        if (bytes > filled) memset(row + filled, 0, bytes - filled);
    }
}

// Rows of words as tiles that are summed over a row's words: the matrix transposed. [rows / 16][depth / 16] tiles.
static void tiles_of_rows(Word *into, const Word *rows_of_words, Long rows, Long depth) {
    for (Long n = 0; n < rows; n += LANES)
        for (Long k = 0; k < depth; k += LANES)
            transpose(into + (n * depth + k * LANES), LANES, rows_of_words + n * depth + k, depth);
}

// A row, or two, of words of a [rows, E] matrix whose rows are summed over: 16 columns from `column` on.
static inline Words summed_word(const float *matrix, Long row, Long width, Long column) {
    return words(matrix + row * width + column);
}
static inline Words summed_word(const Half *matrix, Long row, Long width, Long column) {
    uint16_t a[LANES], b[LANES];
    memcpy(a, matrix + 2 * row * width + column, sizeof a);
    memcpy(b, matrix + (2 * row + 1) * width + column, sizeof b);
#if defined __AVX512F__
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)a));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)b));
    return (Words)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
#else
    Words joint;
    for (Long i = 0; i < LANES; i++) joint[i] = Word(a[i]) | Word(b[i]) << 16;
    return joint;
#endif
}

// A [rows, E] matrix as tiles that are summed over its rows: [rows' words / 16][E / 16] tiles.
template <class T> static void tiles_over_rows(Word *into, const T *matrix, Long rows, Long width) {
    for (Long k = 0; k < rows / Kind<T>::PER_WORD; k++)
        for (Long n = 0; n < width; n += LANES)
            store(into + (k / LANES * (width / LANES) + n / LANES) * TILE + k % LANES * LANES,
                  summed_word(matrix, k, width, n));
}

// A [rows, E] matrix transposed, in words along its rows: [E, rows / PER_WORD].
template <class T> static void transposed_rows(Word *into, const T *matrix, Long rows, Long width) {
    Long depth = rows / Kind<T>::PER_WORD;
    for (Long k = 0; k < depth; k += LANES)
        for (Long n = 0; n < width; n += LANES) {
            Word block[TILE];
            for (Long i = 0; i < LANES; i++) store(block + i * LANES, summed_word(matrix, k + i, width, n));
            transpose(into + n * depth + k, depth, block, LANES);
        }
}

// Rows of floats as rows of words along a row.
static inline void narrowed(float *into, const float *from, Long count) {
    if (into != from) memcpy(into, from, count * sizeof(float));
}
static inline void narrowed(Half *into, const float *from, Long count) {
#if defined __AVX512BF16__
    for (Long n = 0; n < count; n += 32) {
        __m512bh both = _mm512_cvtne2ps_pbh((__m512)loaded(from + n + 16), (__m512)loaded(from + n));
        store(into + n, both);
    }
#else
    for (Long n = 0; n < count; n++) into[n] = narrow(from[n]);
#endif
}

// ---- documents ------------------------------------------------------------------------------------------------------

static Long longest_document(const Call &call) {
    Long longest = 0;
    for (Long i = 0; i < call.documents; i++) longest = std::max(longest, call.bounds[i + 1] - call.bounds[i]);
    return padded(longest);
}

// ---- forward --------------------------------------------------------------------------------------------------------

// The keys 0 to `last` of a row become e^(scale (score - largest)), those behind up to `end` 0.
static inline void softmax_row(float *row, Long last, Long end, float scale, float *sum, float *log_sum) {
    Floats top = all(-INFINITY);
    Long whole = (last + 1) / LANES * LANES;
    for (Long n = 0; n < whole; n += LANES) { Floats x = loaded(row + n); top = x > top ? x : top; }
    if (whole <= last) {
        Floats x = loaded(row + whole);
        x = ORDER <= int(last - whole) ? x : all(-INFINITY);
        top = x > top ? x : top;
    }
    float most = largest(top);
    Floats sums = {};
    for (Long n = 0; n < whole; n += LANES) {
        Floats y = exponential((loaded(row + n) - most) * scale);
        sums += y;
        store(row + n, y);
    }
    if (whole <= last) {
        Floats x = loaded(row + whole) - most;
        Floats y = ORDER <= int(last - whole) ? exponential(x * scale) : Floats{};
        sums += y;
        store(row + whole, y);
        whole += LANES;
    }
    for (Long n = whole; n < end; n += LANES) store(row + n, Floats{});
    *sum = total(sums);
    *log_sum = most * scale + std::log(*sum);
}

template <class T> static Long forward_bytes(Long length, Long width) {
    Long head = length * width * Long(sizeof(T));
    return 3 * head + FORWARD_QUERIES * (width * 8 + (length + LANES) * 8) + 4096;
}

template <class T> static void forward_head(const Call &call, Long document, Long head, Scratch scratch[1]) {
    constexpr Long PER = Kind<T>::PER_WORD, M = FORWARD_QUERIES;
    Long from = call.bounds[document], length = call.bounds[document + 1] - from, all_keys = padded(length);
    Long width = padded(call.width), depth = width / PER, kv_head = head * call.kv_heads / call.heads;
    scratch->free = scratch->memory;
    Word *rows = scratch->take<Word>(all_keys * depth), *keys = scratch->take<Word>(all_keys * depth);
    Word *values = scratch->take<Word>(all_keys * depth), *queries = scratch->take<Word>(M * depth);
    float *sums = scratch->take<float>(M * width);
    Long row_of = all_keys + LANES;
    float *scores = scratch->take<float>(M * row_of);
    Word *shares = PER == 1 ? (Word *)scores : scratch->take<Word>(M * row_of / PER);
    copy_rows<T>(rows, call.k, kv_head, from, length, all_keys, call.width);
    tiles_of_rows(keys, rows, all_keys, depth);
    copy_rows<T>(rows, call.v, kv_head, from, length, all_keys, call.width);
    tiles_over_rows(values, (const T *)rows, all_keys, width);
    for (Long m = 0; m < length; m += M) {
        Long seen = std::min(all_keys, m + M), here = std::min(M, length - m);
        copy_rows<T>(queries, call.q, head, from + m, here, M, call.width);
        product<T>(scores, row_of, queries, depth, {keys, TILE, TILE * (depth / LANES)}, M, seen, depth, false);
        float row_sums[M], log_sums[M];
        for (Long i = 0; i < M; i++) {
            Long last = std::min(m + i, length - 1);
            softmax_row(scores + i * row_of, last, seen, call.scale, row_sums + i, log_sums + i);
            narrowed((T *)shares + i * row_of, scores + i * row_of, seen);
        }
        product<T>(sums, width, shares, row_of / PER, {values, TILE * (width / LANES), TILE}, M, width, seen / PER, false);
        for (Long i = 0; i < here; i++) {
            Long token = from + m + i;
            T *into = (T *)call.into + (token * call.heads + head) * call.width;
            put_row(into, sums + i * width, call.width, 1 / row_sums[i]);
            call.sums[token * call.heads + head] = log_sums[i];
        }
    }
}

// ---- backward -------------------------------------------------------------------------------------------------------

template <class T> static Long backward_bytes(Long length, Long width) {
    Long head = length * width * Long(sizeof(T));
    return 4 * head + 2 * length * width * 4 + QUERIES * (width * (4 + 5 * Long(sizeof(T))) + KEYS * 20) + 8192;
}

template <class T> static void backward_head(const Call &call, Long document, Long head, Scratch scratch[1]) {
    constexpr Long PER = Kind<T>::PER_WORD, M = QUERIES;
    Long from = call.bounds[document], length = call.bounds[document + 1] - from, all_keys = padded(length);
    Long width = padded(call.width), depth = width / PER, kv_head = head * call.kv_heads / call.heads;
    Long across = TILE * (depth / LANES);
    scratch->free = scratch->memory;
    Word *rows = scratch->take<Word>(all_keys * depth), *keys = scratch->take<Word>(all_keys * depth);
    Word *values = scratch->take<Word>(all_keys * depth), *keys_over = scratch->take<Word>(all_keys * depth);
    float *dk = scratch->take<float>(width * all_keys), *dv = scratch->take<float>(width * all_keys);  // transposed
    Word *queries = scratch->take<Word>(M * depth), *grads = scratch->take<Word>(M * depth);
    Word *queries_turned = scratch->take<Word>(M * depth), *grads_turned = scratch->take<Word>(M * depth);
    Word *outs = scratch->take<Word>(M * depth);
    float *dq = scratch->take<float>(M * width);
    float *scores = scratch->take<float>(M * KEYS), *slopes = scratch->take<float>(M * KEYS);
    Word *share_tiles = scratch->take<Word>(M * KEYS / PER), *slope_tiles = scratch->take<Word>(M * KEYS / PER);
    Word *slope_rows = PER == 1 ? (Word *)slopes : scratch->take<Word>(M * KEYS / PER);
    copy_rows<T>(rows, call.v, kv_head, from, length, all_keys, call.width);
    tiles_of_rows(values, rows, all_keys, depth);
    copy_rows<T>(rows, call.k, kv_head, from, length, all_keys, call.width);
    tiles_of_rows(keys, rows, all_keys, depth);
    tiles_over_rows(keys_over, (const T *)rows, all_keys, width);
    memset(dk, 0, width * all_keys * sizeof(float));
    memset(dv, 0, width * all_keys * sizeof(float));
    for (Long m = 0; m < length; m += M) {
        Long seen = std::min(all_keys, m + M), here = std::min(M, length - m);
        copy_rows<T>(queries, call.q, head, from + m, here, M, call.width);
        copy_rows<T>(grads, call.grad, head, from + m, here, M, call.width);
        copy_rows<T>(outs, call.out, head, from + m, here, M, call.width);
        transposed_rows(queries_turned, (const T *)queries, M, width);
        transposed_rows(grads_turned, (const T *)grads, M, width);
        float deltas[M], log_sums[M];
        for (Long i = 0; i < M; i++) {
            deltas[i] = total(dot((const T *)grads + i * width, (const T *)outs + i * width, width));
            log_sums[i] = i < here ? call.sums[(from + m + i) * call.heads + head] : INFINITY;  // shares of 0
        }
        for (Long n = 0; n < seen; n += KEYS) {
            Long count = std::min(KEYS, seen - n);
            Tiles key_tiles = {keys + n / LANES * across, TILE, across}, value_tiles = {values + n / LANES * across, TILE, across};
            product<T>(scores, KEYS, queries, depth, key_tiles, M, count, depth, false);
            product<T>(slopes, KEYS, grads, depth, value_tiles, M, count, depth, false);
            for (Long i = 0; i < M; i += PER)
                for (Long c = 0; c < count; c += LANES) {
                    Floats share[PER], slope[PER];
                    for (Long j = 0; j < PER; j++) {
                        Long at = (i + j) * KEYS + c, behind = m + i + j - n - c;  // keys after this one are not seen
                        Floats y = exponential(loaded(scores + at) * call.scale - log_sums[i + j]);
                        share[j] = behind >= LANES - 1 ? y : (ORDER <= int(std::max<Long>(behind, -1)) ? y : Floats{});
                        slope[j] = share[j] * (loaded(slopes + at) - deltas[i + j]) * call.scale;
                        put_lanes((T *)slope_rows + at, slope[j]);
                    }
                    Long word = i / PER, tile = (word / LANES * (KEYS / LANES) + c / LANES) * TILE + word % LANES * LANES;
                    if constexpr (PER == 1) {
                        store(share_tiles + tile, share[0]);
                        store(slope_tiles + tile, slope[0]);
                    } else {
                        store(share_tiles + tile, joined(share[0], share[PER - 1]));
                        store(slope_tiles + tile, joined(slope[0], slope[PER - 1]));
                    }
                }
            Tiles over = {keys_over + n / PER / LANES * (width / LANES) * TILE, TILE * (width / LANES), TILE};
            product<T>(dq, width, slope_rows, KEYS / PER, over, M, width, count / PER, n > 0);
            Tiles shares = {share_tiles, TILE * (KEYS / LANES), TILE}, steep = {slope_tiles, TILE * (KEYS / LANES), TILE};
            product<T>(dv + n, all_keys, grads_turned, M / PER, shares, width, count, M / PER, true);
            product<T>(dk + n, all_keys, queries_turned, M / PER, steep, width, count, M / PER, true);
        }
        for (Long i = 0; i < here; i++) {
            T *into = (T *)call.dq + ((from + m + i) * call.heads + head) * call.width;
            put_row(into, dq + i * width, call.width, 1);
        }
    }
    bool shared = call.heads != call.kv_heads;
    for (Long n = 0; n < length; n += LANES)
        for (Long e = 0; e < width; e += LANES)
            for (auto [turned, own, sum] : {std::make_tuple(dk, call.dk, call.dk_heads), std::make_tuple(dv, call.dv, call.dv_heads)}) {
                float block[TILE];
                transpose((Word *)block, LANES, (const Word *)turned + e * all_keys + n, all_keys);
                Long columns = std::min(LANES, call.width - e);
                for (Long i = 0; i < std::min(LANES, length - n) && columns > 0; i++) {
                    Long place = ((from + n + i) * call.heads + head) * call.width + e;
                    if (shared) put_row(sum + place, block + i * LANES, columns, 1);
                    else put_row((T *)own + place, block + i * LANES, columns, 1);
                }
            }
}

template <class T> static void sum_heads(T *into, const float *from, Long group, Long width) {
    for (Long e = 0; e < width; e += LANES) {
        Long columns = std::min(LANES, width - e);
        float sums[LANES] = {};
        for (Long g = 0; g < group; g++) {
            const float *some = from + g * width + e;
            if (columns == LANES) store(sums, loaded(sums) + loaded(some));
            else for (Long j = 0; j < columns; j++) sums[j] += some[j];
        }
        put_row(into + e, sums, columns, 1);
    }
}

// ---- calls ----------------------------------------------------------------------------------------------------------

// The longest documents first, so that no thread begins one when the others end.
static std::unique_ptr<Long[]> by_length(const Call &call) {
    std::unique_ptr<Long[]> order(new Long[call.documents]);
    for (Long i = 0; i < call.documents; i++) order[i] = i;
    std::stable_sort(order.get(), order.get() + call.documents, [&](Long a, Long b) {
        return call.bounds[a + 1] - call.bounds[a] > call.bounds[b + 1] - call.bounds[b];
    });
    return order;
}

template <class T, class Function> static void each_head(const Call &call, Long bytes, int threads, Function run) {
    auto order = by_length(call);
#pragma omp parallel num_threads(threads)
    {
        TileUnit unit;
        Scratch scratch(bytes);
#pragma omp for schedule(dynamic, 1)
        for (Long task = 0; task < call.documents * call.heads; task++)
            run(call, order[task / call.heads], task % call.heads, &scratch);
    }
}

template <class T> static void forward(const Call &call, int threads) {
    each_head<T>(call, forward_bytes<T>(longest_document(call), padded(call.width)), threads, forward_head<T>);
}

template <class T> static void backward(const Call &call, int threads) {
    each_head<T>(call, backward_bytes<T>(longest_document(call), padded(call.width)), threads, backward_head<T>);
    if (call.heads == call.kv_heads) return;
    Long group = call.heads / call.kv_heads, rows = call.bounds[call.documents] * call.kv_heads, width = call.width;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Long row = 0; row < rows; row++) {
        sum_heads((T *)call.dk + row * width, call.dk_heads + row * group * width, group, width);
        sum_heads((T *)call.dv + row * width, call.dv_heads + row * group * width, group, width);
    }
}

extern "C" {

// Must run once before the others. `tiles`: whether AMX may be used. Returns how products in bfloat16 are computed.
const char *attention_begin(int tiles) {
    if (ask_for_tiles(tiles)) return "AMX";
#if defined __AVX512BF16__
    return "AVX512-BF16";
#else
    return "float32";
#endif
}
void attention_forward(const Call *call, int half, int threads) {
    half ? forward<Half>(*call, threads) : forward<float>(*call, threads);
}
void attention_backward(const Call *call, int half, int threads) {
    half ? backward<Half>(*call, threads) : backward<float>(*call, threads);
}
}
