"""Decode attention: one query per sequence, split over the sequence, so that any mix of lengths fills the device.

The keys of all (sequence, kv head) units are cut into tiles and laid end to end; program p of P takes tiles
[p T / P, (p + 1) T / P) of the T tiles, whatever units they belong to. A unit that lies within one program is finished
there; of others each program leaves its share (running maximum, sum, accumulator), and a second kernel joins the shares
in order. The grid is fixed and all lengths are read on the device, so a captured graph serves any lengths.

Worked example: two sequences of 3 and 1 tiles, one kv head, P = 2. T = 4; program 0 takes tiles 0 and 1 of the first,
program 1 its tile 2 and then the second sequence as a whole.
"""

import triton
import triton.language as tl


@triton.jit
def plan_decode_kernel(
    kv_lens_ptr,
    first_tiles_ptr,  # [num_seqs + 1] int32, written
    num_seqs,
    WINDOW: tl.constexpr,  # 0: none
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,  # power of two >= num_seqs
):
    """first_tiles[s] = tiles of one kv head in sequences before s, ceil(min(kv_len, WINDOW) / BLOCK_N) each."""
    offs_s = tl.arange(0, BLOCK_S)
    num_keys = tl.load(kv_lens_ptr + offs_s, mask=offs_s < num_seqs, other=0)
    if WINDOW > 0:
        num_keys = tl.minimum(num_keys, WINDOW)
    tl.store(first_tiles_ptr + 1 + offs_s, tl.cumsum(tl.cdiv(num_keys, BLOCK_N), axis=0), mask=offs_s < num_seqs)
    tl.store(first_tiles_ptr, 0)


@triton.jit
def _range_of_program(program, total, num_programs):
    """Tiles [begin, end) of a program; int64, as total * num_programs passes 2^31 for long batches."""
    begin = program.to(tl.int64) * total // num_programs
    return begin, (program.to(tl.int64) + 1) * total // num_programs


