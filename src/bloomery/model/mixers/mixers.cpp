// Causal convolutions and the gated delta rule over documents laid end to end, on a CPU: forward and backward.
//
// Whatever the number of threads, one task computes the same part in the same order: a block of tokens of a convolution,
// a key head of one document of the delta rule. Results are the same to the bit. Inputs and results are float32 or bfloat16,
// everything between them is float32. Backward computes again what forward did not keep. `compiled.py` compiles and calls
// this; `convolution.py` and `delta_rule.py` have the formulas.
//
// Legend: N tokens, C numbers of a token, K taps of a kernel; L tokens of a chunk, E width of a key, F width of a value.

#include <memory>
#include <vector>

// ---- convolution ----------------------------------------------------------------------------------------------------

constexpr Long TOKENS = 64, TAPS = 16;  // of a task; at most
enum Form { PLAIN, SILU, GATED };       // GATED: rows are [before, after, x], and out = after convolved(before x)
                                        // SILU: out and grad are float32, whatever x is

struct Convolution {
    const void *x, *grad;           // [N, C], three times as wide where it is gated; [N, C]
    const float *weight;            // [K + 1, C]: of the token so far before, from 0 on; last the bias
    const Long *bounds;             // where documents begin, and the end of the last one
    void *out, *dx;
    float *dweight;                 // [blocks of tokens, K + 1, C]
    Long tokens, documents, channels, kernel, form;
};

// The numbers that are convolved, from `kernel - 1` tokens before the block on; and where each token's document starts.
struct Block {
    Long first, end, kernel, starts[TOKENS + TAPS];
    Floats x[TOKENS + 2 * TAPS];
    Floats &at(Long token) { return x[token - first + kernel - 1]; }
    Long start(Long token) const { return starts[token - first]; }
};
static void find_starts(const Convolution &call, Long last, Block &block) {
    Long document = std::upper_bound(call.bounds, call.bounds + call.documents + 1, block.first) - call.bounds - 1;
    for (Long token = block.first; token < last; token++) {
        while (call.bounds[document + 1] <= token) document++;
        block.starts[token - block.first] = call.bounds[document];
    }
}
template <class T, Form FORM>
static inline Floats convolved_number(const Convolution &call, Long token, Long channel, Long count) {
    const T *row = (const T *)call.x + token * call.channels * (FORM == GATED ? 3 : 1) + channel;
    if (FORM == GATED) return some(row, count) * some(row + 2 * call.channels, count);
    return some(row, count);
}
template <class T, Form FORM>
static inline void read(const Convolution &call, Block &block, Long last, Long channel, Long count) {
    for (Long token = std::max(block.start(block.first), block.first - call.kernel + 1); token < last; token++)
        block.at(token) = convolved_number<T, FORM>(call, token, channel, count);
}
static inline Floats convolved(Block &block, const Floats *weight, Long token) {
    Long taps = std::min(block.kernel, token - block.start(token) + 1);
    Floats sum = weight[block.kernel];
    for (Long tap = 0; tap < taps; tap++) sum += weight[tap] * block.at(token - tap);
    return sum;
}
static inline void read_weight(const Convolution &call, Long channel, Long count, Floats *weight) {
    for (Long tap = 0; tap <= call.kernel; tap++) weight[tap] = some(call.weight + tap * call.channels + channel, count);
}

template <class T, Form FORM> static void convolve_block(const Convolution &call, Long number) {
    Block block;
    block.first = number * TOKENS, block.end = std::min(block.first + TOKENS, call.tokens), block.kernel = call.kernel;
    find_starts(call, block.end, block);
    for (Long channel = 0; channel < call.channels; channel += LANES) {
        Long count = std::min(LANES, call.channels - channel);
        Floats weight[TAPS + 1];
        read_weight(call, channel, count, weight);
        read<T, FORM>(call, block, block.end, channel, count);
        for (Long token = block.first; token < block.end; token++) {
            Floats y = convolved(block, weight, token);
            if (FORM == SILU) y *= sigmoid(y);
            if (FORM == GATED) y *= some((const T *)call.x + (3 * token + 1) * call.channels + channel, count);
            Long at = token * call.channels + channel;
            if (FORM == SILU) put_some((float *)call.out + at, y, count);
            else put_some((T *)call.out + at, y, count);
        }
    }
}

