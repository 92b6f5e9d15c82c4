"""A wrong page table makes one user's tokens attend to another user's text. Small worlds, checked by hand.

World: full pages of 8 tokens, sliding pages of 4, window 6 (a query reads 5 earlier keys), slack 4.
"""

import time

import pytest

from gewell.cache.geometry import KindGeometry, KVGeometry
from gewell.cache.page_pool import PagePool
from gewell.cache.sequence_pages import HOLE, ResumePoint, SequencePages, append_decode

GEOMETRY = KVGeometry(
    page_bytes=64,
    sliding=KindGeometry(page_tokens=4, bytes_per_token=16),
    full=KindGeometry(page_tokens=8, bytes_per_token=8),
    sliding_window=6,
    slack_tokens=4,
)


def grown(pool: PagePool, *chunks: int) -> SequencePages:
    sequence = SequencePages(pool, GEOMETRY)
    for chunk in chunks:
        assert sequence.append(chunk) is not None
        sequence.trim()
    return sequence


def test_each_token_gets_its_own_slot_in_both_kinds():
    pool = PagePool(6)
    sequence = SequencePages(pool, GEOMETRY)
    appended = sequence.append(5)
    assert appended is not None
    assert sequence.full_pages == [0]
    assert sequence.sliding_pages == [1, 2]
    assert list(appended.full_slots) == [0, 1, 2, 3, 4]
    assert list(appended.sliding_slots) == [4, 5, 6, 7, 8]
    assert appended.copies == ()
    appended = sequence.append(4)
    assert appended is not None
    assert list(appended.full_slots) == [5, 6, 7, 3 * 8]
    assert list(appended.sliding_slots) == [9, 10, 11, 4 * 4]


def test_a_long_chunk_stores_sliding_tokens_only_where_they_will_be_read():
    pool = PagePool(8)
    sequence = SequencePages(pool, GEOMETRY)
    assert sequence.num_pages_needed(20) == 3 + 2
    appended = sequence.append(20)  # the next query stands at 20 and reads from 15 on
    assert appended is not None
    assert sequence.sliding_start == 12
    assert sequence.sliding_pages == [3, 4]
    assert list(appended.sliding_slots) == [-1] * 15 + [15, 16, 17, 18, 19]
    assert list(appended.full_slots) == list(range(20))


def test_a_checkpoint_inside_a_chunk_keeps_its_window_and_leaves_a_hole():
    pool = PagePool(12)
    sequence = SequencePages(pool, GEOMETRY)
    appended = sequence.append(32, keep_positions=[12])  # window of 12 is 7..11, with slack from 3 on
    assert appended is not None
    slots = list(appended.sliding_slots)
    assert [i for i, slot in enumerate(slots) if slot >= 0] == [*range(3, 12), *range(27, 32)]
    assert sequence.sliding_start == 0
    assert [page == HOLE for page in sequence.sliding_pages] == [False] * 3 + [True] * 3 + [False] * 2
    point = sequence.point_at(12)
    assert point is not None
    assert (point.position, point.sliding_start, point.sliding_valid) == (12, 0, 3)
    assert list(point.sliding_pages) == sequence.sliding_pages[:3]
    assert sequence.point_at(20) is None  # lies in the hole
    assert sequence.point_at(29) is None  # its window would begin in the hole
    assert sequence.point_at(32) is not None
    sequence.trim()
    assert sequence.sliding_start == 24
    assert sequence.point_at(12) is None
    sequence.release()
    assert pool.num_free_pages == 12


def test_pages_past_the_window_return_to_the_pool():
    pool = PagePool(20)
    sequence = SequencePages(pool, GEOMETRY)
    sequence.append(8)
    assert sequence.trim() == []  # position 8 reads 3..7
    sequence.append(1)
    first = sequence.sliding_pages[0]
    assert sequence.trim() == [first]  # position 9 reads 4..8
    assert sequence.sliding_start == 4


def test_no_room_changes_nothing():
    pool = PagePool(3)
    sequence = grown(pool, 5)
    before = (list(sequence.full_pages), list(sequence.sliding_pages), sequence.num_tokens, pool.num_free_pages)
    assert sequence.num_pages_needed(4) == 2
    assert sequence.append(4) is None
    assert before == (sequence.full_pages, sequence.sliding_pages, sequence.num_tokens, pool.num_free_pages)


def test_the_first_to_write_continues_in_place_and_the_second_copies():
    pool = PagePool(12)
    parent = grown(pool, 5)
    child = parent.fork()
    assert child is not None
    full, sliding = parent.full_pages[0], parent.sliding_pages[1]
    appended = parent.append(1)  # has claimed the rest of its open pages
    assert appended is not None
    assert appended.copies == ()
    appended = child.append(1)
    assert appended is not None
    assert appended.copies == ((full, child.full_pages[0]), (sliding, child.sliding_pages[1]))
    assert child.full_pages != parent.full_pages
    assert child.sliding_pages[0] == parent.sliding_pages[0]
    parent.release()
    child.release()
    assert pool.num_free_pages == 12


def test_a_source_of_a_copy_stays_held_until_the_next_call():
    pool = PagePool(12)
    parent = grown(pool, 5)
    child = parent.fork()
    assert child is not None
    appended = child.append(1)
    assert appended is not None
    sources = [source for source, _ in appended.copies]
    parent.release()
    assert [pool.ref_cnt(page) for page in sources] == [1, 1]
    assert set(child.trim()) == set(sources)