@triton.jit
def _sequence_of_tile(first_tiles_ptr, tile, num_seqs, NUM_KV_HEADS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The last sequence that starts at or before a tile: sequences without keys share their start with the next."""
    offs_s = tl.arange(0, BLOCK_S)
    starts = tl.load(first_tiles_ptr + offs_s, mask=offs_s < num_seqs, other=0).to(tl.int64) * NUM_KV_HEADS
    return tl.sum(((starts <= tile) & (offs_s < num_seqs)).to(tl.int32), axis=0) - 1


@triton.jit
def stored_rows(
    table_row_ptr,
    first,  # position of the tile's first key, relative to the table's start
    limit,  # positions at or past it, likewise relative, are not looked up
    page_stride,
    layer_offset,
    head_offset,  # of the plane and head, in rows
    PAGE_TOKENS: tl.constexpr,
    ROW_ELEMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_PAGE: tl.constexpr,  # no tile straddles a page: one lookup serves it
):
    """Element offsets [BLOCK_N] int64 of the rows of a tile's keys."""
    offs_n = tl.arange(0, BLOCK_N)
    if ONE_PAGE:
        page = tl.load(table_row_ptr + first // PAGE_TOKENS).to(tl.int64)
        slots = first % PAGE_TOKENS + offs_n
        return page * page_stride + layer_offset + (head_offset + slots).to(tl.int64) * ROW_ELEMS
    relative = first + offs_n
    pages = tl.load(table_row_ptr + relative // PAGE_TOKENS, mask=relative < limit, other=0).to(tl.int64)
    return pages * page_stride + layer_offset + (head_offset + relative % PAGE_TOKENS).to(tl.int64) * ROW_ELEMS


@triton.jit
def softmax_step(scores, row_max, row_sum):
    """New maximum and sum, the tile's weights, and the factor for what was accumulated; scores are in units of log 2.

    A row that has seen no key yet has maximum -inf; its reference is 0 there, since -inf - -inf would be NaN.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - reference[:, None])
    scale = tl.exp2(row_max - reference)
    return new_max, row_sum * scale + tl.sum(weights, axis=1), weights, scale


@triton.jit
def _decode_plain_kernel(
    q_ptr,  # [num_seqs, NUM_KV_HEADS * GROUP, HEAD_DIM] contiguous
    pages_ptr,
    page_table_ptr,
    table_start_ptr,
    kv_lens_ptr,
    first_tiles_ptr,
    out_ptr,  # as q
    part_acc_ptr,  # [2 * programs, GROUP, HEAD_DIM] float32: a program's first and last unit
    part_stat_ptr,  # [2 * programs, 2, GROUP] float32: maximum, sum
    page_stride,  # elements
    table_stride_s,
    layer_offset,
    num_seqs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    BLOCK_G: tl.constexpr,  # power of two >= max(16, GROUP): the matrix units want 16 rows
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out = softmax(q k^T) v over a sequence's last WINDOW keys; softmax in float32, weights rounded to q's dtype."""
    LOG2E: tl.constexpr = 1.4426950408889634
    program = tl.program_id(0)
    total = tl.load(first_tiles_ptr + num_seqs).to(tl.int64) * NUM_KV_HEADS
    begin, end = _range_of_program(program, total, tl.num_programs(0))
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, HEAD_DIM)
    offs_n = tl.arange(0, BLOCK_N)
    mask_g = offs_g < GROUP
    seq = _sequence_of_tile(first_tiles_ptr, begin, num_seqs, NUM_KV_HEADS, BLOCK_S)

    at = begin
    while at < end:
        seq_first = tl.load(first_tiles_ptr + seq)
        seq_tiles = tl.load(first_tiles_ptr + seq + 1) - seq_first
        within = (at - seq_first.to(tl.int64) * NUM_KV_HEADS).to(tl.int32)
        head = within // seq_tiles
        first = within % seq_tiles
        num_tiles = tl.minimum(seq_tiles - first, (end - at).to(tl.int32))

        kv_len = tl.load(kv_lens_ptr + seq)
        table_start = tl.load(table_start_ptr + seq)
        oldest = tl.maximum(kv_len - WINDOW, 0) if WINDOW > 0 else 0
        limit = kv_len - table_start
        table_row_ptr = page_table_ptr + seq.to(tl.int64) * table_stride_s
        q_rows = (seq.to(tl.int64) * NUM_KV_HEADS + head) * GROUP + offs_g[:, None]
        q = tl.load(q_ptr + q_rows * HEAD_DIM + offs_d[None, :], mask=mask_g[:, None], other=0.0)
        row_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, HEAD_DIM), tl.float32)
        for tile in tl.range(first, first + num_tiles, num_stages=STAGES):
            key = oldest - table_start + tile * BLOCK_N
            valid = key + offs_n < limit
            rows = stored_rows(
                table_row_ptr, key, limit, page_stride, layer_offset, head * PAGE_TOKENS,
                PAGE_TOKENS, HEAD_DIM, BLOCK_N, ONE_PAGE,
            )  # fmt: skip
            k_ptrs = pages_ptr + rows[:, None] + offs_d[None, :]
            # Slots past the end may hold anything, NaN too, and 0 * NaN is NaN: they are read as 0.
            k = tl.load(k_ptrs, mask=valid[:, None], other=0.0).to(q.dtype)
            v_ptrs = k_ptrs + NUM_KV_HEADS * PAGE_TOKENS * HEAD_DIM
            v = tl.load(v_ptrs, mask=valid[:, None], other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * LOG2E
            scores = tl.where(valid[None, :], scores, float("-inf"))
            row_max, row_sum, weights, scale = softmax_step(scores, row_max, row_sum)
            acc = tl.dot(weights.to(q.dtype), v, acc * scale[:, None], input_precision="ieee")

        if num_tiles == seq_tiles:
            out = acc / row_sum[:, None]
            tl.store(
                out_ptr + q_rows * HEAD_DIM + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask_g[:, None]
            )
        else:
            part = 2 * program.to(tl.int64) + (at > begin)
            stat_ptrs = part_stat_ptr + part * 2 * GROUP + offs_g
            tl.store(stat_ptrs, row_max, mask=mask_g)
            tl.store(stat_ptrs + GROUP, row_sum, mask=mask_g)
            part_rows = part_acc_ptr + (part * GROUP + offs_g[:, None]) * HEAD_DIM
            tl.store(part_rows + offs_d[None, :], acc, mask=mask_g[:, None])
        at += num_tiles
        while (at < end) & (tl.load(first_tiles_ptr + seq + 1).to(tl.int64) * NUM_KV_HEADS <= at):
            seq += 1


@triton.jit
def load_turning(rows, offs_n, valid, positions, pages_ptr, rotary_ptr, w_a, w_b, dtype: tl.constexpr,
                 NUM_LIVE: tl.constexpr, HEAD_DIM: tl.constexpr, V_ONLY: tl.constexpr):  # fmt: skip
    """The turning dims of a tile: values [BLOCK_N, NUM_LIVE] twice, and their rotated keys likewise.

    V_ONLY: (a, b) = (v_a w_a, v_b w_b) turned to (a cos - b sin, b cos + a sin), rounded once. Else read.
    """
    offs_i = tl.arange(0, NUM_LIVE)
    ptrs = pages_ptr + rows[:, None] + offs_i[None, :]
    v_a = tl.load(ptrs, mask=valid[:, None], other=0.0).to(dtype)
    v_b = tl.load(ptrs + NUM_LIVE, mask=valid[:, None], other=0.0).to(dtype)
    if V_ONLY:
        angle_ptrs = rotary_ptr + positions[:, None] * (2 * NUM_LIVE) + offs_i[None, :]
        cos = tl.load(angle_ptrs, mask=valid[:, None], other=0.0).to(tl.float32)
        sin = tl.load(angle_ptrs + NUM_LIVE, mask=valid[:, None], other=0.0).to(tl.float32)
        a = v_a.to(tl.float32) * w_a[None, :]
        b = v_b.to(tl.float32) * w_b[None, :]
        k_a = (a * cos - b * sin).to(dtype)
        k_b = (b * cos + a * sin).to(dtype)
    else:
        k_a = tl.load(ptrs + HEAD_DIM, mask=valid[:, None], other=0.0).to(dtype)
        k_b = tl.load(ptrs + HEAD_DIM + NUM_LIVE, mask=valid[:, None], other=0.0).to(dtype)
    return v_a, v_b, k_a, k_b


@triton.jit
def _decode_shared_kernel(
    q_ptr,  # [num_seqs, NUM_KV_HEADS * GROUP, HEAD_DIM] contiguous, turning-first
    pages_ptr,
    page_table_ptr,
    table_start_ptr,
    kv_lens_ptr,
    first_tiles_ptr,
    k_weight_ptr,  # [HEAD_DIM] float32, original order; V_ONLY
    rotary_ptr,  # [positions, 2 * NUM_LIVE] float16; V_ONLY
    out_ptr,  # as q, original order
    part_acc_ptr,  # [2 * programs, GROUP, HEAD_DIM] float32, original order
    part_stat_ptr,  # [2 * programs, 2, GROUP] float32: maximum, sum
    page_stride,  # elements
    table_stride_s,
    layer_offset,
    num_seqs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_LIVE: tl.constexpr,  # HEAD_DIM / 8
    V_ONLY: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As the plain kernel where a row holds V alone: its passing dims are key too, its turning dims are rotated here.

    A row is four parts of NUM_LIVE * (1, 1, 2, 4) dims: turning a and b, then the passing rest of the first and of the
    second half. Each has its accumulator; one tile in shared memory serves both products.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    HALF: tl.constexpr = HEAD_DIM // 2
    ROW_ELEMS: tl.constexpr = HEAD_DIM if V_ONLY else HEAD_DIM + 2 * NUM_LIVE
    program = tl.program_id(0)
    total = tl.load(first_tiles_ptr + num_seqs).to(tl.int64) * NUM_KV_HEADS
    begin, end = _range_of_program(program, total, tl.num_programs(0))
    offs_g = tl.arange(0, BLOCK_G)
    offs_n = tl.arange(0, BLOCK_N)
    offs_i = tl.arange(0, NUM_LIVE)
    offs_c = tl.arange(0, 2 * NUM_LIVE)
    offs_d = tl.arange(0, 4 * NUM_LIVE)
    mask_g = offs_g < GROUP
    w_a = tl.load(k_weight_ptr + offs_i) if V_ONLY else offs_i
    w_b = tl.load(k_weight_ptr + HALF + offs_i) if V_ONLY else offs_i
    seq = _sequence_of_tile(first_tiles_ptr, begin, num_seqs, NUM_KV_HEADS, BLOCK_S)

    at = begin
    while at < end:
        seq_first = tl.load(first_tiles_ptr + seq)
        seq_tiles = tl.load(first_tiles_ptr + seq + 1) - seq_first
        within = (at - seq_first.to(tl.int64) * NUM_KV_HEADS).to(tl.int32)
        head = within // seq_tiles
        first = within % seq_tiles
        num_tiles = tl.minimum(seq_tiles - first, (end - at).to(tl.int32))

        kv_len = tl.load(kv_lens_ptr + seq)
        table_start = tl.load(table_start_ptr + seq)
        oldest = tl.maximum(kv_len - WINDOW, 0) if WINDOW > 0 else 0
        limit = kv_len - table_start
        table_row_ptr = page_table_ptr + seq.to(tl.int64) * table_stride_s
        q_rows = (seq.to(tl.int64) * NUM_KV_HEADS + head) * GROUP + offs_g[:, None]
        q_ptrs = q_ptr + q_rows * HEAD_DIM
        q_a = tl.load(q_ptrs + offs_i[None, :], mask=mask_g[:, None], other=0.0)
        q_b = tl.load(q_ptrs + NUM_LIVE + offs_i[None, :], mask=mask_g[:, None], other=0.0)
        q_c = tl.load(q_ptrs + 2 * NUM_LIVE + offs_c[None, :], mask=mask_g[:, None], other=0.0)
        q_d = tl.load(q_ptrs + 4 * NUM_LIVE + offs_d[None, :], mask=mask_g[:, None], other=0.0)
        row_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_G,), tl.float32)
        acc_a = tl.zeros((BLOCK_G, NUM_LIVE), tl.float32)
        acc_b = tl.zeros((BLOCK_G, NUM_LIVE), tl.float32)
        acc_c = tl.zeros((BLOCK_G, 2 * NUM_LIVE), tl.float32)
        acc_d = tl.zeros((BLOCK_G, 4 * NUM_LIVE), tl.float32)
        for tile in tl.range(first, first + num_tiles, num_stages=STAGES):
            key = oldest - table_start + tile * BLOCK_N
            valid = key + offs_n < limit
            rows = stored_rows(
                table_row_ptr, key, limit, page_stride, layer_offset, head * PAGE_TOKENS,
                PAGE_TOKENS, ROW_ELEMS, BLOCK_N, ONE_PAGE,
            )  # fmt: skip
            v_a, v_b, k_a, k_b = load_turning(
                rows, offs_n, valid, table_start + key + offs_n, pages_ptr, rotary_ptr, w_a, w_b,
                q_ptr.dtype.element_ty, NUM_LIVE, HEAD_DIM, V_ONLY,
            )  # fmt: skip
            rest_ptrs = pages_ptr + rows[:, None] + 2 * NUM_LIVE
            v_c = tl.load(rest_ptrs + offs_c[None, :], mask=valid[:, None], other=0.0).to(q_a.dtype)
            v_d = tl.load(rest_ptrs + 2 * NUM_LIVE + offs_d[None, :], mask=valid[:, None], other=0.0).to(q_a.dtype)
            scores = tl.dot(q_d, tl.trans(v_d), input_precision="ieee")
            scores = tl.dot(q_c, tl.trans(v_c), scores, input_precision="ieee")
            scores = tl.dot(q_a, tl.trans(k_a), scores, input_precision="ieee")
            scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision="ieee") * LOG2E
            scores = tl.where(valid[None, :], scores, float("-inf"))
            row_max, row_sum, weights, scale = softmax_step(scores, row_max, row_sum)
            weights = weights.to(q_a.dtype)
            acc_a = tl.dot(weights, v_a, acc_a * scale[:, None], input_precision="ieee")
            acc_b = tl.dot(weights, v_b, acc_b * scale[:, None], input_precision="ieee")
            acc_c = tl.dot(weights, v_c, acc_c * scale[:, None], input_precision="ieee")
            acc_d = tl.dot(weights, v_d, acc_d * scale[:, None], input_precision="ieee")

        if num_tiles == seq_tiles:
            dtype = out_ptr.dtype.element_ty
            out_rows = out_ptr + q_rows * HEAD_DIM
            inverse = (1.0 / row_sum)[:, None]
            tl.store(out_rows + offs_i[None, :], (acc_a * inverse).to(dtype), mask=mask_g[:, None])
            tl.store(out_rows + HALF + offs_i[None, :], (acc_b * inverse).to(dtype), mask=mask_g[:, None])
            # Passing dims [2n, 8n) in stored order: the first 3n are dims [n, 4n), the last 3n dims [5n, 8n).
            place_c = NUM_LIVE + offs_c
            place_d = tl.where(offs_d < NUM_LIVE, 3 * NUM_LIVE + offs_d, 4 * NUM_LIVE + offs_d)
            tl.store(out_rows + place_c[None, :], (acc_c * inverse).to(dtype), mask=mask_g[:, None])
            tl.store(out_rows + place_d[None, :], (acc_d * inverse).to(dtype), mask=mask_g[:, None])
        else:
            part = 2 * program.to(tl.int64) + (at > begin)
            stat_ptrs = part_stat_ptr + part * 2 * GROUP + offs_g
            tl.store(stat_ptrs, row_max, mask=mask_g)
            tl.store(stat_ptrs + GROUP, row_sum, mask=mask_g)
            part_rows = part_acc_ptr + (part * GROUP + offs_g[:, None]) * HEAD_DIM
            place_c = NUM_LIVE + offs_c
            place_d = tl.where(offs_d < NUM_LIVE, 3 * NUM_LIVE + offs_d, 4 * NUM_LIVE + offs_d)
            tl.store(part_rows + offs_i[None, :], acc_a, mask=mask_g[:, None])
            tl.store(part_rows + HALF + offs_i[None, :], acc_b, mask=mask_g[:, None])
            tl.store(part_rows + place_c[None, :], acc_c, mask=mask_g[:, None])
            tl.store(part_rows + place_d[None, :], acc_d, mask=mask_g[:, None])
        at += num_tiles
        while (at < end) & (tl.load(first_tiles_ptr + seq + 1).to(tl.int64) * NUM_KV_HEADS <= at):
            seq += 1


