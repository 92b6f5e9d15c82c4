"""Token sampling by Gumbel-argmax with exact top-k, top-p and min-p cuts, without sorting the vocabulary.

A cut is a threshold on logits, found by bisection over the integers that order floats. What makes it cheap: the maxima
of chunks of 256 logits. If k chunks have a maximum >= t, then at least k logits are >= t, so the k-th largest chunk
maximum is a lower bound of the k-th largest logit, and only chunks that reach it need to be looked at again: 64 of 1024
for top-k 64. What they hold above the bound usually fits the registers of one program, and the bisection runs there.

Where top-p alone cuts and those chunks do not hold its share, the draw goes first: the argmax over a superset of the
kept ids is the draw if it is kept itself, and whether it is takes one sum over the row. Else everything at or below it
is out, and the draw is repeated; the first is kept with probability top_p at least.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gewell_kernels._checks import check_contiguous, check_dtype, check_shape

_CHUNK = 256
_CHUNKS_PER_TILE = 16
_CAPACITY = 4096  # candidates that fit the registers of one program
# Without top-k the nucleus is looked for among this many chunks first; flatter distributions take the slow path.
_NUCLEUS_CHUNKS = 256


@triton.jit
def _chunk_maxima_kernel(
    logits_ptr,
    maxima_ptr,  # [rows, num_chunks]
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,  # chunks per program
):
    """maxima[r, c] = max of logits[r, 256 c : 256 (c + 1)]; NaN is passed over."""
    row = tl.program_id(1).to(tl.int64)
    chunks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ids = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits_ptr + row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
    tl.store(maxima_ptr + row * num_chunks + chunks, tl.max(x, axis=1), mask=chunks < num_chunks)


@triton.jit
def _ordered(x):
    """Signed integers in the order of the floats; an involution on the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low, high):
    """Upper middle of int64 bounds: a search that keeps `low` true ends at the largest true value."""
    return high - (high - low) // 2


@triton.jit
def _kth_largest(keys, k, low, high):
    """A t in [low, high] that parts the k largest from the rest: the k-th itself, or a smaller one with no key between.

    count(keys >= low) >= k holds at the start; a t with exactly k keys at or above ends the search early.
    """
    while low < high:
        middle = _middle(low, high)
        count = tl.sum((keys >= middle).to(tl.int32), axis=0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count == k, middle, tl.where(count > k, high, middle - 1))
    return low


