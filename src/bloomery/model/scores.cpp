// The passes over logits between the matrix products of an output layer: log-sum-exps forward, gradients backward. And
// the gradient of an embedding.
//
// A row is read from memory once and stays in a core's first cache: torch's operators take five passes each way, and
// compiled by torch still one for each row length. `compiled_scores.py` compiles and calls this.

// Adds a tile of logits to each row's log-sum-exp so far; picks the label's logit where the tile has it.
template <class T>
static void add_row(const T *logits, Long columns, Long label, float *sum, float *labelled) {
    Long whole = columns / LANES * LANES;
    Floats top = all(-INFINITY);
    for (Long n = 0; n < whole; n += LANES) { Floats x = widened(logits + n); top = x > top ? x : top; }
    float most = largest(top);
    for (Long n = whole; n < columns; n++) most = std::max(most, widened_one(logits + n));
    Floats sums = {};
    for (Long n = 0; n < whole; n += LANES) sums += exponential(widened(logits + n) - most);
    float here = total(sums);
    for (Long n = whole; n < columns; n++) here += std::exp(widened_one(logits + n) - most);
    here = most + std::log(here);
    // log(e^sum + e^here), where the sum of no tile is minus infinity
    float high = std::max(*sum, here), low = std::min(*sum, here);
    *sum = here != here ? here : low == -INFINITY ? high : high + std::log1p(std::exp(low - high));
    if (label >= 0 && label < columns) *labelled = widened_one(logits + label);
}

// Logits become -grad softmax, that of the label `own`.
template <class T>
static void differentiate_row(T *logits, Long columns, Long label, float sum, float grad, float own) {
    Long whole = columns / LANES * LANES;
    for (Long n = 0; n < whole; n += LANES) put_lanes(logits + n, exponential(widened(logits + n) - sum) * -grad);
    for (Long n = whole; n < columns; n++) put(logits + n, std::exp(widened_one(logits + n) - sum) * -grad);
    if (label >= 0 && label < columns) put(logits + label, own);
}

template <class T>
static void add(const T *logits, Long rows, Long columns, const Long *labels, Long first, float *sums, float *labelled, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Long i = 0; i < rows; i++) add_row(logits + i * columns, columns, labels[i] - first, sums + i, labelled + i);
}
template <class T>
static void differentiate(T *logits, Long rows, Long columns, const Long *labels, Long first, const float *sums, const float *grads,
                          const float *own, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Long i = 0; i < rows; i++)
        differentiate_row(logits + i * columns, columns, labels[i] - first, sums[i], grads[i], own[i]);
}

// Each thread adds its columns of every row in turn: tokens that repeat are added in one order, whatever the threads.
static void add_rows(float *into, const float *rows, const Long *places, Long count, Long width, int threads) {
    Long blocks = (width + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++) {
        Long first = blocks * thread / threads * LANES, end = std::min(width, blocks * (thread + 1) / threads * LANES);
        for (Long i = 0; i < count; i++) {
            float *sum = into + places[i] * width;
            const float *row = rows + i * width;
            for (Long e = first; e < end; e++) sum[e] += row[e];
        }
    }
}

extern "C" {
void rows_add(float *into, const float *rows, const Long *places, Long count, Long width, int threads) {
    add_rows(into, rows, places, count, width, threads);
}
// `first`: the entry of the vocabulary in the first column. `half`: bfloat16 instead of float32.
void scores_add(const void *logits, int half, Long rows, Long columns, const Long *labels, Long first, float *sums, float *labelled,
                int threads) {
    half ? add((const Half *)logits, rows, columns, labels, first, sums, labelled, threads)
         : add((const float *)logits, rows, columns, labels, first, sums, labelled, threads);
}
void scores_differentiate(void *logits, int half, Long rows, Long columns, const Long *labels, Long first, const float *sums,
                          const float *grads, const float *own, int threads) {
    half ? differentiate((Half *)logits, rows, columns, labels, first, sums, grads, own, threads)
         : differentiate((float *)logits, rows, columns, labels, first, sums, grads, own, threads);
}
}