// The gradient of a token's number comes from the tokens after it, also from those behind the block.
template <class T, Form FORM> static void differentiate_block(const Convolution &call, Long number) {
    Block block;
    block.first = number * TOKENS, block.end = std::min(block.first + TOKENS, call.tokens), block.kernel = call.kernel;
    Long last = std::min(block.end + call.kernel - 1, call.tokens);
    find_starts(call, last, block);
    for (Long channel = 0; channel < call.channels; channel += LANES) {
        Long count = std::min(LANES, call.channels - channel);
        Floats weight[TAPS + 1], dweight[TAPS + 1] = {}, dx[TOKENS] = {};
        read_weight(call, channel, count, weight);
        read<T, FORM>(call, block, last, channel, count);
        for (Long token = block.first; token < last; token++) {
            Long at = token * call.channels + channel;
            Floats grad = FORM == SILU ? some((const float *)call.grad + at, count) : some((const T *)call.grad + at, count);
            if (FORM != PLAIN) {
                Floats y = convolved(block, weight, token);
                if (FORM == SILU) {
                    Floats share = sigmoid(y);
                    grad *= share * (1.0f + y * (1.0f - share));
                } else {
                    Long after = (3 * token + 1) * call.channels + channel;
                    if (token < block.end) put_some((T *)call.dx + after, grad * y, count);
                    grad *= some((const T *)call.x + after, count);
                }
            }
            Long taps = std::min(call.kernel, token - block.start(token) + 1);
            for (Long tap = std::max<Long>(0, token - block.end + 1); tap < taps && token - tap >= block.first; tap++)
                dx[token - tap - block.first] += grad * weight[tap];
            if (token >= block.end) continue;
            for (Long tap = 0; tap < taps; tap++) dweight[tap] += grad * block.at(token - tap);
            dweight[call.kernel] += grad;
        }
        for (Long token = block.first; token < block.end; token++) {
            Floats slope = dx[token - block.first];
            T *into = (T *)call.dx + token * call.channels * (FORM == GATED ? 3 : 1) + channel;
            if (FORM == GATED) {
                const T *row = (const T *)call.x + 3 * token * call.channels + channel;
                put_some(into + 2 * call.channels, slope * some(row, count), count);
                slope *= some(row + 2 * call.channels, count);
            }
            put_some(into, slope, count);
        }
        for (Long tap = 0; tap <= call.kernel; tap++)
            put_some(call.dweight + (number * (call.kernel + 1) + tap) * call.channels + channel, dweight[tap], count);
    }
}

template <class T, Form FORM> static void convolve(const Convolution &call, int threads, bool backward) {
    Long blocks = (call.tokens + TOKENS - 1) / TOKENS;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (Long number = 0; number < blocks; number++)
        backward ? differentiate_block<T, FORM>(call, number) : convolve_block<T, FORM>(call, number);
}
template <class T> static void convolve(const Convolution &call, int threads, bool backward) {
    if (call.form == SILU) convolve<T, SILU>(call, threads, backward);
    else if (call.form == GATED) convolve<T, GATED>(call, threads, backward);
    else convolve<T, PLAIN>(call, threads, backward);
}

// ---- products -------------------------------------------------------------------------------------------------------

constexpr Long ROWS = REGISTERS / 4;  // of a product that share registers: half of them hold sums
enum Into { SET, ADD, SUBTRACT };
enum Shape { FULL, LOWER, UPPER };  // of the left matrix: which of its numbers are not zero
struct Left { const float *first; Long row, deeper; };  // numbers from a row to the next one, and along the sum

static inline Left rows_of(const float *first, Long width) { return {first, width, 1}; }
static inline Left columns_of(const float *first, Long width) { return {first, 1, width}; }

template <Long VECTORS>
static inline void product_rows(float *C, Long width, Left A, const float *B, Long right, Long from, Long to, Into into) {
    Floats sums[ROWS][VECTORS];
    for (Long i = 0; i < ROWS; i++)
        for (Long j = 0; j < VECTORS; j++) {
            Floats before = into == SET ? Floats{} : loaded(C + i * width + j * LANES);
            sums[i][j] = into == SUBTRACT ? -before : before;
        }
    for (Long k = from; k < to; k++) {
        Floats b[VECTORS];
        for (Long j = 0; j < VECTORS; j++) b[j] = loaded(B + k * right + j * LANES);
#pragma GCC unroll 8
        for (Long i = 0; i < ROWS; i++) {
            float a = A.first[i * A.row + k * A.deeper];
#pragma GCC unroll 2
            for (Long j = 0; j < VECTORS; j++) sums[i][j] += a * b[j];
        }
    }
    for (Long i = 0; i < ROWS; i++)
        for (Long j = 0; j < VECTORS; j++) store(C + i * width + j * LANES, into == SUBTRACT ? -sums[i][j] : sums[i][j]);
}

