"""Prefill attention: ragged chunks of queries over paged keys and this step's own keys, flash-style.

A program holds BLOCK_M rows: BLOCK_M / BLOCK_G neighbouring tokens of one sequence times the query heads of one kv
head, so that a tile of keys serves the whole group. The first block of sequence s has number cu_seqlens_q[s] // tokens
+ s, an upper bound: the grid follows from host numbers alone, and blocks past their sequence's end leave at once.

A NaN key or value of a sequence may reach earlier queries of the same sequence (0 * NaN), never another sequence.
"""

import triton
import triton.language as tl

from gewell_kernels.attention_decode import load_turning, look_up_pages, softmax_step, stored_rows


@triton.jit
def _block_of_program(
    cu_seqlens_q_ptr, kv_lens_ptr, block, first_seq, num_seqs, BLOCK_TOKENS: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Sequence of a block, its first query's index in the step, the block's first query in it, q_len, kv_len."""
    offs_s = first_seq + tl.arange(0, BLOCK_S)
    base = tl.load(cu_seqlens_q_ptr + first_seq)
    starts = tl.load(cu_seqlens_q_ptr + offs_s, mask=offs_s < num_seqs, other=0) - base
    bounds = starts // BLOCK_TOKENS + (offs_s - first_seq)
    seq = first_seq + tl.sum(((bounds <= block) & (offs_s < num_seqs)).to(tl.int32), axis=0) - 1
    seq_start = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - seq_start
    first_query = (block - ((seq_start - base) // BLOCK_TOKENS + seq - first_seq)) * BLOCK_TOKENS
    return seq, seq_start, first_query, q_len, tl.load(kv_lens_ptr + seq)


@triton.jit(do_not_specialize=["table_stride_s", "first_seq", "num_seqs"])
def prefill_plain_kernel(
    q_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM] contiguous
    k_new_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM] contiguous, likewise v_new; HAS_NEW
    v_new_ptr,
    pages_ptr,
    page_table_ptr,
    table_start_ptr,
    kv_lens_ptr,
    cu_seqlens_q_ptr,
    visible_end_ptr,  # HAS_VISIBLE_END
    out_ptr,  # as q
    page_stride,  # elements
    table_stride_s,
    layer_offset,
    first_seq,  # sequences before it are decoded elsewhere
    num_seqs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,  # power of two >= GROUP
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    HAS_NEW: tl.constexpr,
    HAS_VISIBLE_END: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ONE_PAGE: tl.constexpr,  # no tile straddles a page
    STAGES: tl.constexpr,
):
    """out = softmax(q k^T + mask) v; softmax in float32, weights rounded to q's dtype; no key seen: 0."""
    LOG2E: tl.constexpr = 1.4426950408889634
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // BLOCK_G
    head = tl.program_id(1)
    # Late blocks see more keys: they start first, so that no long program is left over at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    seq, seq_start, first_query, q_len, kv_len = _block_of_program(
        cu_seqlens_q_ptr, kv_lens_ptr, block, first_seq, num_seqs, BLOCK_TOKENS, BLOCK_S
    )
    if first_query >= q_len:
        return

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    query = first_query + offs_m // BLOCK_G
    mask_m = (query < q_len) & (offs_m % BLOCK_G < GROUP)
    token = (seq_start + query).to(tl.int64)
    q_rows = (token * NUM_KV_HEADS + head) * GROUP + offs_m % BLOCK_G
    q_offs = q_rows[:, None] * HEAD_DIM + offs_d[None, :]
    q = tl.load(q_ptr + q_offs, mask=mask_m[:, None], other=0.0)

    chunk_start = kv_len - q_len  # position of the sequence's first query
    position = chunk_start + query
    if HAS_VISIBLE_END:
        seen_end = tl.load(visible_end_ptr + token, mask=mask_m, other=0)
    else:
        seen_end = tl.where(mask_m, position + 1, 0)
    table_start = tl.load(table_start_ptr + seq)
    oldest = tl.maximum(chunk_start + first_query + 1 - WINDOW, table_start) if WINDOW > 0 else table_start
    newest = tl.max(seen_end, axis=0)
    split = tl.minimum(chunk_start, newest) if HAS_NEW else newest

    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)

    table_row_ptr = page_table_ptr + seq.to(tl.int64) * table_stride_s
    # Tiles start at a page's edge, at or before the oldest key that the block's first query sees.
    begin = (oldest - table_start) // PAGE_TOKENS * PAGE_TOKENS
    limit = split - table_start
    page_ids = look_up_pages(table_row_ptr, begin, limit, offs_n, PAGE_TOKENS, ONE_PAGE)
    for relative in tl.range(begin, limit, BLOCK_N, num_stages=STAGES):
        keys = table_start + relative + offs_n
        valid = (keys >= oldest) & (keys < split)
        row_ptrs = stored_rows(
            pages_ptr, page_ids, relative, offs_n, head, page_stride, layer_offset, PAGE_TOKENS, HEAD_DIM, ONE_PAGE
        )
        page_ids = look_up_pages(table_row_ptr, relative + BLOCK_N, limit, offs_n, PAGE_TOKENS, ONE_PAGE)
        k_ptrs = row_ptrs[:, None] + offs_d[None, :]
        k = tl.load(k_ptrs, mask=valid[:, None], other=0.0).to(q.dtype)
        v_ptrs = k_ptrs + NUM_KV_HEADS * PAGE_TOKENS * HEAD_DIM
        v = tl.load(v_ptrs, mask=valid[:, None], other=0.0).to(q.dtype)
        seen = valid[None, :] & (keys[None, :] < seen_end[:, None])
        if WINDOW > 0:
            seen &= keys[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * LOG2E, float("-inf"))
        row_max, weights, scale = softmax_step(scores, row_max)
        row_sum = row_sum * scale + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), v, acc * scale[:, None], input_precision="ieee")

    if HAS_NEW:
        # The step's own keys lie in one piece, from the sequence's first query on.
        begin = tl.maximum(oldest - chunk_start, 0)
        for key in tl.range(begin // BLOCK_N * BLOCK_N, newest - chunk_start, BLOCK_N, num_stages=STAGES):
            keys = key + offs_n
            valid = keys < newest - chunk_start
            rows = ((seq_start + keys).to(tl.int64) * NUM_KV_HEADS + head) * HEAD_DIM
            k_ptrs = k_new_ptr + rows[:, None] + offs_d[None, :]
            v_ptrs = v_new_ptr + rows[:, None] + offs_d[None, :]
            k = tl.load(k_ptrs, mask=valid[:, None], other=0.0).to(q.dtype)
            v = tl.load(v_ptrs, mask=valid[:, None], other=0.0).to(q.dtype)
            seen = valid[None, :] & (keys[None, :] < seen_end[:, None] - chunk_start)
            if WINDOW > 0:
                seen &= keys[None, :] > query[:, None] - WINDOW
            scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * LOG2E, float("-inf"))
            row_max, weights, scale = softmax_step(scores, row_max)
            row_sum = row_sum * scale + tl.sum(weights, axis=1)
            acc = tl.dot(weights.to(q.dtype), v, acc * scale[:, None], input_precision="ieee")

    out = acc / tl.where(row_max == float("-inf"), 1.0, row_sum)[:, None]
    tl.store(out_ptr + q_offs, out.to(out_ptr.dtype.element_ty), mask=mask_m[:, None])