@triton.jit
def _nucleus_floor(keys, weights, needed, low, high):
    """Largest t in [low, high] whose keys >= t weigh `needed` at least, which holds for low."""
    while low < high:
        middle = _middle(low, high)
        enough = tl.sum(tl.where(keys >= middle, weights, 0.0), axis=0) >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _tile_of_chunks(row_ptr, chunk_list_ptr, at, num_listed, vocab_size, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Logits [TILE, CHUNK] of the listed chunks from `at` on, -inf past the list's or the vocabulary's end; ids."""
    slots = at + tl.arange(0, TILE)
    chunks = tl.load(chunk_list_ptr + slots, mask=slots < num_listed, other=0)
    ids = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    mask = (slots < num_listed)[:, None] & (ids < vocab_size)
    return tl.load(row_ptr + ids, mask=mask, other=float("-inf")), ids


@triton.jit
def _tally(
    row_ptr, chunk_list_ptr, num_listed, vocab_size, floor, top, inverse_heat, CHUNK: tl.constexpr, TILE: tl.constexpr
):
    """Count and weight of the listed chunks' logits at or above a floor (ordered integer)."""
    counts = tl.zeros((TILE,), tl.int32)
    weights = tl.zeros((TILE,), tl.float32)
    for at in range(0, num_listed, TILE):
        x, _ = _tile_of_chunks(row_ptr, chunk_list_ptr, at, num_listed, vocab_size, CHUNK, TILE)
        kept = (_ordered(x) >= floor) & (x > float("-inf"))
        counts += tl.sum(kept.to(tl.int32), axis=1)
        weights += tl.sum(tl.where(kept, tl.exp((x - top) * inverse_heat), 0.0), axis=1)
    return tl.sum(counts, axis=0), tl.sum(weights, axis=0)


@triton.jit
def _search_chunks(
    row_ptr, chunk_list_ptr, num_listed, vocab_size, low, high, top, inverse_heat, k, needed,
    BY_COUNT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The search of `_kth_largest` or `_nucleus_floor` by whole passes over the listed chunks: slow, for any number."""
    while low < high:
        middle = _middle(low, high)
        count, weight = _tally(row_ptr, chunk_list_ptr, num_listed, vocab_size, middle, top, inverse_heat, CHUNK, TILE)
        enough = count >= k if BY_COUNT else weight >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _gumbel(x):
    """-log(-log u) for u = (x + 0.5) 2^-32, x uint32. Near u = 1, where winners come from, by 1 - u, which is exact."""
    near_one = x >= 0x80000000
    small = (tl.where(near_one, x ^ 0xFFFFFFFF, x).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    sum_ = 1.0 - small
    excess = sum_ - 1.0
    # log(1 - small) without cancellation (Kahan): log(s) * -small / (s - 1) for s = float(1 - small).
    log1p = tl.where(excess == 0.0, -small, tl.log(sum_) * (-small / tl.where(excess == 0.0, 1.0, excess)))
    return -tl.log(-tl.where(near_one, log1p, tl.log(small)))


@triton.jit
def _noise(seed, position, first_ids, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Gumbel noise [TILE, CHUNK] of the chunks that start at first_ids: one Philox block serves four neighbours."""
    block = first_ids[:, None] // 4 + tl.arange(0, CHUNK // 4)[None, :]
    zero = block * 0
    x0, x1, x2, x3 = tl.philox(seed, block, zero + position.to(tl.int32), zero, zero)
    # Innermost axes (high bit, low bit) of the lane.
    lanes = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return _gumbel(tl.reshape(lanes, (TILE, CHUNK)))


@triton.jit
def _sample_kernel(
    logits_ptr,
    maxima_ptr,  # [rows, num_chunks]
    chunk_list_ptr,  # [rows, num_chunks] int32, scratch
    candidates_ptr,  # [rows, CAPACITY] float32, scratch
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    out_ptr,
    vocab_size,
    num_chunks,
    NUCLEUS_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_C: tl.constexpr,  # power of two >= num_chunks
):
    """out[r] = argmax over kept ids of logits / temperature + noise; see `ops.sample` for what is kept."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * vocab_size
    chunk_list_ptr += row * num_chunks
    candidates_ptr += row * CAPACITY
    offs_c = tl.arange(0, BLOCK_C)
    is_chunk = offs_c < num_chunks
    maxima = tl.load(maxima_ptr + row * num_chunks + offs_c, mask=is_chunk, other=float("-inf"))
    top = tl.maximum(tl.max(maxima, axis=0), -3.4e38)  # finite also where all logits are NaN or -inf
    temperature = tl.load(temperature_ptr + row)

    if temperature == 0.0:
        ids = tl.argmax(maxima, axis=0) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        tl.store(out_ptr + row, tl.min(tl.where(x == top, ids, vocab_size - 1), axis=0).to(tl.int64))
    else:
        inverse_heat = 1.0 / temperature
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        cuts_k = (top_k > 0) & (top_k < vocab_size)
        cuts_p = top_p < 1.0

        # Which chunks can hold kept logits: all, or those that reach the k-th largest maximum.
        maxima_keys = _ordered(maxima)
        lowest = tl.min(tl.where(is_chunk, maxima_keys, 0x7FFFFFFF), axis=0).to(tl.int64)
        highest = _ordered(top).to(tl.int64)
        num_needed = tl.where(cuts_k, top_k, NUCLEUS_CHUNKS)
        nothing = lowest * 0 - 0x80000000
        bound = nothing
        if (cuts_k | cuts_p) & (num_needed <= num_chunks):
            bound = _kth_largest(maxima_keys, num_needed, lowest, highest)
        listed = is_chunk & (maxima_keys >= bound)
        num_listed = tl.sum(listed.to(tl.int32), axis=0)
        tl.store(chunk_list_ptr + tl.cumsum(listed.to(tl.int32), axis=0) - 1, offs_c, mask=listed)
        tl.debug_barrier()

        floor = bound
        needed = 0.0
        draws_first = False
        if cuts_k | cuts_p:
            num_candidates = 0
            for at in range(0, num_listed, TILE):
                x, _ = _tile_of_chunks(row_ptr, chunk_list_ptr, at, num_listed, vocab_size, CHUNK, TILE)
                x = tl.reshape(x, (TILE * CHUNK,))
                is_candidate = (_ordered(x) >= bound) & (x > float("-inf"))
                places = num_candidates + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
                tl.store(candidates_ptr + places, x, mask=is_candidate & (places < CAPACITY))
                num_candidates += tl.sum(is_candidate.to(tl.int32), axis=0)
            tl.debug_barrier()
            offs_n = tl.arange(0, CAPACITY)
            present = offs_n < num_candidates
            x = tl.load(candidates_ptr + offs_n, mask=present, other=float("-inf"))
            keys = tl.where(present, _ordered(x), -0x7FFFFFFF)
            fits = num_candidates <= CAPACITY
            if cuts_k:
                if fits:
                    floor = _kth_largest(keys, top_k, bound, highest)
                else:
                    floor = _search_chunks(
                        row_ptr, chunk_list_ptr, num_listed, vocab_size, bound, highest, top, inverse_heat, top_k, 0.0,
                        True, CHUNK, TILE,
                    )  # fmt: skip
            if cuts_p:
                weights = tl.where(present & (keys >= floor), tl.exp((x - top) * inverse_heat), 0.0)
                mass = tl.sum(weights, axis=0)
                needed = mass * top_p
                if not cuts_k:
                    # The share is one of the whole row.
                    tl.debug_barrier()
                    tl.store(chunk_list_ptr + offs_c, offs_c, mask=is_chunk)
                    tl.debug_barrier()
                    _, whole = _tally(
                        row_ptr, chunk_list_ptr, num_chunks, vocab_size, nothing, top, inverse_heat, CHUNK, TILE
                    )
                    needed = whole * top_p
                    fits = fits & (mass >= needed)
                if fits:
                    floor = _nucleus_floor(keys, weights, needed, floor, highest)
                elif cuts_k:
                    _, mass = _tally(
                        row_ptr, chunk_list_ptr, num_listed, vocab_size, floor, top, inverse_heat, CHUNK, TILE
                    )
                    floor = _search_chunks(
                        row_ptr, chunk_list_ptr, num_listed, vocab_size, floor, highest, top, inverse_heat, 0,
                        mass * top_p, False, CHUNK, TILE,
                    )  # fmt: skip
                else:
                    floor = nothing
                    draws_first = True
        if min_p > 0.0:
            lowest_kept = top + temperature * tl.log(min_p)
            floor = tl.maximum(floor, _ordered(lowest_kept).to(tl.int64))

        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        best_id = 0
        is_open = True
        while is_open:
            # Chunks that reach the floor, in the order of ids, so that equal sums go to the lowest.
            listed = is_chunk & (maxima_keys >= floor)
            num_listed = tl.sum(listed.to(tl.int32), axis=0)
            tl.debug_barrier()
            tl.store(chunk_list_ptr + tl.cumsum(listed.to(tl.int32), axis=0) - 1, offs_c, mask=listed)
            tl.debug_barrier()
            best = float("-inf")
            best_logit = top
            for at in range(0, num_listed, TILE):
                x, ids = _tile_of_chunks(row_ptr, chunk_list_ptr, at, num_listed, vocab_size, CHUNK, TILE)
                noise = _noise(seed, position, tl.min(ids, axis=1), TILE, CHUNK)
                kept = (_ordered(x) >= floor) & (x > float("-inf"))
                noisy = tl.where(kept, x * inverse_heat + noise, float("-inf"))
                tile_best = tl.max(tl.max(noisy, axis=1), axis=0)
                is_best = noisy == tile_best
                tile_id = tl.min(tl.min(tl.where(is_best, ids, vocab_size), axis=1), axis=0)
                tile_logit = tl.max(tl.max(tl.where(is_best & (ids == tile_id), x, float("-inf")), axis=1), axis=0)
                best_id = tl.where(tile_best > best, tile_id, best_id)
                best_logit = tl.where(tile_best > best, tile_logit, best_logit)
                best = tl.maximum(best, tile_best)
            is_open = False
            if draws_first:
                above = _ordered(best_logit).to(tl.int64) + 1
                _, weight = _tally(
                    row_ptr, chunk_list_ptr, num_listed, vocab_size, above, top, inverse_heat, CHUNK, TILE
                )
                if weight >= needed:
                    floor = above
                    is_open = True
        tl.store(out_ptr + row, best_id)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """See `gewell_kernels.ops.sample`."""
    check_dtype("logits", logits, (torch.float32,))
    check_shape("logits", logits, (None, None))
    check_contiguous("logits", logits)
    rows, vocab_size = logits.shape
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
    ):
        check_dtype(name, tensor, (dtype,))
        check_shape(name, tensor, (rows,))
        check_contiguous(name, tensor)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    maxima = torch.empty(rows, num_chunks, dtype=torch.float32, device=logits.device)
    chunk_list = torch.empty(rows, num_chunks, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(rows, _CAPACITY, dtype=torch.float32, device=logits.device)
    _chunk_maxima_kernel[(triton.cdiv(num_chunks, _CHUNKS_PER_TILE), rows)](
        logits, maxima, vocab_size, num_chunks, CHUNK=_CHUNK, TILE=_CHUNKS_PER_TILE, num_warps=8
    )
    _sample_kernel[(rows,)](
        logits,
        maxima,
        chunk_list,
        candidates,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        out,
        vocab_size,
        num_chunks,
        NUCLEUS_CHUNKS=_NUCLEUS_CHUNKS,
        CAPACITY=_CAPACITY,
        CHUNK=_CHUNK,
        TILE=2 * _CHUNKS_PER_TILE,
        BLOCK_C=triton.next_power_of_2(num_chunks),
        num_warps=16,
    )
    return out