// C [rows, columns] = A [rows, depth] B [depth, columns], added or subtracted; rows and columns are multiples of LANES.
// `half`: only the numbers on and below the diagonal are needed.
static void product(float *C, Long width, Left A, const float *B, Long right, Long rows, Long columns, Long depth, Into into,
                    Shape shape = FULL, bool half = false) {
    for (Long m = 0; m < rows; m += ROWS) {
        Long from = shape == UPPER ? m : 0, to = shape == LOWER ? std::min(depth, m + ROWS) : depth;
        Left left = {A.first + m * A.row, A.row, A.deeper};
        Long end = half ? std::min(columns, (m + ROWS + LANES - 1) / LANES * LANES) : columns, n = 0;
        for (; n + 2 * LANES <= end; n += 2 * LANES)
            product_rows<2>(C + m * width + n, width, left, B + n, right, from, to, into);
        if (n < end) product_rows<1>(C + m * width + n, width, left, B + n, right, from, to, into);
    }
}

// X <- (1 + A)^-1 X, and with the transposed A; A [rows, rows] has numbers below its diagonal alone.
static void solve(const float *A, Long side, float *X, Long rows, Long columns) {
    for (Long m = 0; m < rows; m += ROWS) {
        if (m) product(X + m * columns, columns, rows_of(A + m * side, side), X, columns, ROWS, columns, m, SUBTRACT);
        for (Long n = 0; n < columns; n += LANES) {
            Floats x[ROWS];
            for (Long i = 0; i < ROWS; i++) {
                x[i] = loaded(X + (m + i) * columns + n);
                for (Long j = 0; j < i; j++) x[i] -= A[(m + i) * side + m + j] * x[j];
                store(X + (m + i) * columns + n, x[i]);
            }
        }
    }
}
static void solve_transposed(const float *A, Long side, float *X, Long rows, Long columns) {
    for (Long m = rows - ROWS; m >= 0; m -= ROWS) {
        Long next = m + ROWS;
        if (next < rows)
            product(X + m * columns, columns, columns_of(A + next * side + m, side), X + next * columns, columns, ROWS, columns,
                    rows - next, SUBTRACT);
        for (Long n = 0; n < columns; n += LANES) {
            Floats x[ROWS];
            for (Long i = ROWS - 1; i >= 0; i--) {
                x[i] = loaded(X + (m + i) * columns + n);
                for (Long j = i + 1; j < ROWS; j++) x[i] -= A[(m + j) * side + m + i] * x[j];
                store(X + (m + i) * columns + n, x[i]);
            }
        }
    }
}

static void turn(float *into, const float *from, Long rows, Long columns) {  // [columns, rows]
    for (Long m = 0; m < rows; m += LANES)
        for (Long n = 0; n < columns; n += LANES)
            transpose((Word *)(into + n * rows + m), rows, (const Word *)(from + m * columns + n), columns);
}
static inline Floats dot(const float *a, const float *b, Long width) {
    Floats sum = {};
    for (Long e = 0; e < width; e += LANES) sum += loaded(a + e) * loaded(b + e);
    return sum;
}
static inline void scale(float *into, const float *from, float factor, Long width) {
    for (Long e = 0; e < width; e += LANES) store(into + e, loaded(from + e) * factor);
}

// ---- delta rule -----------------------------------------------------------------------------------------------------

constexpr Long CHUNK = 64;
constexpr float KEY_EPS = 1e-6f;

struct Rule {
    const float *qkv;            // [N, queries and keys of key heads, values of value heads]
    const void *grad;            // [N, value heads, F]
    const float *decay, *beta;   // [N, value heads]
    const Long *bounds;          // where documents begin, and the end of the last one
    void *out;
    float *dqkv, *ddecay, *dbeta;
    // What is read is normed, each value head by itself, and multiplied by SiLU(gate); null: nothing is done to it.
    const void *gate;            // [N, value heads, F]
    const float *gain;           // [F]
    void *dgate;
    float *dgain;                // [documents, key heads, F]
    Long documents, key_heads, value_heads, key_width, value_width;
    float eps;

    Long group() const { return value_heads / key_heads; }
    Long channels() const { return 2 * key_heads * key_width + value_heads * value_width; }
    Long keys() const { return key_heads * key_width; }
};