@triton.jit
def join_parts_kernel(
    first_tiles_ptr,
    part_acc_ptr,
    part_stat_ptr,
    out_ptr,  # [num_seqs, NUM_KV_HEADS * GROUP, HEAD_DIM] contiguous
    num_seqs,
    num_programs,  # of the kernel that left the parts
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,  # parts joined at a time
):
    """out[s, h] = sum_p 2^(m_p - m) acc_p / sum_p 2^(m_p - m) l_p over the parts of a unit that several programs share.

    A unit of one program is finished already; a sequence without keys gives 0. Grid: (num_seqs, query heads).
    """
    seq = tl.program_id(0)
    q_head = tl.program_id(1)
    group_idx = q_head % GROUP
    total = tl.load(first_tiles_ptr + num_seqs).to(tl.int64) * NUM_KV_HEADS
    seq_first = tl.load(first_tiles_ptr + seq).to(tl.int64)
    seq_tiles = tl.load(first_tiles_ptr + seq + 1).to(tl.int64) - seq_first
    unit_begin = seq_first * NUM_KV_HEADS + (q_head // GROUP) * seq_tiles
    unit_end = unit_begin + seq_tiles
    offs_d = tl.arange(0, HEAD_DIM)
    out_ptrs = out_ptr + (seq.to(tl.int64) * NUM_KV_HEADS * GROUP + q_head) * HEAD_DIM + offs_d
    if seq_tiles == 0:
        tl.store(out_ptrs, tl.zeros((HEAD_DIM,), out_ptr.dtype.element_ty))
    else:
        # Program p starts at p T // P <= x exactly when p <= ((x + 1) P - 1) // T.
        first = ((unit_begin + 1) * num_programs - 1) // total
        last = (unit_end * num_programs - 1) // total
        if first != last:
            row_max = float("-inf")
            row_sum = 0.0
            acc = tl.zeros((HEAD_DIM,), tl.float32)
            for at in range(first, last + 1, BLOCK_P):
                programs = at + tl.arange(0, BLOCK_P)
                begins, ends = _range_of_program(programs, total, num_programs)
                present = (programs <= last) & (begins < ends)  # fewer tiles than programs leave some with none
                parts = 2 * programs + (begins < unit_begin)
                stat_ptrs = part_stat_ptr + parts * 2 * GROUP + group_idx
                maxima = tl.load(stat_ptrs, mask=present, other=float("-inf"))
                sums = tl.load(stat_ptrs + GROUP, mask=present, other=0.0)
                acc_ptrs = part_acc_ptr + (parts * GROUP + group_idx)[:, None] * HEAD_DIM + offs_d[None, :]
                shares = tl.load(acc_ptrs, mask=present[:, None], other=0.0)
                new_max = tl.maximum(row_max, tl.max(maxima, axis=0))
                factors = tl.exp2(maxima - new_max)
                scale = tl.exp2(row_max - new_max)
                row_sum = row_sum * scale + tl.sum(factors * sums, axis=0)
                acc = acc * scale + tl.sum(factors[:, None] * shares, axis=0)
                row_max = new_max
            tl.store(out_ptrs, (acc / row_sum).to(out_ptr.dtype.element_ty))
