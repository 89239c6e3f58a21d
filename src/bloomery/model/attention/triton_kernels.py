"""Flash attention as Triton kernels, for GPUs that PyTorch's fused kernels left out. Imports triton: import it late.

Legend: B batch, T time, H query heads, K key heads, E head width. A tile is ROWS queries against KEYS keys. Forward
runs the online softmax over the tiles of its queries (Milakov and Gimelshein, arXiv:1805.02867) and keeps a
log-sum-exp; backward computes each tile again from it (Dao et al., arXiv:2205.14135, algorithm 4), once for the
gradients of queries and once for those of keys and values, so that no two programs add to the same number: equal
inputs give equal bits.

Heads, rows and keys that programs read lie anywhere in memory; the E numbers of a head are neighbors. Sums are
float32. `first` is where each query's document starts in its row, `stop` where it ends: tiles that no document
crosses are never read.
"""

import triton
import triton.language as tl

# exp(x) = exp2(x log2(e)): GPUs have an instruction for exp2
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Their values never change the code: without this, some would be compiled in.
NUMBERS = ("seed_low", "seed_high", "num_dropped", "window")


@triton.jit
def _mixed(bits):
    """A 32-bit hash whose every input bit flips every output bit half of the time (lowbias32 of C. Wellons)."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _is_kept(seed_low, seed_high, head, rows, keys, num_dropped):
    """[ROWS, KEYS], False where dropout takes a share: one bit pattern for each seed, head, row and key.

    `head`: its number in the batch. `num_dropped`: of 2 ** 16.
    """
    of_head = _mixed(_mixed(head.to(tl.uint32) + seed_low.to(tl.uint32)) ^ seed_high.to(tl.uint32))
    of_rows = _mixed(rows.to(tl.uint32) * 0x9E3779B9 + of_head)
    bits = _mixed(of_rows[:, None] + keys.to(tl.uint32)[None, :] * 0x85EBCA6B)
    return (bits >> 16).to(tl.int32) >= num_dropped


@triton.jit
def _is_seen(rows, keys, first, length, window, HAS_WINDOW: tl.constexpr):
    """[ROWS, KEYS], True where the query sees the key. `first` [ROWS]."""
    seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= first[:, None])
    seen = seen & (keys[None, :] < length)
    if HAS_WINDOW:
        seen = seen & (rows[:, None] - keys[None, :] < window)
    return seen


@triton.jit
def _first_keys(
    first_pointer,
    first_row,
    rows,
    window,
    length,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Where the document of each query starts, and the first key of the first tile that one of them sees."""
    first = tl.zeros_like(rows)
    first_key = first_row * 0
    if HAS_DOCUMENTS:
        first = tl.load(first_pointer + rows, mask=rows < length, other=0)
        first_key = tl.load(first_pointer + first_row)
    if HAS_WINDOW:
        first_key = tl.maximum(first_key, first_row - window + 1)
    return first, first_key // KEYS * KEYS


@triton.jit
def _capped(scores, softcap):
    """softcap * tanh(scores / softcap)."""
    exponential = tl.exp2(scores * (2.0 * LOG2_E / softcap))
    return softcap * (1.0 - 2.0 / (exponential + 1.0))


@triton.jit
def _of_head(heads, batch, head):
    """The pointer to a head's first number. `heads`: (pointer, stride of the batch, of a head, of a token)."""
    return heads[0] + batch * heads[1] + head * heads[2]