static inline Long padded(Long count) { return (count + LANES - 1) / LANES * LANES; }

// What the value heads of a chunk share. Rows behind its tokens are zero, and so are columns behind the widths.
struct Shared {
    Long from, tokens, rows, E, F;
    float *q, *k, *k_turned;       // unit length; q is multiplied by E^-1/2
    float *q_scale, *k_scale;      // what made them so
    float *keys_by_keys, *queries_by_keys;
    Shared(const Rule &call, Scratch &scratch) : E(padded(call.key_width)), F(padded(call.value_width)) {
        q = scratch.take<float>(CHUNK * E), k = scratch.take<float>(CHUNK * E), k_turned = scratch.take<float>(CHUNK * E);
        q_scale = scratch.take<float>(CHUNK), k_scale = scratch.take<float>(CHUNK);
        keys_by_keys = scratch.take<float>(CHUNK * CHUNK), queries_by_keys = scratch.take<float>(CHUNK * CHUNK);
    }
    static Long numbers(Long E) { return 3 * CHUNK * E + 2 * CHUNK + 2 * CHUNK * CHUNK; }
};
// What is of one value head.
struct Head {
    float decayed[CHUNK], beta[CHUNK], into[CHUNK], out_of[CHUNK], kept;
    float *v, *left, *system, *scores, *written, *found, *scaled;
    Head(Scratch &scratch, Long F) {
        v = scratch.take<float>(CHUNK * F), written = scratch.take<float>(CHUNK * F);
        found = scratch.take<float>(CHUNK * F), scaled = scratch.take<float>(CHUNK * F);
        left = scratch.take<float>(CHUNK * CHUNK), system = scratch.take<float>(CHUNK * CHUNK);
        scores = scratch.take<float>(CHUNK * CHUNK);
    }
    static Long numbers(Long F) { return 4 * CHUNK * F + 3 * CHUNK * CHUNK; }
};

template <class T> static void read_unit(float *into, float *scales, const T *from, Long stride, Long tokens, Long rows, Long width,
                                         float factor) {
    Long E = padded(width);
    for (Long i = 0; i < rows; i++) {
        float *row = into + i * E;
        Floats squares = {};
        for (Long e = 0; e < E; e += LANES) {
            Floats x = i < tokens ? some(from + i * stride + e, width - e) : Floats{};
            squares += x * x;
            store(row + e, x);
        }
        scales[i] = 1.0f / std::sqrt(total(squares) + KEY_EPS);
        scale(row, row, scales[i] * factor, E);
    }
}
template <class T> static void read_rows(float *into, const T *from, Long stride, Long tokens, Long rows, Long width) {
    Long F = padded(width);
    for (Long i = 0; i < rows; i++)
        for (Long f = 0; f < F; f += LANES) store(into + i * F + f, i < tokens ? some(from + i * stride + f, width - f) : Floats{});
}

static void read_keys(const Rule &call, Long head, Shared &chunk, bool queries) {
    Long width = call.key_width, rows = chunk.rows;
    const float *row = call.qkv + chunk.from * call.channels() + head * width;
    read_unit(chunk.k, chunk.k_scale, row + call.keys(), call.channels(), chunk.tokens, rows, width, 1.0f);
    turn(chunk.k_turned, chunk.k, rows, chunk.E);
    product(chunk.keys_by_keys, CHUNK, rows_of(chunk.k, chunk.E), chunk.k_turned, rows, rows, rows, chunk.E, SET, FULL, true);
    if (!queries) return;
    read_unit(chunk.q, chunk.q_scale, row, call.channels(), chunk.tokens, rows, width, 1.0f / std::sqrt((float)width));
    product(chunk.queries_by_keys, CHUNK, rows_of(chunk.q, chunk.E), chunk.k_turned, rows, rows, rows, chunk.E, SET, FULL, true);
}

