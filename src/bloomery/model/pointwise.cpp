// What stands between the matrix products of a block, in one pass each way: RMS norms, SiLU times the other factor of an
// MLP, and the same of experts, times the weights of a router.
//
// Numbers are float32 or bfloat16, everything between them is float32. Backward computes again what forward did not keep.
// Whatever the number of threads, one task computes the same rows in the same order: results are the same to the bit.
// `compiled_pointwise.py` compiles and calls this.

constexpr Long ROWS = 64;  // of a task, whose gradient of the gain is summed by itself

// ---- RMS norm -------------------------------------------------------------------------------------------------------

struct Normed {
    const void *x, *grad;  // [rows, width], of the input and of the result
    const float *gain;     // [width]
    float *scales;         // [rows]: 1 / sqrt(mean(x^2) + eps)
    void *out, *dx;
    float *dgain;          // [tasks, width]; null: the gain is not trained
    Long rows, width;
    float eps;
};

template <class X, class Y> static void norm_row(const Normed &call, Long row) {
    const X *x = (const X *)call.x + row * call.width;
    Y *out = (Y *)call.out + row * call.width;
    Floats squares = {};
    for (Long e = 0; e < call.width; e += LANES) {
        Floats number = some(x + e, call.width - e);
        squares += number * number;
    }
    float scale = call.scales[row] = 1.0f / std::sqrt(total(squares) / call.width + call.eps);
    for (Long e = 0; e < call.width; e += LANES) {
        Long count = call.width - e;
        put_some(out + e, some(x + e, count) * scale * some(call.gain + e, count), count);
    }
}

template <class X, class Y> static void differentiate_norm_row(const Normed &call, Long row, float *dgain) {
    const X *x = (const X *)call.x + row * call.width;
    const Y *grad = (const Y *)call.grad + row * call.width;
    X *dx = (X *)call.dx + row * call.width;
    float scale = call.scales[row];
    Floats along = {};
    for (Long e = 0; e < call.width; e += LANES) {
        Long count = call.width - e;
        Floats slope = some(grad + e, count) * (some(x + e, count) * scale);
        along += slope * some(call.gain + e, count);
        if (dgain) put_some(dgain + e, some(dgain + e, count) + slope, count);
    }
    float mean = total(along) / call.width;
    for (Long e = 0; e < call.width; e += LANES) {
        Long count = call.width - e;
        Floats slope = some(grad + e, count) * some(call.gain + e, count);
        put_some(dx + e, (slope - some(x + e, count) * (scale * mean)) * scale, count);
    }
}

template <class X, class Y> static void norm(const Normed &call, int threads, bool backward) {
    Long tasks = (call.rows + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Long task = 0; task < tasks; task++) {
        float *dgain = backward && call.dgain ? call.dgain + task * call.width : nullptr;
        if (dgain) memset(dgain, 0, call.width * sizeof(float));
        for (Long row = task * ROWS; row < std::min(call.rows, (task + 1) * ROWS); row++)
            backward ? differentiate_norm_row<X, Y>(call, row, dgain) : norm_row<X, Y>(call, row);
    }
}
static void norm(const Normed &call, int x_is_half, int out_is_half, int threads, bool backward) {
    if (x_is_half) out_is_half ? norm<Half, Half>(call, threads, backward) : norm<Half, float>(call, threads, backward);
    else out_is_half ? norm<float, Half>(call, threads, backward) : norm<float, float>(call, threads, backward);
}

// ---- SiLU times up --------------------------------------------------------------------------------------------------

struct Gated {
    const void *gate, *up, *grad;  // [count]
    void *out, *dgate, *dup;
    Long count;
};

