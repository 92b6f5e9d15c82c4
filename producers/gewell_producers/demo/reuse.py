"""How many prompt tokens a run could have reused at best, from the token ids themselves."""

from collections.abc import Sequence


class ReuseLedger:
    """The tokens of a prompt that an earlier prompt or answer of the run had computed at the same place.

    That is the longest beginning it shares with any of them: the old part of the same conversation, or the preamble
    that all share. Counted strictly: prompts submitted earlier count at once, also while they run, and an answer counts
    to its last token. Only the last token of a prompt is always computed anew.
    """

    def __init__(self) -> None:
        self._children: dict[int, dict[int, int]] = {}  # a tree of all sequences: node -> token -> node
        self._num_nodes = 1
        self.num_prompt_tokens = 0
        self.num_reusable = 0

    def add_prompt(self, prompt_ids: Sequence[int]) -> int:
        """Count a prompt at its submission; returns how many of its tokens could be reused."""
        reusable = min(self._insert(prompt_ids), len(prompt_ids) - 1)
        self.num_prompt_tokens += len(prompt_ids)
        self.num_reusable += reusable
        return reusable

    def add_answer(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        self._insert([*prompt_ids, *answer_ids])

    def _insert(self, ids: Sequence[int]) -> int:
        """Add a sequence; returns the length of its beginning that was there already."""
        node, num_known = 0, 0
        for token in ids:
            children = self._children.setdefault(node, {})
            child = children.get(token)
            if child is None:
                child = children[token] = self._num_nodes
                self._num_nodes += 1
            else:
                num_known += 1
            node = child
        return num_known