// Decays, strengths and values; how much of each token is left at each later one, and the triangular system.
static void read_head(const Rule &call, Long head, const Shared &chunk, Head &own, bool queries) {
    Long rows = chunk.rows;
    float sum = 0.0f;
    for (Long i = 0; i < rows; i++) {
        Long place = (chunk.from + i) * call.value_heads + head;
        if (i < chunk.tokens) sum += call.decay[place];
        own.decayed[i] = sum;
        own.beta[i] = i < chunk.tokens ? call.beta[place] : 0.0f;
    }
    for (Long i = 0; i < rows; i += LANES) {
        store(own.into + i, exponential(loaded(own.decayed + i)));
        store(own.out_of + i, exponential(sum - loaded(own.decayed + i)));
    }
    own.kept = own.into[rows - 1];
    const float *values = call.qkv + chunk.from * call.channels() + 2 * call.keys() + head * call.value_width;
    read_rows(own.v, values, call.channels(), chunk.tokens, rows, call.value_width);
    for (Long i = 0; i < rows; i++)
        for (Long j = 0; j < rows; j += LANES) {
            Long at = i * CHUNK + j;
            int before = int(i - j);  // a token sees itself and those before it
            Floats left = j > i ? Floats{} : exponential(own.decayed[i] - loaded(own.decayed + j));
            left = ORDER <= before ? left : Floats{};
            store(own.left + at, left);
            if (j > i) { store(own.system + at, left); store(own.scores + at, left); continue; }
            Floats others = ORDER < before ? left : Floats{};
            store(own.system + at, others * loaded(chunk.keys_by_keys + at) * own.beta[i]);
            if (queries) store(own.scores + at, left * loaded(chunk.queries_by_keys + at));
        }
}

// What each token writes: of its value, what its key does not find in the state and in the tokens of the chunk before it.
static void write(const Shared &chunk, Head &own, const float *state, bool empty) {
    Long rows = chunk.rows, F = chunk.F;
    if (!empty) product(own.found, F, rows_of(chunk.k, chunk.E), state, F, rows, F, chunk.E, SET);
    for (Long i = 0; i < rows; i++)
        for (Long f = 0; f < F; f += LANES) {
            Floats value = loaded(own.v + i * F + f);
            if (!empty) value -= own.into[i] * loaded(own.found + i * F + f);
            store(own.written + i * F + f, value * own.beta[i]);
        }
    solve(own.system, CHUNK, own.written, rows, F);
}
static void carry(const Shared &chunk, Head &own, float *state, bool empty) {
    Long F = chunk.F;
    for (Long i = 0; i < chunk.rows; i++) scale(own.scaled + i * F, own.written + i * F, own.out_of[i], F);
    if (!empty) for (Long e = 0; e < chunk.E; e++) scale(state + e * F, state + e * F, own.kept, F);
    product(state, F, columns_of(chunk.k, chunk.E), own.scaled, F, chunk.E, F, chunk.rows, empty ? SET : ADD);
}

// What the tokens of a chunk read [rows, F].
static void read_state(const Shared &chunk, const Head &own, const float *written, const float *state, bool empty, float *read) {
    Long rows = chunk.rows, F = chunk.F;
    if (!empty) {
        product(read, F, rows_of(chunk.q, chunk.E), state, F, rows, F, chunk.E, SET);
        for (Long i = 0; i < rows; i++) scale(read + i * F, read + i * F, own.into[i], F);
    }
    product(read, F, rows_of(own.scores, CHUNK), written, F, rows, F, rows, empty ? SET : ADD, LOWER);
}
static inline float norm_scale(const Rule &call, const float *row) {
    return 1.0f / std::sqrt(total(dot(row, row, padded(call.value_width))) / call.value_width + call.eps);
}
template <class T> static void gate_row(const Rule &call, Long at, float *row) {
    float factor = norm_scale(call, row);
    for (Long f = 0; f < call.value_width; f += LANES) {
        Floats z = some((const T *)call.gate + at + f, call.value_width - f), gain = some(call.gain + f, call.value_width - f);
        store(row + f, loaded(row + f) * factor * gain * z * sigmoid(z));
    }
}
// `slope`, of what was gated, becomes that of what was read; columns behind the width stay zero.
template <class T> static void gate_gradient(const Rule &call, Long at, const float *row, float *slope, float *dgain) {
    Long width = call.value_width;
    float factor = norm_scale(call, row);
    Floats along = {};
    for (Long f = 0; f < width; f += LANES) {
        Floats z = some((const T *)call.gate + at + f, width - f), gain = some(call.gain + f, width - f), share = sigmoid(z);
        Floats unit = loaded(row + f) * factor, given = loaded(slope + f), opened = given * z * share;
        put_some((T *)call.dgate + at + f, given * unit * gain * share * (1.0f + z * (1.0f - share)), width - f);
        store(dgain + f, loaded(dgain + f) + opened * unit);
        store(slope + f, opened * gain);
        along += opened * gain * unit;
    }
    float mean = total(along) / width;
    for (Long f = 0; f < width; f += LANES) store(slope + f, (loaded(slope + f) - loaded(row + f) * (factor * mean)) * factor);
}

