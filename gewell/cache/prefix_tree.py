"""A radix tree over prompts: which of them share which leading tokens. Holds no pages.

A prompt's *key* is 4 bytes a token, little-endian int32: token ids, and inside an image run negative numbers drawn from
the image's digest, so that equal keys mean equal content. A tenant's salt chooses the root: different salts never
meet. Keys are compared by `bytes` operations (memcmp); there are no objects per token. A node costs about 0.4 kB beside
its tokens, so the index takes 4-6 bytes a token with segments of a few hundred tokens.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gewell.cache.checkpoints import Checkpoint

TOKEN_BYTES = 4
_NO_CHILDREN: dict[bytes, "Node"] = {}  # of every leaf, never written: an own dict would cost more than the node
_BLOCK = 4096  # bytes compared at once when looking for the first difference


class ImageRun:
    """Tokens [start, end) of a prompt that stand for an image. digest covers its bytes and the processor's settings."""

    __slots__ = ("digest", "end", "start")

    def __init__(self, start: int, end: int, digest: bytes) -> None:
        self.start = start
        self.end = end
        self.digest = digest


def encode_key(ids: Sequence[int], images: Sequence[ImageRun] = ()) -> bytes:
    """The key of a prompt. Image tokens get 31 bits each of a stream seeded by the image's digest."""
    key = ids if isinstance(ids, array) and ids.itemsize == TOKEN_BYTES and not images else array("i", ids)
    for run in images:
        count = run.end - run.start
        stream = array("I", hashlib.shake_256(run.digest).digest(TOKEN_BYTES * count))
        key[run.start : run.end] = array("i", [-1 - (word >> 1) for word in stream])
    if sys.byteorder == "big":
        key = array("i", key)
        key.byteswap()
    return key.tobytes()


