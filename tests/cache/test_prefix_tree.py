"""The index that says which prompts share what. A false match is a cross-tenant leak; a missed one a lost prefill."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gewell.cache.prefix_tree import ImageRun, Node, PrefixTree, common_depth, encode_key

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def spelled(node: Node) -> list[int]:
    return list(array("i", b"".join(x.key for x in reversed(list(node.path())))))


@settings(deadline=None)
@given(PROMPTS)
def test_every_prompt_is_found_again_and_shares_exactly_the_common_prefix(prompts):
    tree = PrefixTree()
    root = tree.root(None)
    leaves = [tree.insert(root, encode_key(ids)) for ids in prompts]
    for ids, leaf in zip(prompts, leaves, strict=True):
        assert spelled(leaf) == ids
        assert leaf.end == len(ids)
        assert tree.walk(root, encode_key(ids)) == (leaf, len(ids))
    for a, leaf_a in zip(prompts, leaves, strict=True):
        for b, leaf_b in zip(prompts, leaves, strict=True):
            common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            assert common_depth(leaf_a, leaf_b) == common
    nodes = list(tree.nodes())
    assert tree.num_tokens == sum(len(node.key) // 4 for node in nodes)
    assert tree.num_nodes == len(nodes)


@settings(deadline=None)
@given(PROMPTS, st.lists(st.integers(0, 2), min_size=1, max_size=14))
def test_a_walk_finds_the_longest_known_prefix(prompts, query):
    tree = PrefixTree()
    root = tree.root(None)
    for ids in prompts:
        tree.insert(root, encode_key(ids))
    longest = max(
        next((i for i, (x, y) in enumerate(zip(ids, query, strict=False)) if x != y), min(len(ids), len(query)))
        for ids in prompts
    )
    node, known = tree.walk(root, encode_key(query))
    assert known == longest
    assert spelled(node) == query[: node.end]


def test_a_difference_far_into_a_long_segment_is_found_to_the_token():
    rng = random.Random(1)
    ids = [rng.randrange(262_144) for _ in range(30_000)]
    tree = PrefixTree()
    root = tree.root(None)
    leaf = tree.insert(root, encode_key(ids))
    for at in (0, 1, 1023, 1024, 17_777, 29_999):
        other = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
        assert common_depth(tree.insert(root, encode_key(other)), leaf) == at


def test_a_split_keeps_what_is_known_of_the_lower_part():
    tree = PrefixTree()
    leaf = tree.insert(tree.root(None), encode_key([1, 2, 3, 4]))
    leaf.seen, leaf.owner, leaf.num_waiting = True, "c", 2
    upper = tree.node_at(leaf, 2)
    assert (upper.end, upper.seen, upper.owner, upper.num_waiting) == (2, True, "c", 2)
    assert leaf.parent is upper
    assert spelled(leaf) == [1, 2, 3, 4]
    assert tree.node_at(leaf, 4) is leaf


def test_salts_have_roots_of_their_own_and_empty_ones_are_forgotten():
    tree = PrefixTree()
    a, b = (tree.insert(tree.root(salt), encode_key([1, 2])) for salt in ("a", "b"))
    assert a is not b
    assert common_depth(a, b) == 0
    for n in range(1000):
        tree.prune_path(tree.insert(tree.root(str(n)), encode_key([1])))
    assert len(tree._roots) < 200
    assert tree.root("a").children


def test_equal_images_share_and_different_ones_do_not():
    ids = [5, 9, 9, 9, 9, 6]
    cat, dog = (encode_key(ids, [ImageRun(1, 5, digest)]) for digest in (b"cat", b"dog"))
    assert cat == encode_key(ids, [ImageRun(1, 5, b"cat")])
    assert cat[:4] == dog[:4]
    assert cat[4:8] != dog[4:8]
    assert cat[20:] == dog[20:]
    assert all(token < 0 for token in array("i", cat)[1:5])  # no text token can look like it


def test_old_history_is_forgotten_and_what_is_in_use_is_not():
    tree = PrefixTree(max_tokens=1000)
    root = tree.root(None)
    kept = tree.insert(root, encode_key([0] * 100))
    kept.num_users = 1
    for n in range(1, 20):
        node = tree.insert(root, encode_key([n] * 100))
        node.seen, node.touched = True, n
        tree.shrink()
        assert tree.num_tokens <= 1000
    assert tree.walk(root, encode_key([0] * 100))[1] == 100
    assert tree.walk(root, encode_key([19] * 100))[1] == 100
    assert tree.walk(root, encode_key([3] * 100))[1] == 0


def test_keys_of_arrays_and_lists_are_the_same():
    assert encode_key([1, 70_000, 262_143]) == encode_key(array("i", [1, 70_000, 262_143]))
    assert encode_key(array("q", [1, 2])) == encode_key([1, 2])
    with pytest.raises(OverflowError):
        encode_key([1 << 31])


def test_many_short_prompts_are_bounded_by_nodes():
    tree = PrefixTree(max_nodes=100)
    root = tree.root(None)
    for n in range(1000):
        node = tree.insert(root, encode_key([n, 1]))
        node.seen, node.touched = True, n
        tree.shrink()
        assert tree.num_nodes <= 100
    assert tree.walk(root, encode_key([999, 1]))[1] == 2