static Long forward_numbers(const Rule &call, Long) {
    Long E = padded(call.key_width), F = padded(call.value_width);
    return Shared::numbers(E) + Head::numbers(F) + call.group() * E * F + CHUNK * F + 1024;
}
template <class T> static void forward_head(const Rule &call, Long document, Long key_head, Scratch &scratch) {
    scratch.free = scratch.memory;
    Shared chunk(call, scratch);
    Long E = chunk.E, F = chunk.F, group = call.group(), end = call.bounds[document + 1];
    Head own(scratch, F);
    float *states = scratch.take<float>(group * E * F), *read = scratch.take<float>(CHUNK * F);
    bool empty = true;
    for (chunk.from = call.bounds[document]; chunk.from < end; chunk.from += CHUNK, empty = false) {
        chunk.tokens = std::min(CHUNK, end - chunk.from);
        chunk.rows = padded(chunk.tokens);
        read_keys(call, key_head, chunk, true);
        for (Long g = 0; g < group; g++) {
            Long head = key_head * group + g;
            float *state = states + g * E * F;
            read_head(call, head, chunk, own, true);
            write(chunk, own, state, empty);
            read_state(chunk, own, own.written, state, empty, read);
            for (Long i = 0; i < chunk.tokens; i++) {
                Long at = ((chunk.from + i) * call.value_heads + head) * call.value_width;
                if (call.gate) gate_row<T>(call, at, read + i * F);
                put_row((T *)call.out + at, read + i * F, call.value_width, 1);
            }
            if (chunk.from + CHUNK < end) carry(chunk, own, state, empty);
        }
    }
}

// ---- its gradient ---------------------------------------------------------------------------------------------------

// d loss / d x of x / |x|, for what `read_unit` made of x.
template <class T>
static void put_unit_gradient(T *into, const float *unit, const float *slope, float scale, float factor, Long width) {
    float along = total(dot(unit, slope, padded(width)));
    for (Long e = 0; e < width; e += LANES) {
        Floats d = loaded(slope + e) * factor - loaded(unit + e) * (along / factor);
        put_some(into + e, d * scale, width - e);
    }
}

