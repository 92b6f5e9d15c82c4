"""Decode attention: one query per sequence, split over the sequence, so that any mix of lengths fills the device.

A unit is a sequence and a block of HEADS_PER_TILE kv heads. The keys of all units are cut into tiles and laid end to
end; program p of P takes tiles [p T / P, (p + 1) T / P) of the T tiles, whatever units they belong to. A unit that lies
within one program is finished there; of others each program leaves its share (running maximum, sum, accumulator). The
shares are joined in the order of programs, by the program that arrives last (FUSED) or, where a unit may have many, by
a second kernel. The grid is fixed and all lengths are read on the device, so a captured graph serves any lengths.

A tile holds BLOCK_T keys of each of its heads, BLOCK_N = HEADS_PER_TILE * BLOCK_T rows; query heads of another kv head
do not see a row. That costs no matrix work, since the instruction's 16 query rows are there anyway, and makes units
fewer and longer: with pages of 16 tokens one page's part of several heads is one piece of memory.

Worked example: two sequences of 3 and 1 tiles, one unit each, P = 2. T = 4; program 0 takes tiles 0 and 1 of the first,
program 1 its tile 2 and then the second sequence as a whole.
"""

import triton
import triton.language as tl


@triton.jit
def first_key(kv_len, WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """Where a sequence's first tile starts: at its window or before, on a multiple of ALIGN: tiles lie in pages."""
    start = tl.maximum(kv_len - WINDOW, 0) // ALIGN * ALIGN if WINDOW > 0 else kv_len * 0
    return start


@triton.jit(do_not_specialize=["num_seqs"])
def plan_decode_kernel(
    kv_lens_ptr,
    first_tiles_ptr,  # [num_seqs + 1] int32, written
    num_seqs,
    WINDOW: tl.constexpr,  # 0: none
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,  # power of two >= num_seqs
):
    """first_tiles[s] = tiles of one unit in sequences before s: those of BLOCK_T keys from `first_key` to kv_len."""
    offs_s = tl.arange(0, BLOCK_S)
    kv_len = tl.load(kv_lens_ptr + offs_s, mask=offs_s < num_seqs, other=0)
    num_tiles = tl.cdiv(kv_len - first_key(kv_len, WINDOW, ALIGN), BLOCK_T)
    tl.store(first_tiles_ptr + 1 + offs_s, tl.cumsum(num_tiles, axis=0), mask=offs_s < num_seqs)
    tl.store(first_tiles_ptr, 0)


@triton.jit
def programs_at_work(total, num_programs):
    """Fewer programs where each would get less than four tiles: every share costs a store, a load and an arrival."""
    return tl.maximum(tl.minimum(num_programs, tl.cdiv(total, 4)), 1)


@triton.jit
def _range_of_program(program, total, num_programs):
    """Tiles [begin, end) of a program; int64, as total * num_programs passes 2^31 for long batches."""
    begin = program.to(tl.int64) * total // num_programs
    return begin, (program.to(tl.int64) + 1) * total // num_programs


@triton.jit
def _sequence_of_tile(first_tiles_ptr, tile, num_seqs, UNITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The last sequence that starts at or before a tile: sequences without keys share their start with the next."""
    offs_s = tl.arange(0, BLOCK_S)
    starts = tl.load(first_tiles_ptr + offs_s, mask=offs_s < num_seqs, other=0).to(tl.int64) * UNITS
    return tl.sum(((starts <= tile) & (offs_s < num_seqs)).to(tl.int32), axis=0) - 1


@triton.jit
def look_up_pages(
    table_row_ptr,
    first,  # position of a tile's first key, relative to the table's start
    limit,  # positions at or past it, likewise relative, are not looked up
    offs_t,  # [BLOCK_N] token of a row within the tile
    PAGE_TOKENS: tl.constexpr,
    ONE_PAGE: tl.constexpr,  # no tile straddles a page: one page id serves it
):
    """Page ids of a tile's rows, [BLOCK_N] or one.

    A separate step, done a tile ahead: inside the loop's own pipeline a look-up that feeds a look-up halves the depth
    that the keys get (H200, compiled code: one tile in flight instead of two with three stages).
    """
    if ONE_PAGE:
        page_ids = tl.load(table_row_ptr + first // PAGE_TOKENS, mask=first < limit, other=0)
    else:
        relative = first + offs_t
        page_ids = tl.load(table_row_ptr + relative // PAGE_TOKENS, mask=relative < limit, other=0)
    return page_ids


@triton.jit
def stored_rows(
    pages_ptr,
    page_ids,  # as looked up for this tile
    first,
    offs_t,  # [BLOCK_N] token of a row within the tile
    offs_h,  # [BLOCK_N] kv head of a row
    page_stride,
    layer_offset,
    PAGE_TOKENS: tl.constexpr,
    ROW_ELEMS: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """Pointers [BLOCK_N] to a tile's rows."""
    page_ptrs = pages_ptr + page_ids.to(tl.int64) * page_stride + layer_offset
    slots = first % PAGE_TOKENS + offs_t if ONE_PAGE else (first + offs_t) % PAGE_TOKENS
    return page_ptrs + (offs_h * PAGE_TOKENS + slots) * ROW_ELEMS


@triton.jit
def softmax_step(scores, row_max):
    """New row maximum, the tile's weights, and the factor for what was accumulated; scores are in units of log 2.

    A query that has seen no key yet has maximum -inf; its reference is 0 there, since -inf - -inf would be NaN.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, tl.exp2(scores - reference[:, None]), tl.exp2(row_max - reference)


@triton.jit
def _join_if_last(
    arrival_ptr,
    part_acc_ptr,
    part_stat_ptr,
    out_ptr,  # of the unit's first query head
    unit_begin,  # tiles [unit_begin, unit_end) of all
    unit_end,
    total,
    num_programs,
    ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Count this program's arrival at a shared unit; the last one joins all shares (see `join_parts_kernel`)."""
    # Program p starts at p T // P <= x exactly when p <= ((x + 1) P - 1) // T.
    first = ((unit_begin + 1) * num_programs - 1) // total
    last = (unit_end * num_programs - 1) // total
    tl.debug_barrier()  # every thread's share is written before the arrival is counted
    if tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == last - first:
        tl.store(arrival_ptr, 0)
        offs_g = tl.arange(0, BLOCK_G)
        offs_d = tl.arange(0, HEAD_DIM)
        mask_g = offs_g < ROWS
        row_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, HEAD_DIM), tl.float32)
        for at in range(first, last + 1, UNROLL):
            for i in tl.static_range(UNROLL):
                program = at + i
                part = 2 * program + (program * total // num_programs < unit_begin)
                mask = mask_g & (program <= last)
                stat_ptrs = part_stat_ptr + part * 2 * ROWS + offs_g
                acc_ptrs = part_acc_ptr + (part * ROWS + offs_g)[:, None] * HEAD_DIM + offs_d[None, :]
                # Past the first-level cache, which is not kept coherent with other programs' writes.
                share_max = tl.load(stat_ptrs, mask=mask, other=float("-inf"), cache_modifier=".cg")
                share_sum = tl.load(stat_ptrs + ROWS, mask=mask, other=0.0, cache_modifier=".cg")
                share = tl.load(acc_ptrs, mask=mask[:, None], other=0.0, cache_modifier=".cg")
                new_max = tl.maximum(row_max, share_max)
                reference = tl.where(new_max == float("-inf"), 0.0, new_max)
                factor = tl.exp2(share_max - reference)
                scale = tl.exp2(row_max - reference)
                row_sum = row_sum * scale + share_sum * factor
                acc = acc * scale[:, None] + share * factor[:, None]
                row_max = new_max
        out = (acc / tl.where(mask_g, row_sum, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offs_g[:, None] * HEAD_DIM + offs_d[None, :], out, mask=mask_g[:, None])


@triton.jit
def _zero_blind_rows(first_tiles_ptr, out_ptr, num_seqs, num_q_heads, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Sequences without keys give 0; each program sees to its share of them."""
    for seq in range(tl.program_id(0), num_seqs, tl.num_programs(0)):
        if tl.load(first_tiles_ptr + seq) == tl.load(first_tiles_ptr + seq + 1):
            for head in range(0, num_q_heads, BLOCK_G):
                heads = head + tl.arange(0, BLOCK_G)
                rows = (seq * num_q_heads + heads)[:, None].to(tl.int64) * HEAD_DIM
                zeros = tl.zeros((BLOCK_G, HEAD_DIM), out_ptr.dtype.element_ty)
                tl.store(out_ptr + rows + tl.arange(0, HEAD_DIM)[None, :], zeros, mask=(heads < num_q_heads)[:, None])


@triton.jit(do_not_specialize=["table_stride_s", "num_seqs"])
def decode_plain_kernel(
    q_ptr,  # [num_seqs, query heads, HEAD_DIM] contiguous
    pages_ptr,
    page_table_ptr,
    table_start_ptr,
    kv_lens_ptr,
    first_tiles_ptr,
    out_ptr,  # as q
    arrivals_ptr,  # [num_seqs * units] int32, all zero; left so (FUSED)
    part_acc_ptr,  # [2 * programs, ROWS, HEAD_DIM] float32: a program's first and last unit
    part_stat_ptr,  # [2 * programs, 2, ROWS] float32: maximum, sum
    page_stride,  # elements
    table_stride_s,
    layer_offset,
    num_seqs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    BLOCK_G: tl.constexpr,  # power of two >= max(16, rows of a unit): the matrix units want 16 rows
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ALIGN: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    FUSED: tl.constexpr,
    UNROLL: tl.constexpr,  # shares loaded at a time
):
    """out = softmax(q k^T) v over a sequence's last WINDOW keys; softmax in float32, weights rounded to q's dtype."""
    LOG2E: tl.constexpr = 1.4426950408889634
    UNITS: tl.constexpr = NUM_KV_HEADS // HEADS_PER_TILE  # of one sequence
    ROWS: tl.constexpr = HEADS_PER_TILE * GROUP  # query heads of a unit
    BLOCK_N: tl.constexpr = HEADS_PER_TILE * BLOCK_T
    program = tl.program_id(0)
    total = tl.load(first_tiles_ptr + num_seqs).to(tl.int64) * UNITS
    num_programs = programs_at_work(total, tl.num_programs(0))
    begin, end = _range_of_program(tl.minimum(program, num_programs), total, num_programs)
    end = tl.minimum(end, total)
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, HEAD_DIM)
    offs_t = tl.arange(0, BLOCK_N) % BLOCK_T
    tile_heads = tl.arange(0, BLOCK_N) // BLOCK_T
    mask_g = offs_g < ROWS
    # Rows that pad the instruction see every key: their result is dropped, and a blind row would divide 0 by 0.
    own_head = ((offs_g // GROUP)[:, None] == tile_heads[None, :]) | (offs_g >= ROWS)[:, None]
    seq = _sequence_of_tile(first_tiles_ptr, begin, num_seqs, UNITS, BLOCK_S)

    at = begin
    while at < end:
        seq_first = tl.load(first_tiles_ptr + seq)
        seq_tiles = tl.load(first_tiles_ptr + seq + 1) - seq_first
        within = (at - seq_first.to(tl.int64) * UNITS).to(tl.int32)
        unit = within // seq_tiles
        first = within % seq_tiles
        num_tiles = tl.minimum(seq_tiles - first, (end - at).to(tl.int32))

        kv_len = tl.load(kv_lens_ptr + seq)
        table_start = tl.load(table_start_ptr + seq)
        oldest = tl.maximum(kv_len - WINDOW, 0) - table_start if WINDOW > 0 else -table_start
        limit = kv_len - table_start
        table_row_ptr = page_table_ptr + seq.to(tl.int64) * table_stride_s
        first_q_head = (seq.to(tl.int64) * UNITS + unit) * ROWS
        q_rows = first_q_head + offs_g[:, None]
        q = tl.load(q_ptr + q_rows * HEAD_DIM + offs_d[None, :], mask=mask_g[:, None], other=0.0)
        row_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_G, BLOCK_N), tl.float32)
        acc = tl.zeros((BLOCK_G, HEAD_DIM), tl.float32)
        key = first_key(kv_len, WINDOW, ALIGN) - table_start + first * BLOCK_T
        page_ids = look_up_pages(table_row_ptr, key, limit, offs_t, PAGE_TOKENS, ONE_PAGE)
        for _ in tl.range(0, num_tiles, num_stages=STAGES):
            valid = (key + offs_t >= oldest) & (key + offs_t < limit) if WINDOW > 0 else key + offs_t < limit
            row_ptrs = stored_rows(
                pages_ptr, page_ids, key, offs_t, unit * HEADS_PER_TILE + tile_heads, page_stride, layer_offset,
                PAGE_TOKENS, HEAD_DIM, ONE_PAGE,
            )  # fmt: skip
            key += BLOCK_T
            page_ids = look_up_pages(table_row_ptr, key, limit, offs_t, PAGE_TOKENS, ONE_PAGE)
            k_ptrs = row_ptrs[:, None] + offs_d[None, :]
            # Slots past the end may hold anything, NaN too, and 0 * NaN is NaN: they are read as 0.
            k = tl.load(k_ptrs, mask=valid[:, None], other=0.0).to(q.dtype)
            v_ptrs = k_ptrs + NUM_KV_HEADS * PAGE_TOKENS * HEAD_DIM
            v = tl.load(v_ptrs, mask=valid[:, None], other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * LOG2E
            scores = tl.where(valid[None, :] & own_head, scores, float("-inf"))
            row_max, weights, scale = softmax_step(scores, row_max)
            # Summed over keys after the loop: a reduction over warps, two barriers, is saved in every tile.
            sums = sums * scale[:, None] + weights
            acc = tl.dot(weights.to(q.dtype), v, acc * scale[:, None], input_precision="ieee")

        row_sum = tl.sum(sums, axis=1)
        if num_tiles == seq_tiles:
            out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + q_rows * HEAD_DIM + offs_d[None, :], out, mask=mask_g[:, None])
        else:
            part = 2 * program.to(tl.int64) + (at > begin)
            stat_ptrs = part_stat_ptr + part * 2 * ROWS + offs_g
            tl.store(stat_ptrs, row_max, mask=mask_g)
            tl.store(stat_ptrs + ROWS, row_sum, mask=mask_g)
            part_rows = part_acc_ptr + (part * ROWS + offs_g[:, None]) * HEAD_DIM
            tl.store(part_rows + offs_d[None, :], acc, mask=mask_g[:, None])
            if FUSED:
                _join_if_last(
                    arrivals_ptr + seq * UNITS + unit, part_acc_ptr, part_stat_ptr, out_ptr + first_q_head * HEAD_DIM,
                    at - first, at - first + seq_tiles, total, num_programs, ROWS, BLOCK_G, HEAD_DIM, UNROLL,
                )  # fmt: skip
        at += num_tiles
        while (at < end) & (tl.load(first_tiles_ptr + seq + 1).to(tl.int64) * UNITS <= at):
            seq += 1

    if FUSED:
        _zero_blind_rows(first_tiles_ptr, out_ptr, num_seqs, NUM_KV_HEADS * GROUP, BLOCK_G, HEAD_DIM)


@triton.jit
def load_turning(row_ptrs, valid, positions, rotary_ptr, w_a, w_b, dtype: tl.constexpr,
                 NUM_LIVE: tl.constexpr, HEAD_DIM: tl.constexpr, V_ONLY: tl.constexpr):  # fmt: skip
    """The turning dims of a tile: values [BLOCK_N, NUM_LIVE] twice, and their rotated keys likewise.

    V_ONLY: (a, b) = (v_a w_a, v_b w_b) turned to (a cos - b sin, b cos + a sin), rounded once. Else read.
    """
    offs_i = tl.arange(0, NUM_LIVE)
    ptrs = row_ptrs[:, None] + offs_i[None, :]
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


@triton.jit(do_not_specialize=["table_stride_s", "num_seqs"])
def decode_shared_kernel(
    q_ptr,  # [num_seqs, query heads, HEAD_DIM] contiguous, turning-first
    pages_ptr,
    page_table_ptr,
    table_start_ptr,
    kv_lens_ptr,
    first_tiles_ptr,
    k_weight_ptr,  # [HEAD_DIM] float32, original order; V_ONLY
    rotary_ptr,  # [positions, 2 * NUM_LIVE] float16; V_ONLY
    out_ptr,  # as q, original order
    arrivals_ptr,  # [num_seqs * units] int32, all zero; left so (FUSED)
    part_acc_ptr,  # [2 * programs, ROWS, HEAD_DIM] float32, original order
    part_stat_ptr,  # [2 * programs, 2, ROWS] float32: maximum, sum
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
    HEADS_PER_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ALIGN: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    FUSED: tl.constexpr,
    UNROLL: tl.constexpr,  # shares loaded at a time
):
    """As the plain kernel where a row holds V alone: its passing dims are key too, its turning dims are rotated here.

    A row is four parts of NUM_LIVE * (1, 1, 2, 4) dims: turning a and b, then the passing rest of the first and of the
    second half. Each has its accumulator; one tile in shared memory serves both products.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    UNITS: tl.constexpr = NUM_KV_HEADS // HEADS_PER_TILE  # of one sequence
    ROWS: tl.constexpr = HEADS_PER_TILE * GROUP  # query heads of a unit
    BLOCK_N: tl.constexpr = HEADS_PER_TILE * BLOCK_T
    HALF: tl.constexpr = HEAD_DIM // 2
    ROW_ELEMS: tl.constexpr = HEAD_DIM if V_ONLY else HEAD_DIM + 2 * NUM_LIVE
    program = tl.program_id(0)
    total = tl.load(first_tiles_ptr + num_seqs).to(tl.int64) * UNITS
    num_programs = programs_at_work(total, tl.num_programs(0))
    begin, end = _range_of_program(tl.minimum(program, num_programs), total, num_programs)
    end = tl.minimum(end, total)
    offs_g = tl.arange(0, BLOCK_G)
    offs_t = tl.arange(0, BLOCK_N) % BLOCK_T
    tile_heads = tl.arange(0, BLOCK_N) // BLOCK_T
    offs_i = tl.arange(0, NUM_LIVE)
    offs_c = tl.arange(0, 2 * NUM_LIVE)
    offs_d = tl.arange(0, 4 * NUM_LIVE)
    mask_g = offs_g < ROWS
    # Rows that pad the instruction see every key: their result is dropped, and a blind row would divide 0 by 0.
    own_head = ((offs_g // GROUP)[:, None] == tile_heads[None, :]) | (offs_g >= ROWS)[:, None]
    w_a = tl.load(k_weight_ptr + offs_i) if V_ONLY else offs_i
    w_b = tl.load(k_weight_ptr + HALF + offs_i) if V_ONLY else offs_i
    seq = _sequence_of_tile(first_tiles_ptr, begin, num_seqs, UNITS, BLOCK_S)

    at = begin
    while at < end:
        seq_first = tl.load(first_tiles_ptr + seq)
        seq_tiles = tl.load(first_tiles_ptr + seq + 1) - seq_first
        within = (at - seq_first.to(tl.int64) * UNITS).to(tl.int32)
        unit = within // seq_tiles
        first = within % seq_tiles
        num_tiles = tl.minimum(seq_tiles - first, (end - at).to(tl.int32))

        kv_len = tl.load(kv_lens_ptr + seq)
        table_start = tl.load(table_start_ptr + seq)
        oldest = tl.maximum(kv_len - WINDOW, 0) - table_start if WINDOW > 0 else -table_start
        limit = kv_len - table_start
        table_row_ptr = page_table_ptr + seq.to(tl.int64) * table_stride_s
        first_q_head = (seq.to(tl.int64) * UNITS + unit) * ROWS
        q_rows = first_q_head + offs_g[:, None]
        q_ptrs = q_ptr + q_rows * HEAD_DIM
        q_a = tl.load(q_ptrs + offs_i[None, :], mask=mask_g[:, None], other=0.0)
        q_b = tl.load(q_ptrs + NUM_LIVE + offs_i[None, :], mask=mask_g[:, None], other=0.0)
        q_c = tl.load(q_ptrs + 2 * NUM_LIVE + offs_c[None, :], mask=mask_g[:, None], other=0.0)
        q_d = tl.load(q_ptrs + 4 * NUM_LIVE + offs_d[None, :], mask=mask_g[:, None], other=0.0)
        row_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_G, BLOCK_N), tl.float32)
        acc_a = tl.zeros((BLOCK_G, NUM_LIVE), tl.float32)
        acc_b = tl.zeros((BLOCK_G, NUM_LIVE), tl.float32)
        acc_c = tl.zeros((BLOCK_G, 2 * NUM_LIVE), tl.float32)
        acc_d = tl.zeros((BLOCK_G, 4 * NUM_LIVE), tl.float32)
        key = first_key(kv_len, WINDOW, ALIGN) - table_start + first * BLOCK_T
        page_ids = look_up_pages(table_row_ptr, key, limit, offs_t, PAGE_TOKENS, ONE_PAGE)
        for _ in tl.range(0, num_tiles, num_stages=STAGES):
            valid = (key + offs_t >= oldest) & (key + offs_t < limit) if WINDOW > 0 else key + offs_t < limit
            row_ptrs = stored_rows(
                pages_ptr, page_ids, key, offs_t, unit * HEADS_PER_TILE + tile_heads, page_stride, layer_offset,
                PAGE_TOKENS, ROW_ELEMS, ONE_PAGE,
            )  # fmt: skip
            v_a, v_b, k_a, k_b = load_turning(
                row_ptrs, valid, table_start + key + offs_t, rotary_ptr, w_a, w_b,
                q_ptr.dtype.element_ty, NUM_LIVE, HEAD_DIM, V_ONLY,
            )  # fmt: skip
            rest_ptrs = row_ptrs[:, None] + 2 * NUM_LIVE
            v_c = tl.load(rest_ptrs + offs_c[None, :], mask=valid[:, None], other=0.0).to(q_a.dtype)
            v_d = tl.load(rest_ptrs + 2 * NUM_LIVE + offs_d[None, :], mask=valid[:, None], other=0.0).to(q_a.dtype)
            key += BLOCK_T
            page_ids = look_up_pages(table_row_ptr, key, limit, offs_t, PAGE_TOKENS, ONE_PAGE)
            # Two sums of equal length: one would be a chain of HEAD_DIM / 16 matrix instructions, each waiting for one.
            passing = tl.dot(q_d, tl.trans(v_d), input_precision="ieee")
            scores = tl.dot(q_c, tl.trans(v_c), input_precision="ieee")
            scores = tl.dot(q_a, tl.trans(k_a), scores, input_precision="ieee")
            scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision="ieee")
            scores = tl.where(valid[None, :] & own_head, (scores + passing) * LOG2E, float("-inf"))
            row_max, weights, scale = softmax_step(scores, row_max)
            # Summed over keys after the loop: a reduction over warps, two barriers, is saved in every tile.
            sums = sums * scale[:, None] + weights
            weights = weights.to(q_a.dtype)
            acc_a = tl.dot(weights, v_a, acc_a * scale[:, None], input_precision="ieee")
            acc_b = tl.dot(weights, v_b, acc_b * scale[:, None], input_precision="ieee")
            acc_c = tl.dot(weights, v_c, acc_c * scale[:, None], input_precision="ieee")
            acc_d = tl.dot(weights, v_d, acc_d * scale[:, None], input_precision="ieee")

        row_sum = tl.sum(sums, axis=1)
        # Passing dims [2n, 8n) in stored order: the first 3n are dims [n, 4n), the last 3n dims [5n, 8n).
        place_c = NUM_LIVE + offs_c[None, :]
        place_d = tl.where(offs_d < NUM_LIVE, 3 * NUM_LIVE + offs_d, 4 * NUM_LIVE + offs_d)[None, :]
        if num_tiles == seq_tiles:
            dtype = out_ptr.dtype.element_ty
            out_ptrs = out_ptr + q_rows * HEAD_DIM
            inverse = (1.0 / row_sum)[:, None]
            tl.store(out_ptrs + offs_i[None, :], (acc_a * inverse).to(dtype), mask=mask_g[:, None])
            tl.store(out_ptrs + HALF + offs_i[None, :], (acc_b * inverse).to(dtype), mask=mask_g[:, None])
            tl.store(out_ptrs + place_c, (acc_c * inverse).to(dtype), mask=mask_g[:, None])
            tl.store(out_ptrs + place_d, (acc_d * inverse).to(dtype), mask=mask_g[:, None])
        else:
            part = 2 * program.to(tl.int64) + (at > begin)
            stat_ptrs = part_stat_ptr + part * 2 * ROWS + offs_g
            tl.store(stat_ptrs, row_max, mask=mask_g)
            tl.store(stat_ptrs + ROWS, row_sum, mask=mask_g)
            part_rows = part_acc_ptr + (part * ROWS + offs_g[:, None]) * HEAD_DIM
            tl.store(part_rows + offs_i[None, :], acc_a, mask=mask_g[:, None])
            tl.store(part_rows + HALF + offs_i[None, :], acc_b, mask=mask_g[:, None])
            tl.store(part_rows + place_c, acc_c, mask=mask_g[:, None])
            tl.store(part_rows + place_d, acc_d, mask=mask_g[:, None])
            if FUSED:
                _join_if_last(
                    arrivals_ptr + seq * UNITS + unit, part_acc_ptr, part_stat_ptr, out_ptr + first_q_head * HEAD_DIM,
                    at - first, at - first + seq_tiles, total, num_programs, ROWS, BLOCK_G, HEAD_DIM, UNROLL,
                )  # fmt: skip
        at += num_tiles
        while (at < end) & (tl.load(first_tiles_ptr + seq + 1).to(tl.int64) * UNITS <= at):
            seq += 1

    if FUSED:
        _zero_blind_rows(first_tiles_ptr, out_ptr, num_seqs, NUM_KV_HEADS * GROUP, BLOCK_G, HEAD_DIM)


@triton.jit(do_not_specialize=["num_seqs", "grid_programs"])
def join_parts_kernel(
    first_tiles_ptr,
    part_acc_ptr,
    part_stat_ptr,
    out_ptr,  # [num_seqs, query heads, HEAD_DIM] contiguous
    num_seqs,
    grid_programs,  # of the kernel that left the parts
    UNITS: tl.constexpr,  # of one sequence
    ROWS: tl.constexpr,  # query heads of a unit
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,  # parts joined at a time
):
    """out[s, h] = sum_p 2^(m_p - m) acc_p / sum_p 2^(m_p - m) l_p over the parts of a unit that several programs share.

    A unit of one program is finished already; a sequence without keys gives 0. Grid: (num_seqs, query heads).
    """
    seq = tl.program_id(0)
    q_head = tl.program_id(1)
    row_idx = q_head % ROWS
    total = tl.load(first_tiles_ptr + num_seqs).to(tl.int64) * UNITS
    num_programs = programs_at_work(total, grid_programs)
    seq_first = tl.load(first_tiles_ptr + seq).to(tl.int64)
    seq_tiles = tl.load(first_tiles_ptr + seq + 1).to(tl.int64) - seq_first
    unit_begin = seq_first * UNITS + (q_head // ROWS) * seq_tiles
    unit_end = unit_begin + seq_tiles
    offs_d = tl.arange(0, HEAD_DIM)
    out_ptrs = out_ptr + (seq.to(tl.int64) * UNITS * ROWS + q_head) * HEAD_DIM + offs_d
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
                begins, _ = _range_of_program(programs, total, num_programs)
                present = programs <= last
                parts = 2 * programs + (begins < unit_begin)
                stat_ptrs = part_stat_ptr + parts * 2 * ROWS + row_idx
                maxima = tl.load(stat_ptrs, mask=present, other=float("-inf"))
                sums = tl.load(stat_ptrs + ROWS, mask=present, other=0.0)
                acc_ptrs = part_acc_ptr + (parts * ROWS + row_idx)[:, None] * HEAD_DIM + offs_d[None, :]
                shares = tl.load(acc_ptrs, mask=present[:, None], other=0.0)
                new_max = tl.maximum(row_max, tl.max(maxima, axis=0))
                factors = tl.exp2(maxima - new_max)
                scale = tl.exp2(row_max - new_max)
                row_sum = row_sum * scale + tl.sum(factors * sums, axis=0)
                acc = acc * scale + tl.sum(factors[:, None] * shares, axis=0)
                row_max = new_max
            tl.store(out_ptrs, (acc / row_sum).to(out_ptr.dtype.element_ty))
