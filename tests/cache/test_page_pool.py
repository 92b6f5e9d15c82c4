"""Reference counts and fill marks. A page freed twice or written under a reader is silent corruption."""

import pytest

from gewell.cache.page_pool import PagePool


def test_page_is_shared_until_its_last_reader_leaves():
    pool = PagePool(6)
    (page,) = pool.allocate(1)
    pool.touch([page])
    pool.free([page])
    assert pool.num_free_pages == 5
    assert pool.free([page]) == [page]
    assert pool.num_free_pages == 6


def test_pages_come_in_order_and_freed_ones_are_reused_first():
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([1])
    assert pool.allocate(2) == [1, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    assert not pool.can_allocate(1)


def test_a_page_without_readers_can_neither_be_freed_nor_touched():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.free(pages)
    for act in (pool.free, pool.touch, pool.touch_cached, pool.free_cached):
        with pytest.raises(RuntimeError, match="page 0"):
            act(pages)


def test_a_checkpoints_reference_cannot_be_freed_as_somebody_elses():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.touch_cached(pages)
    pool.free(pages)
    with pytest.raises(RuntimeError, match="page 0"):
        pool.free(pages)
    assert pool.free_cached(pages) == pages


def test_evictable_pages_are_those_that_only_checkpoints_hold():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.touch_cached(pages)
    assert pool.num_evictable_pages == 0
    pool.free(pages)
    assert pool.num_evictable_pages == 2
    pool.touch(pages[:1])
    assert pool.num_evictable_pages == 1
    pool.touch_cached(pages[:1])
    pool.free(pages[:1])
    assert pool.num_evictable_pages == 2
    pool.free_cached(pages)
    assert pool.num_evictable_pages == 1


def test_slots_beyond_the_mark_are_free_for_the_first_who_claims_them():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    assert pool.claim_slots(page, 0, 3)
    pool.touch([page])
    assert pool.claim_slots(page, 3, 8)  # shared, but nobody wrote there
    assert not pool.claim_slots(page, 3, 8)
    pool.unclaim(page, 5)
    assert not pool.can_claim(page, 4)
    assert pool.can_claim(page, 5)
    pool.free([page])
    version = pool.version(page)
    assert pool.claim_slots(page, 1, 8)  # alone: may write over what stood there
    assert pool.version(page) != version


def test_freed_pages_are_told_once_for_poisoning():
    pool = PagePool(3, record_freed=True)
    pages = pool.allocate(2)
    pool.free(pages)
    again = pool.allocate(1)
    pool.free(again)
    assert sorted(pool.drain_freed()) == pages
    assert pool.drain_freed() == []


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(0)