static Long backward_numbers(const Rule &call, Long longest) {
    Long E = padded(call.key_width), F = padded(call.value_width), chunks = (longest + CHUNK - 1) / CHUNK;
    return Shared::numbers(E) + Head::numbers(F) + call.group() * E * F + chunks * call.group() * (E + CHUNK) * F + 4 * CHUNK * F
        + 2 * E * F + 2 * CHUNK * CHUNK + 5 * CHUNK * E + 4096;
}
template <class T> static void backward_head(const Rule &call, Long document, Long key_head, Scratch &scratch) {
    scratch.free = scratch.memory;
    Shared chunk(call, scratch);
    const Long E = chunk.E, F = chunk.F, group = call.group(), heads = call.value_heads;
    const Long begin = call.bounds[document], end = call.bounds[document + 1], chunks = (end - begin + CHUNK - 1) / CHUNK;
    Head own(scratch, F);
    float *dstates = scratch.take<float>(group * E * F);
    float *states = scratch.take<float>(chunks * group * E * F), *all_written = scratch.take<float>(chunks * group * CHUNK * F);
    float *dout = scratch.take<float>(CHUNK * F), *dwritten = scratch.take<float>(CHUNK * F), *turned = scratch.take<float>(CHUNK * F);
    float *read = scratch.take<float>(CHUNK * F), *dgain = scratch.take<float>(F);
    memset(dgain, 0, F * sizeof(float));
    float *state_turned = scratch.take<float>(E * F), *dstate_turned = scratch.take<float>(E * F);
    float *dscores = scratch.take<float>(CHUNK * CHUNK), *dsystem = scratch.take<float>(CHUNK * CHUNK);
    float *dq = scratch.take<float>(CHUNK * E), *dk = scratch.take<float>(CHUNK * E);
    float *as_query = scratch.take<float>(CHUNK * E), *as_row = scratch.take<float>(CHUNK * E), *as_column = scratch.take<float>(CHUNK * E);
    auto place = [&](Long number) {
        chunk.from = begin + number * CHUNK;
        chunk.tokens = std::min(CHUNK, end - chunk.from);
        chunk.rows = padded(chunk.tokens);
    };

    // The states before all chunks, and what their tokens wrote.
    for (Long number = 0; number < chunks; number++) {
        place(number);
        read_keys(call, key_head, chunk, false);
        for (Long g = 0; g < group; g++) {
            float *state = states + (number * group + g) * E * F;
            read_head(call, key_head * group + g, chunk, own, false);
            write(chunk, own, state, number == 0);
            memcpy(all_written + (number * group + g) * CHUNK * F, own.written, chunk.rows * F * sizeof(float));
            if (number + 1 == chunks) continue;
            float *next = state + group * E * F;
            if (number) memcpy(next, state, E * F * sizeof(float));
            carry(chunk, own, next, number == 0);
        }
    }

    for (Long number = chunks - 1; number >= 0; number--) {
        place(number);
        const Long rows = chunk.rows, tokens = chunk.tokens;
        const bool empty = number == 0, last = number + 1 == chunks;  // the state before is zero; no gradient comes from after
        read_keys(call, key_head, chunk, true);
        memset(dk, 0, rows * E * sizeof(float));
        memset(dq, 0, rows * E * sizeof(float));
        for (Long g = 0; g < group; g++) {
            Long head = key_head * group + g;
            const float *state = states + (number * group + g) * E * F, *written = all_written + (number * group + g) * CHUNK * F;
            float *dstate = dstates + g * E * F;
            read_head(call, head, chunk, own, true);
            read_rows(dout, (const T *)call.grad + (chunk.from * heads + head) * call.value_width, heads * call.value_width, tokens,
                      rows, call.value_width);
            if (call.gate) {
                read_state(chunk, own, written, state, empty, read);
                for (Long i = 0; i < tokens; i++)
                    gate_gradient<T>(call, ((chunk.from + i) * heads + head) * call.value_width, read + i * F, dout + i * F, dgain);
            }

            // Back through the outputs and the state after the chunk to what was written, and through the system.
            if (!last) {
                product(dwritten, F, rows_of(chunk.k, E), dstate, F, rows, F, E, SET);
                for (Long i = 0; i < rows; i++) scale(dwritten + i * F, dwritten + i * F, own.out_of[i], F);
            }
            product(dwritten, F, columns_of(own.scores, CHUNK), dout, F, rows, F, rows, last ? SET : ADD, UPPER);
            solve_transposed(own.system, CHUNK, dwritten, rows, F);
            turn(turned, written, rows, F);
            product(dscores, CHUNK, rows_of(dout, F), turned, rows, rows, rows, F, SET, FULL, true);
            product(dsystem, CHUNK, rows_of(dwritten, F), turned, rows, rows, rows, F, SET, FULL, true);
            if (!empty) product(own.found, F, rows_of(chunk.k, E), state, F, rows, F, E, SET);
            float *dvalues = call.dqkv + chunk.from * call.channels() + 2 * call.keys() + head * call.value_width;
            for (Long i = 0; i < rows; i++) {
                Floats strength = {};
                for (Long f = 0; f < F; f += LANES) {
                    Floats value = loaded(own.v + i * F + f);
                    if (!empty) value -= own.into[i] * loaded(own.found + i * F + f);
                    strength += value * loaded(dwritten + i * F + f);
                }
                // Both become gradients of the products of queries with keys, and of keys with keys; zero above the diagonal.
                for (Long j = 0; j < rows; j += LANES) {
                    Long at = i * CHUNK + j;
                    if (j > i) { store(dscores + at, Floats{}); store(dsystem + at, Floats{}); continue; }
                    Floats left = loaded(own.left + at);
                    Floats slope = ORDER < int(i - j) ? -loaded(dsystem + at) * left : Floats{};
                    strength += slope * loaded(chunk.keys_by_keys + at);
                    store(dsystem + at, slope * own.beta[i]);
                    store(dscores + at, ORDER <= int(i - j) ? loaded(dscores + at) * left : Floats{});
                }
                if (i < tokens) {
                    call.dbeta[(chunk.from + i) * heads + head] = total(strength);
                    put_row(dvalues + i * call.channels(), dwritten + i * F, call.value_width, own.beta[i]);
                }
                scale(dwritten + i * F, dwritten + i * F, own.beta[i] * own.into[i], F);  // now of what the key found
            }

            // To queries and keys. A key's part as the row of a sum, where decay makes it smaller, and as a column.
            product(as_query, E, rows_of(dscores, CHUNK), chunk.k, E, rows, E, rows, SET, LOWER);
            product(as_row, E, rows_of(dsystem, CHUNK), chunk.k, E, rows, E, rows, SET, LOWER);
            float end_slope = 0.0f;
            if (!last) {
                turn(dstate_turned, dstate, E, F);
                product(as_column, E, rows_of(written, F), dstate_turned, E, rows, E, F, SET);
                Floats kept = {};
                for (Long i = 0; i < rows; i++) {
                    scale(as_column + i * E, as_column + i * E, own.out_of[i], E);
                    kept += dot(as_column + i * E, chunk.k + i * E, E);
                }
                if (!empty) kept += dot(state, dstate, E * F) * own.kept;
                end_slope = total(kept);
            }
            product(as_column, E, columns_of(dscores, CHUNK), chunk.q, E, rows, E, rows, last ? SET : ADD, UPPER);
            product(as_column, E, columns_of(dsystem, CHUNK), chunk.k, E, rows, E, rows, ADD, UPPER);
            for (Long i = 0; i < rows; i++) scale(dout + i * F, dout + i * F, own.into[i], F);
            if (!empty) {
                turn(state_turned, state, E, F);
                product(as_query, E, rows_of(dout, F), state_turned, E, rows, E, F, ADD);
                product(as_row, E, rows_of(dwritten, F), state_turned, E, rows, E, F, SUBTRACT);
                if (!last) for (Long e = 0; e < E; e++) scale(dstate + e * F, dstate + e * F, own.kept, F);
                product(dstate, F, columns_of(chunk.q, E), dout, F, E, F, rows, last ? SET : ADD);
                product(dstate, F, columns_of(chunk.k, E), dwritten, F, E, F, rows, SUBTRACT);
            }
            float slope = end_slope;
            for (Long i = rows - 1; i >= 0; i--) {
                Floats sum = {};
                for (Long e = 0; e < E; e += LANES) {
                    Long at = i * E + e;
                    Floats row = loaded(as_row + at), column = loaded(as_column + at), query = loaded(as_query + at);
                    sum += query * loaded(chunk.q + at) + (row - column) * loaded(chunk.k + at);
                    store(dq + at, loaded(dq + at) + query);
                    store(dk + at, loaded(dk + at) + row + column);
                }
                if (i >= tokens) continue;
                slope += total(sum);
                call.ddecay[(chunk.from + i) * heads + head] = slope;
            }
        }
        float factor = 1.0f / std::sqrt((float)call.key_width);
        for (Long i = 0; i < tokens; i++) {
            float *row = call.dqkv + (chunk.from + i) * call.channels() + key_head * call.key_width;
            put_unit_gradient(row, chunk.q + i * E, dq + i * E, chunk.q_scale[i], factor, call.key_width);
            put_unit_gradient(row + call.keys(), chunk.k + i * E, dk + i * E, chunk.k_scale[i], 1.0f, call.key_width);
        }
    }
    if (call.gate) put_row(call.dgain + (document * call.key_heads + key_head) * call.value_width, dgain, call.value_width, 1);
}