template <class T> static void gate_piece(const Gated &call, Long from, Long end) {
    for (Long n = from; n < end; n += LANES) {
        Long count = end - n;
        Floats gate = some((const T *)call.gate + n, count);
        put_some((T *)call.out + n, gate * sigmoid(gate) * some((const T *)call.up + n, count), count);
    }
}
template <class T> static void differentiate_gate_piece(const Gated &call, Long from, Long end) {
    for (Long n = from; n < end; n += LANES) {
        Long count = end - n;
        Floats gate = some((const T *)call.gate + n, count), grad = some((const T *)call.grad + n, count);
        Floats share = sigmoid(gate), up = some((const T *)call.up + n, count);
        put_some((T *)call.dup + n, grad * gate * share, count);
        put_some((T *)call.dgate + n, grad * up * share * (1.0f + gate * (1.0f - share)), count);
    }
}
template <class T> static void gate(const Gated &call, int threads, bool backward) {
    constexpr Long PIECE = 4096;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Long from = 0; from < call.count; from += PIECE) {
        Long end = std::min(call.count, from + PIECE);
        backward ? differentiate_gate_piece<T>(call, from, end) : gate_piece<T>(call, from, end);
    }
}

// ---- Gates of experts -----------------------------------------------------------------------------------------------

// gate sigmoid(slope gate) (up + offset) weight, gate and up no larger than the limit, as in gpt-oss; SiLU times up has
// slope 1, offset 0 and no limit.
struct Weighted {
    const void *x, *grad;  // [rows, 2 width]: gate, then up; [rows, width]
    const float *weights;  // [rows]
    void *out, *dx;
    float *dweights;       // [rows]
    Long rows, width;
    float limit, slope, offset;
};

template <class T> static void weigh_row(const Weighted &call, Long row) {
    const T *gates = (const T *)call.x + row * 2 * call.width, *ups = gates + call.width;
    T *out = (T *)call.out + row * call.width;
    const Floats limit = all(call.limit);
    for (Long e = 0; e < call.width; e += LANES) {
        Long count = call.width - e;
        Floats gate = some(gates + e, count), up = some(ups + e, count);
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        put_some(out + e, gate * sigmoid(call.slope * gate) * (up + call.offset) * call.weights[row], count);
    }
}
template <class T> static void differentiate_weighed_row(const Weighted &call, Long row) {
    const T *gates = (const T *)call.x + row * 2 * call.width, *ups = gates + call.width;
    const T *grads = (const T *)call.grad + row * call.width;
    T *dgates = (T *)call.dx + row * 2 * call.width, *dups = dgates + call.width;
    const Floats limit = all(call.limit), zero = {};
    Floats along = {};
    for (Long e = 0; e < call.width; e += LANES) {
        Long count = call.width - e;
        Floats raw_gate = some(gates + e, count), raw_up = some(ups + e, count), grad = some(grads + e, count);
        Floats gate = raw_gate > limit ? limit : raw_gate;
        Floats up = raw_up > limit ? limit : raw_up < -limit ? -limit : raw_up;
        Floats share = sigmoid(call.slope * gate), opened = gate * share;
        up += call.offset;
        along += grad * opened * up;
        grad *= call.weights[row];
        Floats dgate = grad * up * share * (1.0f + call.slope * gate * (1.0f - share));
        put_some(dgates + e, raw_gate > limit ? zero : dgate, count);
        put_some(dups + e, raw_up > limit ? zero : raw_up < -limit ? zero : grad * opened, count);
    }
    call.dweights[row] = total(along);
}
template <class T> static void weigh(const Weighted &call, int threads, bool backward) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Long row = 0; row < call.rows; row++)
        backward ? differentiate_weighed_row<T>(call, row) : weigh_row<T>(call, row);
}

extern "C" {
void pointwise_norm(const Normed *call, int x_is_half, int out_is_half, int threads) {
    norm(*call, x_is_half, out_is_half, threads, false);
}
void pointwise_norm_backward(const Normed *call, int x_is_half, int out_is_half, int threads) {
    norm(*call, x_is_half, out_is_half, threads, true);
}
void pointwise_gate(const Gated *call, int half, int threads) {
    half ? gate<Half>(*call, threads, false) : gate<float>(*call, threads, false);
}
void pointwise_gate_backward(const Gated *call, int half, int threads) {
    half ? gate<Half>(*call, threads, true) : gate<float>(*call, threads, true);
}
void pointwise_weigh(const Weighted *call, int half, int threads) {
    half ? weigh<Half>(*call, threads, false) : weigh<float>(*call, threads, false);
}
void pointwise_weigh_backward(const Weighted *call, int half, int threads) {
    half ? weigh<Half>(*call, threads, true) : weigh<float>(*call, threads, true);
}
}