def test_after_the_writer_has_left_the_rest_of_its_page_is_free_for_the_next():
    pool = PagePool(12)
    parent = grown(pool, 5)
    child = parent.fork()
    assert child is not None
    parent.release()
    other = child.fork()
    assert other is not None
    appended = child.append(1)  # shared with `other`, but nobody wrote beyond slot 5
    assert appended is not None
    assert appended.copies == ()
    again = other.append(1)
    assert again is not None
    assert len(again.copies) == 2


def test_a_resumed_sequence_holds_its_pages_beyond_the_life_of_its_parent():
    pool = PagePool(12)
    parent = grown(pool, 9)
    point = parent.point_at(9)
    assert point is not None
    child = SequencePages(pool, GEOMETRY, point)
    parent.release()
    assert pool.num_free_pages == 12 - len(child.full_pages) - len(child.sliding_pages)
    child.release()
    assert pool.num_free_pages == 12


def test_a_point_before_the_stored_window_is_refused():
    sequence = grown(PagePool(20), 20)
    assert sequence.point_at(16) is None
    assert sequence.point_at(21) is None
    assert sequence.point_at(0) is None


def test_a_model_with_one_kind_of_layers_works():
    full_only = KVGeometry(page_bytes=64, sliding=None, full=KindGeometry(page_tokens=4, bytes_per_token=16))
    sequence = SequencePages(PagePool(4), full_only)
    appended = sequence.append(6)
    assert appended is not None
    assert list(appended.full_slots) == [0, 1, 2, 3, 4, 5]
    assert not appended.sliding_slots
    assert sequence.point_at(5) == ResumePoint(5, sequence.full_pages, (), 5, 0)
    sliding_only = KVGeometry(
        page_bytes=64, full=None, sliding=KindGeometry(page_tokens=4, bytes_per_token=16), sliding_window=6
    )
    sequence = SequencePages(PagePool(4), sliding_only)
    appended = sequence.append(6)
    assert appended is not None
    assert not appended.full_slots
    assert list(appended.sliding_slots) == [-1, 1, 2, 3, 4, 5]  # position 6 reads 1..5
    assert append_decode([sequence], full := [], sliding := []) == ([], 1, [])
    assert sliding == [6]
    assert len(full) == 1


def test_decode_slots_lie_in_the_row_s_own_tables_and_old_pages_return():
    pool = PagePool(64)
    rows = [grown(pool, n) for n in (3, 5, 9, 20)]
    for _ in range(17):
        full: list[int] = []
        sliding: list[int] = []
        positions = [row.num_tokens for row in rows]
        tables = [(list(row.full_pages), list(row.sliding_pages)) for row in rows]
        copies, num_served, changed = append_decode(rows, full, sliding)
        assert (copies, num_served) == ([], 4)
        after = [(row.full_pages, row.sliding_pages) for row in rows]
        assert changed == [i for i in range(4) if tables[i] != after[i]]
        for row, at, full_slot, sliding_slot in zip(rows, positions, full, sliding, strict=True):
            assert full_slot == row.full_pages[at // 8] * 8 + at % 8
            assert sliding_slot == row.sliding_pages[(at - row.sliding_start) // 4] * 4 + at % 4
            assert len(row.sliding_pages) <= 3  # a window of 6 touches three pages of 4 at most
    held = [page for row in rows for page in [*row.full_pages, *row.sliding_pages]]
    assert len(set(held)) == len(held)
    assert pool.num_free_pages == 64 - len(held)


def test_a_decode_step_stops_at_the_row_that_finds_no_page():
    pool = PagePool(5)
    a, b = grown(pool, 4), grown(pool, 4)
    full: list[int] = []
    sliding: list[int] = []
    assert pool.num_free_pages == 1
    assert append_decode([a, b], full, sliding).num_served == 1
    assert (a.num_tokens, b.num_tokens, len(full), len(sliding)) == (5, 4, 1, 1)


def test_a_decode_step_of_512_rows_is_planned_in_a_fraction_of_a_millisecond():
    geometry = KVGeometry.build(sliding_bytes_per_token=819_200, full_bytes_per_token=40_960, sliding_window=1024)
    pool = PagePool(20_000)
    rows = [SequencePages(pool, geometry) for _ in range(512)]
    for at, row in enumerate(rows):
        row.append(100 + at)  # so that page boundaries fall on all steps alike
    best = float("inf")
    for _ in range(40):
        full: list[int] = []
        sliding: list[int] = []
        begin = time.thread_time()
        append_decode(rows, full, sliding)
        best = min(best, time.thread_time() - begin)
    assert best < 1.5e-3  # 0.2-0.3 ms on one idle core; the bound allows for a busy machine


@pytest.mark.parametrize(
    ("sliding", "full", "page_tokens"),
    [
        (819_200, 40_960, (16, 320)),  # Gemma 4 31B, bf16
        (204_800, 10_240, (16, 320)),  # 26B-A4B
        (416_000, 20_640, (16, 320)),  # 31B, fp8 with a scale a row: 322 fit, rounded to whole tiles
        (851_968, 163_840, (16, 80)),  # Gemma 3 27B, K and V in full layers: 83 fit
        (1024, 4096, (64, 16)),
        (0, 4096, (None, 16)),
        (4096, 0, (16, None)),
    ],
)
def test_each_kind_takes_what_fits_a_page(sliding, full, page_tokens):
    geometry = KVGeometry.build(sliding_bytes_per_token=sliding, full_bytes_per_token=full, sliding_window=1024)
    found = tuple(kind and kind.page_tokens for kind in (geometry.sliding, geometry.full))
    assert found == page_tokens
    assert geometry.page_bytes == 16 * max(sliding, full)