class Node:
    """A run of tokens [start, end) after its parent's.

    seen             some sequence has computed these tokens
    owner            conversation of the last sequence that went through
    num_checkpoints  checkpoints at this node's end and below
    num_waiting      waiting requests whose prompt goes through the whole node
    num_users        live requests whose leaf this is: it must not be pruned
    planned          running request that will take a checkpoint at this node's end
    """

    __slots__ = (
        "checkpoint",
        "children",
        "end",
        "key",
        "num_checkpoints",
        "num_users",
        "num_waiting",
        "owner",
        "parent",
        "planned",
        "seen",
        "touched",
    )

    def __init__(self, parent: "Node | None", key: bytes, end: int) -> None:
        self.parent = parent
        self.key = key
        self.end = end
        self.children = _NO_CHILDREN
        self.checkpoint: Checkpoint | None = None
        self.planned: str | None = None
        self.seen = False
        self.owner: str | None = None
        self.num_checkpoints = self.num_waiting = self.num_users = 0
        self.touched = 0

    @property
    def start(self) -> int:
        return self.end - len(self.key) // TOKEN_BYTES

    def path(self) -> Iterator["Node"]:
        """This node and its ancestors, deepest first, without the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def add_child(self, child: "Node") -> None:
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[child.key[:TOKEN_BYTES]] = child


class PrefixTree:
    """Prompts and answers by content. `num_tokens` counts the tokens held; what passes the limits is forgotten."""

    def __init__(self, max_tokens: int = 10_000_000, max_nodes: int = 50_000) -> None:
        self.max_tokens = max_tokens
        self.max_nodes = max_nodes
        self.num_tokens = 0
        self.num_nodes = 0
        self._roots: dict[str | None, Node] = {}
        self._max_roots = 64

    def root(self, salt: str | None) -> Node:
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= self._max_roots:  # salts that hold nothing any more
                self._roots = {salt: root for salt, root in self._roots.items() if root.children}
                self._max_roots = max(64, 2 * len(self._roots))
            root = self._roots[salt] = Node(None, b"", 0)
        return root

    def insert(self, start: Node, key: bytes) -> Node:
        """The node whose path below `start` (a root, or a known prefix) spells exactly `key`.

        What is missing is added, an edge may be split.
        """
        node, at, length = start, 0, len(key)
        while at < length:
            first = key[at : at + TOKEN_BYTES]
            child = node.children.get(first)
            if child is None:
                child = Node(node, key[at:], node.end + (length - at) // TOKEN_BYTES)
                node.add_child(child)
                self.num_tokens += (length - at) // TOKEN_BYTES
                self.num_nodes += 1
                return child
            if key.startswith(child.key, at):
                at += len(child.key)
                node = child
            else:
                common = _common_tokens(key, at, child.key)
                node = self.split(child, node.end + common)
                at += common * TOKEN_BYTES
        return node

    def walk(self, root: Node, key: bytes) -> tuple[Node, int]:
        """The deepest node whose whole path is a prefix of `key`, and how many leading tokens of the key are known."""
        node, at, length = root, 0, len(key)
        child: Node | None
        while at < length:
            child = node.children.get(key[at : at + TOKEN_BYTES])
            if child is None:
                break
            if not key.startswith(child.key, at):
                return node, node.end + _common_tokens(key, at, child.key)
            at += len(child.key)
            node = child
        return node, node.end

    def split(self, node: Node, position: int) -> Node:
        """Cut `node` at `position`, inside it; returns the new upper part. `node` stays the lower part."""
        assert node.parent is not None
        cut = (position - node.start) * TOKEN_BYTES
        upper = Node(node.parent, node.key[:cut], position)
        upper.seen, upper.owner, upper.touched = node.seen, node.owner, node.touched
        upper.num_checkpoints, upper.num_waiting = node.num_checkpoints, node.num_waiting
        node.parent.add_child(upper)
        node.key = node.key[cut:]
        node.parent = upper
        upper.add_child(node)
        self.num_nodes += 1
        return upper

    def node_at(self, leaf: Node, position: int) -> Node:
        """The node on the leaf's path that ends exactly at `position`, splitting one if need be."""
        node = leaf
        while node.parent is not None and node.parent.end >= position:
            node = node.parent
        return node if node.end == position else self.split(node, position)

    def prune_path(self, leaf: Node) -> None:
        """Remove the leaf and what hangs on nothing else above it, as long as nobody needs it or has computed it."""
        node: Node | None = leaf
        while node is not None and node.parent is not None and not node.seen and _is_prunable(node):
            node = self._remove(node)

    def shrink(self) -> None:
        """Forget the longest untouched history when the index has outgrown its limits; checkpoints stay."""
        if self.num_tokens <= self.max_tokens and self.num_nodes <= self.max_nodes:
            return
        max_tokens, max_nodes = self.max_tokens - self.max_tokens // 8, self.max_nodes - self.max_nodes // 8
        while self.num_tokens > max_tokens or self.num_nodes > max_nodes:
            leaves = sorted((n for n in self.nodes() if _is_prunable(n)), key=lambda n: n.touched)
            if not leaves:
                return
            for leaf in leaves:
                self._remove(leaf)
                if self.num_tokens <= max_tokens and self.num_nodes <= max_nodes:
                    return

    def nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _remove(self, node: Node) -> Node:
        """Unlink a leaf; returns its parent."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[:TOKEN_BYTES]]
        self.num_tokens -= len(node.key) // TOKEN_BYTES
        node.parent = None
        node.key = b""  # a conversation may still point here
        self.num_nodes -= 1
        return parent


def common_depth(a: Node, b: Node) -> int:
    """Leading tokens that the paths of two nodes share, at the precision of node ends."""
    while a is not b:
        above_a, above_b = a.parent, b.parent
        if above_a is None or above_b is None:
            return 0
        if a.end >= b.end:
            a = above_a
        else:
            b = above_b
    return a.end


def _is_prunable(node: Node) -> bool:
    return not (
        node.children or node.checkpoint or node.planned or node.num_users or node.num_waiting or node.num_checkpoints
    )


def _common_tokens(key: bytes, at: int, segment: bytes) -> int:
    """Leading whole tokens that key[at:] and segment share."""
    length = min(len(key) - at, len(segment))
    for offset in range(0, length, _BLOCK):
        a = key[at + offset : at + min(offset + _BLOCK, length)]
        b = segment[offset : min(offset + _BLOCK, length)]
        if a != b:
            differ = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
            lowest_bit = (differ & -differ).bit_length() - 1
            return (offset + lowest_bit // 8) // TOKEN_BYTES
    return length // TOKEN_BYTES