@triton.jit(do_not_specialize=["table_stride_s", "first_seq", "max_keys"])
def rotate_keys_kernel(
    pages_ptr,
    page_table_ptr,
    table_start_ptr,
    kv_lens_ptr,
    k_weight_ptr,
    rotary_ptr,
    rotated_ptr,  # [sequences from first_seq on, NUM_KV_HEADS, max_keys, 2 * NUM_LIVE] contiguous
    page_stride,  # elements
    table_stride_s,
    layer_offset,
    first_seq,
    max_keys,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_LIVE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """rotated[s, h, j] = the turning dims of the key at table_start[s] + j, rebuilt from V and rounded to its dtype.

    Done once a chunk: rotating in the attention kernel would repeat it for every block of queries (H200, 8192 tokens of
    the 31B: 12.1 ms a layer against 8.2 ms with rotated keys at hand). Grid: (tiles, kv heads, sequences).
    """
    seq = first_seq + tl.program_id(2)
    head = tl.program_id(1)
    table_start = tl.load(table_start_ptr + seq)
    first = tl.program_id(0) * BLOCK_N
    limit = tl.load(kv_lens_ptr + seq) - table_start
    if first < limit:
        offs_n = tl.arange(0, BLOCK_N)
        offs_i = tl.arange(0, NUM_LIVE)
        valid = first + offs_n < limit
        table_row_ptr = page_table_ptr + seq.to(tl.int64) * table_stride_s
        page_ids = look_up_pages(table_row_ptr, first, limit, offs_n, PAGE_TOKENS, ONE_PAGE)
        row_ptrs = stored_rows(
            pages_ptr, page_ids, first, offs_n, head, page_stride, layer_offset, PAGE_TOKENS, HEAD_DIM, ONE_PAGE
        )
        w_a = tl.load(k_weight_ptr + offs_i)
        w_b = tl.load(k_weight_ptr + HEAD_DIM // 2 + offs_i)
        _, _, k_a, k_b = load_turning(
            row_ptrs, valid, table_start + first + offs_n, rotary_ptr, w_a, w_b, rotated_ptr.dtype.element_ty,
            NUM_LIVE, HEAD_DIM, True,
        )  # fmt: skip
        rows = (tl.program_id(2).to(tl.int64) * NUM_KV_HEADS + head) * max_keys + first + offs_n
        ptrs = rotated_ptr + rows[:, None] * (2 * NUM_LIVE) + offs_i[None, :]
        tl.store(ptrs, k_a, mask=valid[:, None])
        tl.store(ptrs + NUM_LIVE, k_b, mask=valid[:, None])


@triton.jit
def _shared_tile(
    relative,  # first key of the tile, from the table's start
    page_ids,
    oldest,  # keys before it are not read; from the table's start, as `newest`
    newest,
    seen_start,  # [BLOCK_M] likewise: a query sees keys [seen_start, seen_end)
    seen_end,
    q_a, q_b, q_c, q_d,
    row_max, row_sum, acc_a, acc_b, acc_c, acc_d,
    pages_ptr,
    rotated_ptr,  # of the sequence and head; KEYS == "rotated"
    rotary_ptr,
    w_a, w_b,
    table_start,
    head,
    page_stride,
    layer_offset,
    NUM_LIVE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW_ELEMS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    MASKED: tl.constexpr,  # False: every query of the block sees every key of the tile
):  # fmt: skip
    """One tile of keys and values: the new running maximum, sum and accumulators."""
    LOG2E: tl.constexpr = 1.4426950408889634
    offs_n = tl.arange(0, BLOCK_N)
    offs_i = tl.arange(0, NUM_LIVE)
    offs_c = tl.arange(0, 2 * NUM_LIVE)
    offs_d = tl.arange(0, 4 * NUM_LIVE)
    keys = relative + offs_n
    valid = (keys >= oldest) & (keys < newest) if MASKED else keys >= 0
    row_ptrs = stored_rows(
        pages_ptr, page_ids, relative, offs_n, head, page_stride, layer_offset, PAGE_TOKENS, ROW_ELEMS, ONE_PAGE
    )
    if KEYS == "rotated":
        ptrs = row_ptrs[:, None] + offs_i[None, :]
        v_a = tl.load(ptrs, mask=valid[:, None], other=0.0).to(q_a.dtype)
        v_b = tl.load(ptrs + NUM_LIVE, mask=valid[:, None], other=0.0).to(q_a.dtype)
        key_ptrs = rotated_ptr + keys[:, None] * (2 * NUM_LIVE) + offs_i[None, :]
        k_a = tl.load(key_ptrs, mask=valid[:, None], other=0.0).to(q_a.dtype)
        k_b = tl.load(key_ptrs + NUM_LIVE, mask=valid[:, None], other=0.0).to(q_a.dtype)
    else:
        v_a, v_b, k_a, k_b = load_turning(
            row_ptrs, valid, table_start + keys, rotary_ptr, w_a, w_b, q_a.dtype, NUM_LIVE, HEAD_DIM, KEYS == "rebuilt"
        )
    rest_ptrs = row_ptrs[:, None] + 2 * NUM_LIVE
    v_c = tl.load(rest_ptrs + offs_c[None, :], mask=valid[:, None], other=0.0).to(q_a.dtype)
    v_d = tl.load(rest_ptrs + 2 * NUM_LIVE + offs_d[None, :], mask=valid[:, None], other=0.0).to(q_a.dtype)
    scores = tl.dot(q_d, tl.trans(v_d), input_precision="ieee")
    scores = tl.dot(q_c, tl.trans(v_c), scores, input_precision="ieee")
    scores = tl.dot(q_a, tl.trans(k_a), scores, input_precision="ieee")
    scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision="ieee") * LOG2E
    if MASKED:
        seen = valid[None, :] & (keys[None, :] >= seen_start[:, None]) & (keys[None, :] < seen_end[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    row_max, weights, scale = softmax_step(scores, row_max)
    row_sum = row_sum * scale + tl.sum(weights, axis=1)
    weights = weights.to(q_a.dtype)
    acc_a = tl.dot(weights, v_a, acc_a * scale[:, None], input_precision="ieee")
    acc_b = tl.dot(weights, v_b, acc_b * scale[:, None], input_precision="ieee")
    acc_c = tl.dot(weights, v_c, acc_c * scale[:, None], input_precision="ieee")
    acc_d = tl.dot(weights, v_d, acc_d * scale[:, None], input_precision="ieee")
    return row_max, row_sum, acc_a, acc_b, acc_c, acc_d


@triton.jit(do_not_specialize=["table_stride_s", "first_seq", "num_seqs", "max_keys"])
def prefill_shared_kernel(
    q_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM] contiguous, turning-first
    pages_ptr,
    page_table_ptr,
    table_start_ptr,
    kv_lens_ptr,
    cu_seqlens_q_ptr,
    visible_end_ptr,  # HAS_VISIBLE_END
    k_weight_ptr,  # [HEAD_DIM] float32, original order; "rebuilt"
    rotary_ptr,  # [positions, 2 * NUM_LIVE]; "rebuilt"
    rotated_ptr,  # [sequences, NUM_KV_HEADS, max_keys, 2 * NUM_LIVE]; "rotated"
    out_ptr,  # as q, original order
    page_stride,  # elements
    table_stride_s,
    layer_offset,
    first_seq,
    num_seqs,
    max_keys,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_LIVE: tl.constexpr,  # HEAD_DIM / 8
    KEYS: tl.constexpr,  # turning dims of keys: "stored" in the page, "rebuilt" here, or "rotated" by a kernel before
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_VISIBLE_END: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As the plain kernel where a row holds V alone (see the decode kernel); every key is read from the pages."""
    HALF: tl.constexpr = HEAD_DIM // 2
    ROW_ELEMS: tl.constexpr = HEAD_DIM + 2 * NUM_LIVE if KEYS == "stored" else HEAD_DIM
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // BLOCK_G
    head = tl.program_id(1)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    seq, seq_start, first_query, q_len, kv_len = _block_of_program(
        cu_seqlens_q_ptr, kv_lens_ptr, block, first_seq, num_seqs, BLOCK_TOKENS, BLOCK_S
    )
    if first_query >= q_len:
        return

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_i = tl.arange(0, NUM_LIVE)
    offs_c = tl.arange(0, 2 * NUM_LIVE)
    offs_d = tl.arange(0, 4 * NUM_LIVE)
    query = first_query + offs_m // BLOCK_G
    mask_m = (query < q_len) & (offs_m % BLOCK_G < GROUP)
    token = (seq_start + query).to(tl.int64)
    q_rows = ((token * NUM_KV_HEADS + head) * GROUP + offs_m % BLOCK_G)[:, None] * HEAD_DIM
    q_a = tl.load(q_ptr + q_rows + offs_i[None, :], mask=mask_m[:, None], other=0.0)
    q_b = tl.load(q_ptr + q_rows + NUM_LIVE + offs_i[None, :], mask=mask_m[:, None], other=0.0)
    q_c = tl.load(q_ptr + q_rows + 2 * NUM_LIVE + offs_c[None, :], mask=mask_m[:, None], other=0.0)
    q_d = tl.load(q_ptr + q_rows + 4 * NUM_LIVE + offs_d[None, :], mask=mask_m[:, None], other=0.0)
    w_a = tl.load(k_weight_ptr + offs_i) if KEYS == "rebuilt" else offs_i
    w_b = tl.load(k_weight_ptr + HALF + offs_i) if KEYS == "rebuilt" else offs_i

    # All positions from here on count from the table's start.
    table_start = tl.load(table_start_ptr + seq)
    position = kv_len - q_len + query - table_start
    seen_end = tl.load(visible_end_ptr + token, mask=mask_m) - table_start if HAS_VISIBLE_END else position + 1
    seen_end = tl.where(mask_m, seen_end, 0)
    seen_start = position - WINDOW + 1 if WINDOW > 0 else position * 0
    first_position = kv_len - q_len + first_query - table_start
    oldest = tl.maximum(first_position + 1 - WINDOW, 0) if WINDOW > 0 else first_position * 0
    newest = tl.max(seen_end, axis=0)
    table_row_ptr = page_table_ptr + seq.to(tl.int64) * table_stride_s
    if KEYS == "rotated":
        rotated_ptr += ((seq - first_seq).to(tl.int64) * NUM_KV_HEADS + head) * max_keys * (2 * NUM_LIVE)

    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc_a = tl.zeros((BLOCK_M, NUM_LIVE), tl.float32)
    acc_b = tl.zeros((BLOCK_M, NUM_LIVE), tl.float32)
    acc_c = tl.zeros((BLOCK_M, 2 * NUM_LIVE), tl.float32)
    acc_d = tl.zeros((BLOCK_M, 4 * NUM_LIVE), tl.float32)
    begin = oldest // BLOCK_N * BLOCK_N
    # Tiles wholly before the block's first query are seen by all and need no mask; with a window there are few.
    unmasked_end = begin if WINDOW > 0 else tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, begin)
    page_ids = look_up_pages(table_row_ptr, begin, newest, offs_n, PAGE_TOKENS, ONE_PAGE)
    for relative in tl.range(begin, unmasked_end, BLOCK_N, num_stages=STAGES):
        this_page_ids = page_ids
        page_ids = look_up_pages(table_row_ptr, relative + BLOCK_N, newest, offs_n, PAGE_TOKENS, ONE_PAGE)
        row_max, row_sum, acc_a, acc_b, acc_c, acc_d = _shared_tile(
            relative, this_page_ids, oldest, newest, seen_start, seen_end, q_a, q_b, q_c, q_d,
            row_max, row_sum, acc_a, acc_b, acc_c, acc_d, pages_ptr, rotated_ptr, rotary_ptr, w_a, w_b, table_start,
            head, page_stride, layer_offset, NUM_LIVE, HEAD_DIM, ROW_ELEMS, KEYS, PAGE_TOKENS, BLOCK_N, ONE_PAGE, False,
        )  # fmt: skip
    for relative in tl.range(unmasked_end, newest, BLOCK_N, num_stages=STAGES):
        this_page_ids = page_ids
        page_ids = look_up_pages(table_row_ptr, relative + BLOCK_N, newest, offs_n, PAGE_TOKENS, ONE_PAGE)
        row_max, row_sum, acc_a, acc_b, acc_c, acc_d = _shared_tile(
            relative, this_page_ids, oldest, newest, seen_start, seen_end, q_a, q_b, q_c, q_d,
            row_max, row_sum, acc_a, acc_b, acc_c, acc_d, pages_ptr, rotated_ptr, rotary_ptr, w_a, w_b, table_start,
            head, page_stride, layer_offset, NUM_LIVE, HEAD_DIM, ROW_ELEMS, KEYS, PAGE_TOKENS, BLOCK_N, ONE_PAGE, True,
        )  # fmt: skip

    dtype = out_ptr.dtype.element_ty
    inverse = (1.0 / tl.where(row_max == float("-inf"), 1.0, row_sum))[:, None]
    out_rows = out_ptr + q_rows
    # Passing dims [2n, 8n) in stored order: the first 3n are dims [n, 4n), the last 3n dims [5n, 8n).
    place_c = NUM_LIVE + offs_c
    place_d = tl.where(offs_d < NUM_LIVE, 3 * NUM_LIVE + offs_d, 4 * NUM_LIVE + offs_d)
    tl.store(out_rows + offs_i[None, :], (acc_a * inverse).to(dtype), mask=mask_m[:, None])
    tl.store(out_rows + HALF + offs_i[None, :], (acc_b * inverse).to(dtype), mask=mask_m[:, None])
    tl.store(out_rows + place_c[None, :], (acc_c * inverse).to(dtype), mask=mask_m[:, None])
    tl.store(out_rows + place_d[None, :], (acc_d * inverse).to(dtype), mask=mask_m[:, None])