// The longest documents first, so that no thread begins one when the others end.
template <class Function> static void each_head(const Rule &call, int threads, Long (*numbers)(const Rule &, Long), Function run) {
    std::vector<Long> order(call.documents);
    for (Long i = 0; i < call.documents; i++) order[i] = i;
    auto length = [&](Long document) { return call.bounds[document + 1] - call.bounds[document]; };
    std::stable_sort(order.begin(), order.end(), [&](Long a, Long b) { return length(a) > length(b); });
    Long bytes = numbers(call, length(order[0])) * Long(sizeof(float));
#pragma omp parallel num_threads(threads)
    {
        Scratch scratch(bytes);
#pragma omp for schedule(dynamic, 1)
        for (Long task = 0; task < call.documents * call.key_heads; task++)
            run(call, order[task / call.key_heads], task % call.key_heads, scratch);
    }
}

extern "C" {
void mixers_convolve(const Convolution *call, int half, int threads) {
    half ? convolve<Half>(*call, threads, false) : convolve<float>(*call, threads, false);
}
void mixers_convolve_backward(const Convolution *call, int half, int threads) {
    half ? convolve<Half>(*call, threads, true) : convolve<float>(*call, threads, true);
}
void mixers_delta_rule(const Rule *call, int half, int threads) {
    each_head(*call, threads, forward_numbers, half ? forward_head<Half> : forward_head<float>);
}
void mixers_delta_rule_backward(const Rule *call, int half, int threads) {
    each_head(*call, threads, backward_numbers, half ? backward_head<Half> : backward_head<float>);
}
}
