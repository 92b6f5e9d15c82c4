"""Where in a prompt a resume point is worth having, before anybody asks what it is worth."""

from gewell.cache.checkpoints import Kind
from gewell.cache.prefix_tree import Node
from gewell.request import EngineRequest

MIN_SHARED_TOKENS = 256  # below this a shared prefix is cheaper to compute than a window is to hold
MIN_ONE_OFF_SHARED_TOKENS = 64  # of a prompt that keeps nothing else: no resume point of its own stands in for it
SPACED_FROM_TOKENS = 32_768  # prompts this long get checkpoints on the way, doubling apart


def own_places(request: EngineRequest, resumed: int) -> dict[int, Kind]:
    """For the conversation's next turn and for edits: stable ends, and on the way of a very long prompt."""
    places: dict[int, Kind] = {}
    if request.cache.one_off:
        return places
    length = len(request.prompt_ids)
    if length >= SPACED_FROM_TOKENS:
        step = SPACED_FROM_TOKENS // 2
        while resumed + step < length:
            places[resumed + step] = Kind.SPACED
            step *= 2
    is_warm_up = request.sampling.max_tokens == 0
    is_for_anybody = is_warm_up and request.conversation_id is None
    end = Kind.SHARED if is_for_anybody else Kind.TAIL
    # A prompt that the next turn repeats whole is followed by its answer: the end of that will be the tail.
    whole = end if is_warm_up else Kind.SPACED
    for position in request.stable_lengths or (length,):
        places[position] = whole if position == length else end
    return places


def shared_places(request: EngineRequest, leaf: Node) -> dict[int, Kind]:
    """Where other prompts leave this one: system end, where it parts from what was seen, and from who waits.

    A prompt that will never come back may begin as others do: these places are its too.
    """
    places: list[int] = list(request.message_starts[1:2])
    own = request.conversation_id
    seen = next((node for node in leaf.path() if node.seen), None)
    if seen is not None and (own is None or seen.owner != own):
        places.append(seen.end)
    fork = next((node for node in leaf.path() if node.num_waiting), None)
    if fork is not None:
        places.append(fork.end)
    least = MIN_ONE_OFF_SHARED_TOKENS if request.cache.one_off else MIN_SHARED_TOKENS
    return {position: Kind.SHARED for position in places if position >= least}