@triton.jit
def _read(pointer, rows, stride, length, E: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH] of one head: 0 for rows from `length` on, and for columns from E on."""
    columns = tl.arange(0, WIDTH)
    is_inside = (rows[:, None] < length) & (columns[None, :] < E)
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=is_inside, other=0.0)


@triton.jit
def _columns(pointer, rows, stride, length, first_column, E: tl.constexpr, COLUMNS: tl.constexpr):
    """[rows, COLUMNS] of one head, from `first_column` on: 0 for rows from `length` on, and for columns from E on."""
    columns = first_column + tl.arange(0, COLUMNS)
    is_inside = (rows[:, None] < length) & (columns[None, :] < E)
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=is_inside, other=0.0)


@triton.jit
def _operand(
    pointer, rows, stride, length, E: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """Rows of one head for `_products`: [rows, WIDTH], or where they are read in parts, where they lie."""
    operand = pointer, rows, stride
    if COLUMNS == WIDTH:
        operand = _read(pointer, rows, stride, length, E, WIDTH)
    return operand


@triton.jit
def _products(
    a, b, length, num_dropped, E: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """[rows of a, rows of b], the products of two `_operand`s.

    With vector instructions a thread holds whole rows of both. Wide ones do not fit into its registers: then COLUMNS
    are read at a time, those of the queries again for each tile.
    """
    if COLUMNS == WIDTH:
        products = tl.dot(a, tl.trans(b), input_precision="ieee")
    else:
        products = tl.zeros((a[1].shape[0], b[1].shape[0]), tl.float32)
        # `num_dropped` is at most 2 ** 16. The compiler, which cannot know it, would unroll a loop of known length, and
        # all its columns would be in registers again.
        for first_column in range(0, WIDTH + (num_dropped >> 30), COLUMNS):
            a_part = _columns(a[0], a[1], a[2], length, first_column, E, COLUMNS)
            b_part = _columns(b[0], b[1], b[2], length, first_column, E, COLUMNS)
            products += tl.dot(a_part, tl.trans(b_part), input_precision="ieee")
    return products


@triton.jit
def _write(
    pointer,
    values,
    rows,
    stride,
    length,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
):
    columns = tl.arange(0, WIDTH)
    is_inside = (rows[:, None] < length) & (columns[None, :] < E)
    target = pointer + rows[:, None] * stride + columns[None, :]
    tl.store(target, values.to(pointer.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=NUMBERS)
def forward(
    q_heads,
    k_heads,
    v_heads,
    out_heads,
    sums_pointer,
    first_pointer,
    seed_low,
    seed_high,
    scale,
    softcap,
    boost,
    num_dropped,
    window,
    length,
    num_heads,
    heads_per_key,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The output [B, H, T, E] and the log-sum-exp [B, H, T] of ROWS queries of one head."""
    first_row = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    batch = (head // num_heads).to(tl.int64)
    head_of_row = (head % num_heads).to(tl.int64)
    key_head = head_of_row // heads_per_key
    rows = first_row + tl.arange(0, ROWS)
    q_pointer = _of_head(q_heads, batch, head_of_row)
    q = _operand(q_pointer, rows, q_heads[3], length, E, WIDTH, COLUMNS)
    k_pointer = _of_head(k_heads, batch, key_head)
    v_pointer = _of_head(v_heads, batch, key_head)

    # 1. From which key on: the first query's document starts first, as documents lie in order.
    first, first_key = _first_keys(
        first_pointer + batch * length,
        first_row,
        rows,
        window,
        length,
        HAS_DOCUMENTS,
        HAS_WINDOW,
        KEYS,
    )

    # 2. Online softmax: shares are relative to the largest score so far, and sums are scaled down when a larger one
    # comes.
    max_score = tl.full((ROWS,), float("-inf"), tl.float32)
    share_sum = tl.zeros((ROWS,), tl.float32)
    value_sum = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile_key in range(first_key, tl.minimum(first_row + ROWS, length), KEYS):
        keys = tile_key + tl.arange(0, KEYS)
        k = _operand(k_pointer, keys, k_heads[3], length, E, WIDTH, COLUMNS)
        scores = _products(q, k, length, num_dropped, E, WIDTH, COLUMNS) * scale
        if HAS_SOFTCAP:
            scores = _capped(scores, softcap)
        is_seen = _is_seen(rows, keys, first, length, window, HAS_WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max_score = tl.maximum(max_score, tl.max(scores, 1))
        # A query that has seen no key yet has no largest score; its shares stay 0.
        base = tl.where(new_max_score == float("-inf"), 0.0, new_max_score)
        shares = tl.exp2((scores - base[:, None]) * LOG2_E)
        scale_down = tl.exp2((max_score - base) * LOG2_E)
        share_sum = share_sum * scale_down + tl.sum(shares, 1)
        # Dropped shares still count in the softmax's sum.
        if HAS_DROPOUT:
            is_kept = _is_kept(seed_low, seed_high, head, rows, keys, num_dropped)
            shares = tl.where(is_kept, shares, 0.0)
        v = _read(v_pointer, keys, v_heads[3], length, E, WIDTH)
        value_sum = value_sum * scale_down[:, None]
        value_sum += tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        max_score = new_max_score

    out_pointer = _of_head(out_heads, batch, head_of_row)
    _write(
        out_pointer, value_sum * (boost / share_sum)[:, None], rows, out_heads[3], length, E, WIDTH
    )
    sums = max_score + tl.log2(share_sum) * LN_2
    tl.store(sums_pointer + head.to(tl.int64) * length + rows, sums, mask=rows < length)


@triton.jit
def _score_gradients(
    q,
    k,
    v,
    d_out,
    sums,
    delta,
    rows,
    keys,
    first,
    head,
    seed_low,
    seed_high,
    scale,
    softcap,
    boost,
    num_dropped,
    window,
    length,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of one tile: the shares that met values, times `boost`, and the gradients of the scaled scores [ROWS, KEYS]."""
    scores = _products(q, k, length, num_dropped, E, WIDTH, COLUMNS) * scale
    if HAS_SOFTCAP:
        scores = _capped(scores, softcap)
    is_seen = _is_seen(rows, keys, first, length, window, HAS_WINDOW)
    shares = tl.where(is_seen, tl.exp2((scores - sums[:, None]) * LOG2_E), 0.0)
    d_shares = _products(d_out, v, length, num_dropped, E, WIDTH, COLUMNS)
    kept_shares = shares
    if HAS_DROPOUT:
        is_kept = _is_kept(seed_low, seed_high, head, rows, keys, num_dropped)
        kept_shares = tl.where(is_kept, shares * boost, 0.0)
        d_shares = tl.where(is_kept, d_shares * boost, 0.0)
    d_scores = shares * (d_shares - delta[:, None])
    if HAS_SOFTCAP:
        slope = 1.0 - (scores / softcap) * (scores / softcap)
        d_scores = tl.where(is_seen, d_scores * slope, 0.0)
    return kept_shares, d_scores


@triton.jit(do_not_specialize=NUMBERS)
def backward_q(
    q_heads,
    k_heads,
    v_heads,
    out_heads,
    d_out_heads,
    dq_heads,
    sums_pointer,
    delta_pointer,
    first_pointer,
    seed_low,
    seed_high,
    scale,
    softcap,
    boost,
    num_dropped,
    window,
    length,
    num_heads,
    heads_per_key,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The gradient of ROWS queries of one head, and `delta` [B, H, T], their sums of d_out * out, for `backward_kv`."""
    first_row = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    batch = (head // num_heads).to(tl.int64)
    head_of_row = (head % num_heads).to(tl.int64)
    key_head = head_of_row // heads_per_key
    rows = first_row + tl.arange(0, ROWS)
    q_pointer = _of_head(q_heads, batch, head_of_row)
    d_out_pointer = _of_head(d_out_heads, batch, head_of_row)
    out_pointer = _of_head(out_heads, batch, head_of_row)
    q = _operand(q_pointer, rows, q_heads[3], length, E, WIDTH, COLUMNS)
    d_out = _operand(d_out_pointer, rows, d_out_heads[3], length, E, WIDTH, COLUMNS)
    out = _operand(out_pointer, rows, out_heads[3], length, E, WIDTH, COLUMNS)
    k_pointer = _of_head(k_heads, batch, key_head)
    v_pointer = _of_head(v_heads, batch, key_head)
    row_numbers = head.to(tl.int64) * length + rows
    sums = tl.load(sums_pointer + row_numbers, mask=rows < length, other=0.0)
    if COLUMNS == WIDTH:
        delta = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
    else:
        delta = tl.zeros((ROWS,), tl.float32)
        for first_column in range(0, WIDTH + (num_dropped >> 30), COLUMNS):
            d_out_part = _columns(
                d_out_pointer, rows, d_out_heads[3], length, first_column, E, COLUMNS
            )
            out_part = _columns(out_pointer, rows, out_heads[3], length, first_column, E, COLUMNS)
            delta += tl.sum(d_out_part.to(tl.float32) * out_part.to(tl.float32), 1)
    tl.store(delta_pointer + row_numbers, delta, mask=rows < length)

    first, first_key = _first_keys(
        first_pointer + batch * length,
        first_row,
        rows,
        window,
        length,
        HAS_DOCUMENTS,
        HAS_WINDOW,
        KEYS,
    )

    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile_key in range(first_key, tl.minimum(first_row + ROWS, length), KEYS):
        keys = tile_key + tl.arange(0, KEYS)
        k = _operand(k_pointer, keys, k_heads[3], length, E, WIDTH, COLUMNS)
        v = _operand(v_pointer, keys, v_heads[3], length, E, WIDTH, COLUMNS)
        _, d_scores = _score_gradients(
            q,
            k,
            v,
            d_out,
            sums,
            delta,
            rows,
            keys,
            first,
            head,
            seed_low,
            seed_high,
            scale,
            softcap,
            boost,
            num_dropped,
            window,
            length,
            HAS_WINDOW,
            HAS_SOFTCAP,
            HAS_DROPOUT,
            E,
            WIDTH,
            COLUMNS,
        )
        if COLUMNS != WIDTH:
            k = _read(k_pointer, keys, k_heads[3], length, E, WIDTH)
        dq += tl.dot(d_scores.to(k.dtype), k, input_precision="ieee")
    dq_pointer = _of_head(dq_heads, batch, head_of_row)
    _write(dq_pointer, dq * scale, rows, dq_heads[3], length, E, WIDTH)


@triton.jit(do_not_specialize=NUMBERS)
def backward_kv(
    q_heads,
    k_heads,
    v_heads,
    d_out_heads,
    dk_heads,
    dv_heads,
    sums_pointer,
    delta_pointer,
    first_pointer,
    stop_pointer,
    seed_low,
    seed_high,
    scale,
    softcap,
    boost,
    num_dropped,
    window,
    length,
    num_key_heads,
    heads_per_key,
    HAS_DOCUMENTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The gradients of KEYS keys and values of one key head, from all query heads that share it."""
    first_key = tl.program_id(0) * KEYS
    batch = (tl.program_id(1) // num_key_heads).to(tl.int64)
    key_head = (tl.program_id(1) % num_key_heads).to(tl.int64)
    keys = first_key + tl.arange(0, KEYS)
    k_pointer = _of_head(k_heads, batch, key_head)
    v_pointer = _of_head(v_heads, batch, key_head)
    k = _operand(k_pointer, keys, k_heads[3], length, E, WIDTH, COLUMNS)
    v = _operand(v_pointer, keys, v_heads[3], length, E, WIDTH, COLUMNS)

    # Up to which query: the last key's document ends last.
    stop_row = first_key * 0 + length
    if HAS_DOCUMENTS:
        first_pointer += batch * length
        stop_row = tl.load(stop_pointer + batch * length + tl.minimum(first_key + KEYS, length) - 1)
    if HAS_WINDOW:
        stop_row = tl.minimum(stop_row, first_key + KEYS - 1 + window)

    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    for member in range(heads_per_key):
        head_of_row = key_head * heads_per_key + member
        head = (batch * num_key_heads * heads_per_key + head_of_row).to(tl.int32)
        q_pointer = _of_head(q_heads, batch, head_of_row)
        d_out_pointer = _of_head(d_out_heads, batch, head_of_row)
        for tile_row in range(first_key // ROWS * ROWS, stop_row, ROWS):
            rows = tile_row + tl.arange(0, ROWS)
            q = _operand(q_pointer, rows, q_heads[3], length, E, WIDTH, COLUMNS)
            d_out = _operand(d_out_pointer, rows, d_out_heads[3], length, E, WIDTH, COLUMNS)
            row_numbers = head.to(tl.int64) * length + rows
            sums = tl.load(sums_pointer + row_numbers, mask=rows < length, other=0.0)
            delta = tl.load(delta_pointer + row_numbers, mask=rows < length, other=0.0)
            first = tl.zeros((ROWS,), tl.int32)
            if HAS_DOCUMENTS:
                first = tl.load(first_pointer + rows, mask=rows < length, other=0)
            kept_shares, d_scores = _score_gradients(
                q,
                k,
                v,
                d_out,
                sums,
                delta,
                rows,
                keys,
                first,
                head,
                seed_low,
                seed_high,
                scale,
                softcap,
                boost,
                num_dropped,
                window,
                length,
                HAS_WINDOW,
                HAS_SOFTCAP,
                HAS_DROPOUT,
                E,
                WIDTH,
                COLUMNS,
            )
            if COLUMNS != WIDTH:
                d_out = _read(d_out_pointer, rows, d_out_heads[3], length, E, WIDTH)
            dv += tl.dot(tl.trans(kept_shares.to(d_out.dtype)), d_out, input_precision="ieee")
            if COLUMNS != WIDTH:
                q = _read(q_pointer, rows, q_heads[3], length, E, WIDTH)
            dk += tl.dot(tl.trans(d_scores.to(q.dtype)), q, input_precision="ieee")
    _write(_of_head(dk_heads, batch, key_head), dk * scale, keys, dk_heads[3], length, E, WIDTH)
    _write(_of_head(dv_heads, batch, key_head), dv, keys, dv_heads[3], length, E, WIDTH)


@triton.jit(do_not_specialize=("num_keys", "num_splits"))
def decode(
    q_heads,
    k_heads,
    v_heads,
    out_pointer,
    sums_pointer,
    counts_pointer,
    scale,
    softcap,
    num_keys,
    num_splits,
    num_key_heads,
    heads_per_key,
    HAS_COUNTS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One new token of each text: what ROWS heads of a key head see in SPLIT keys of a cache.

    Writes [B, H, splits, E] float32, the softmax within the split, and its log-sum-exp [B, H, splits]. `counts` [B]:
    the keys that the text's token sees.
    """
    split = tl.program_id(0)
    batch = (tl.program_id(2) // num_key_heads).to(tl.int64)
    key_head = (tl.program_id(2) % num_key_heads).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first_head = key_head * heads_per_key
    q = _read(_of_head(q_heads, batch, first_head), heads, q_heads[2], heads_per_key, E, WIDTH)
    k_pointer = _of_head(k_heads, batch, key_head)
    v_pointer = _of_head(v_heads, batch, key_head)
    stop = num_keys
    if HAS_COUNTS:
        stop = tl.load(counts_pointer + batch)

    max_score = tl.full((ROWS,), float("-inf"), tl.float32)
    share_sum = tl.zeros((ROWS,), tl.float32)
    value_sum = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile_key in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, stop), KEYS):
        keys = tile_key + tl.arange(0, KEYS)
        k = _read(k_pointer, keys, k_heads[3], stop, E, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = _capped(scores, softcap)
        scores = tl.where(keys[None, :] < stop, scores, float("-inf"))
        # A tile of the loop has at least one key, so that no largest score is minus infinity.
        new_max_score = tl.maximum(max_score, tl.max(scores, 1))
        shares = tl.exp2((scores - new_max_score[:, None]) * LOG2_E)
        scale_down = tl.exp2((max_score - new_max_score) * LOG2_E)
        share_sum = share_sum * scale_down + tl.sum(shares, 1)
        v = _read(v_pointer, keys, v_heads[3], stop, E, WIDTH)
        value_sum = value_sum * scale_down[:, None]
        value_sum += tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        max_score = new_max_score

    # A split behind a text's end has seen nothing: its log-sum-exp, minus infinity, gives it no share.
    part = (batch * num_key_heads * heads_per_key + first_head) * num_splits + split
    average = value_sum / tl.where(share_sum == 0.0, 1.0, share_sum)[:, None]
    _write(out_pointer + part * E, average, heads, num_splits * E, heads_per_key, E, WIDTH)
    sums = max_score + tl.log2(share_sum) * LN_2
    tl.store(sums_pointer + part + heads * num_splits, sums, mask=heads < heads_per_key)
