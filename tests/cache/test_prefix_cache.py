"""What a request resumes from. A missed resume costs the user a prefill; a wrong one, somebody else's text."""

import pytest
from cache_world import World

from gewell.cache.checkpoints import Kind
from gewell.cache.tiers import Tier


def text(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def test_the_next_turn_resumes_at_the_stable_end_of_the_last_one():
    world = World(40)
    first = text(0, 20)
    assert world.run([*first, 90, 91], answer=text(500, 5), conversation_id="c", stable=[20])[0] == 0
    # The template drops the generation prompt (90, 91) and repeats the answer in another form.
    position, answer = world.run([*first, *text(700, 9)], conversation_id="c", stable=[29])
    assert position == 20
    assert answer.cached_tokens == 20
    assert answer.cache_write_tokens == 9
    assert answer.restored_from == "gpu"
    assert answer.miss_token is None


def test_an_answer_that_is_replayed_verbatim_is_cached_with_its_prompt():
    world = World(40)
    prompt, reply = text(0, 12), text(500, 7)
    world.run(prompt, answer=reply, conversation_id="c", stable=[12])
    assert world.run([*prompt, *reply, 1, 2], conversation_id="c")[0] == 19


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_an_edited_tail_resumes_exactly_where_it_differs(cut):
    world = World(40)
    ids = text(0, 24)
    world.run(ids, max_tokens=0)
    assert world.run([*ids[:-cut], *text(900, 6)])[0] == 24 - cut


def test_an_edit_beyond_the_slack_starts_from_scratch():
    world = World(40)
    ids = text(0, 24)
    world.run(ids, max_tokens=0)
    assert world.run([*ids[:-5], *text(900, 6)])[0] == 0


def test_a_full_hit_computes_one_token_unless_the_last_hidden_vector_is_kept():
    world = World(40)
    ids = text(0, 16)
    world.run(ids, max_tokens=0)
    request_id = world.submit(ids, max_tokens=0)
    assert world.cache.match(request_id).position == 15
    row_id = world.submit([*ids, 1])
    world.start(row_id)
    world.compute(row_id)
    (checkpoint,) = [c for c in world.cache.index if c.position == 16]
    checkpoint.last_hidden = "hidden"
    match = world.cache.match(request_id)
    assert match.position == 16
    assert match.point is not None
    assert match.point.last_hidden == "hidden"


def test_salts_never_share():
    world = World(60)
    ids = text(0, 16)
    world.run(ids, salt="one", max_tokens=0)
    assert world.run([*ids, 5], salt="two")[0] == 0
    assert world.run([*ids, 5])[0] == 0
    assert world.run([*ids, 5], salt="one")[0] == 16


def test_off_neither_reads_nor_writes_and_read_does_not_write():
    world = World(60)
    ids = text(0, 16)
    world.run(ids, mode="off")
    assert len(world.cache.index) == 0
    assert world.cache.tree.num_tokens == 0
    world.run(ids, mode="read")
    assert len(world.cache.index) == 0
    world.run(ids, max_tokens=0)
    assert world.run([*ids, 1], mode="read")[0] == 16
    assert world.run([*ids, 1], mode="off")[0] == 0
    assert {c.position for c in world.cache.index} == {16}


def test_the_place_where_prompts_part_is_kept_for_the_third():
    world = World(400)
    system = text(0, 300)
    world.run([*system, *text(1000, 8)])
    position, _ = world.run([*system, *text(2000, 8)])
    assert position == 0  # nobody knew yet that others would share it
    assert world.run([*system, *text(3000, 8)])[0] == 300


def test_the_end_of_the_system_message_is_kept_at_once():
    world = World(400)
    system = text(0, 300)
    world.run([*system, *text(1000, 8)], message_starts=[0, 300])
    assert world.run([*system, *text(2000, 8)])[0] == 300


def test_siblings_wait_for_one_prefill_and_then_fork():
    world = World(400)
    draft = text(0, 300)
    critics = [world.submit([*draft, *text(1000 * n, 8)]) for n in (1, 2, 3)]
    world.start(critics[0])
    for critic in critics[1:]:
        match = world.cache.match(critic)
        assert match.wait_for == critics[0]
        assert match.point is None
    assert 300 in world.running[critics[0]].positions
    assert world.compute(critics[0], 304)
    assert world.cache.match(critics[1]).wait_for is None
    assert world.start(critics[1]) == 300


def test_nobody_waits_for_a_leader_that_left():
    world = World(400)
    draft = text(0, 300)
    leader, follower = (world.submit([*draft, n]) for n in (1, 2))
    world.start(leader)
    assert world.cache.match(follower).wait_for == leader
    world.cancel(leader)
    assert world.cache.match(follower).wait_for is None


def test_a_later_sibling_makes_a_running_request_keep_their_common_part():
    world = World(400)
    draft = text(0, 400)
    leader = world.submit([*draft, 1])
    world.start(leader)
    world.compute(leader, 100)
    follower = world.submit([*draft, 2])
    assert world.cache.match(follower).wait_for is None
    assert world.cache.want(leader, 400)
    assert world.cache.match(follower).wait_for == leader


def test_a_preempted_request_returns_to_where_it_was():
    world = World(60)
    request_id = world.submit(text(0, 20))
    world.start(request_id)
    world.compute(request_id, 13)
    world.preempt(request_id)
    assert [c.kind for c in world.cache.index] == [Kind.SWAP]
    assert world.start(request_id) == 13
    assert len(world.cache.index) == 0
    assert world.compute(request_id)


def test_a_waiting_request_protects_its_prefix_from_eviction():
    world = World(60)
    wanted, idle = text(0, 24), text(500, 24)
    world.run(wanted, max_tokens=0)
    world.run(idle, max_tokens=0)
    world.submit([*wanted, 1])
    world.cache.evict(1)
    assert [c.position for c in world.cache.index] == [24]
    assert world.run([*wanted, 2])[0] == 24


def test_what_is_needed_sooner_outlives_what_is_needed_later():
    world = World(80)
    texts = [text(500 * n, 24) for n in range(3)]
    for ids in texts:
        world.run(ids, max_tokens=0)
    requests = [world.submit([*texts[n], 1]) for n in (2, 0, 1)]
    world.cache.evict(1)
    assert [world.cache.peek(request_id) for request_id in requests] == [24, 24, 0]
    world.cache.evict(1)
    assert [world.cache.peek(request_id) for request_id in requests] == [24, 0, 0]


def test_a_superseded_tail_gives_way_first():
    world = World(80)
    world.run([*text(0, 20), 99], conversation_id="old", stable=[20])
    world.run([*text(500, 20), 99], conversation_id="c", stable=[20])
    world.run([*text(500, 30), 98], conversation_id="c", stable=[30])
    world.cache.evict(1)
    assert sorted(c.position for c in world.cache.index) == [20, 30]
    assert world.run([*text(0, 20), 5])[0] == 20


def test_a_miss_inside_a_conversation_names_its_first_diverging_token_and_message():
    world = World(80)
    first = text(0, 20)
    world.run([*first, 99], conversation_id="c", stable=[20], message_starts=[0, 6, 12])
    changed = [*first[:9], 777, *first[10:], *text(800, 6)]
    position, answer = world.run(changed, conversation_id="c", message_starts=[0, 6, 12, 20])
    assert position == 0
    assert answer.miss_token == 9
    assert answer.miss_message == 1


def test_forgotten_checkpoints_of_a_faulty_request_serve_nobody():
    world = World(80)
    request_id = world.submit(text(0, 20), max_tokens=0)
    world.start(request_id)
    world.compute(request_id)
    world.cache.forget_taken(request_id)
    world.finish(request_id, completed=False)
    assert world.run([*text(0, 20), 1])[0] == 0


def test_a_request_that_never_ran_leaves_nothing_behind():
    world = World(20)
    request_id = world.submit(text(0, 30))
    assert world.cache.tree.num_tokens == 30
    world.cancel(request_id)
    assert world.cache.tree.num_tokens == 0
    world.cache.drop_waiting("unknown")


def test_emitted_tokens_of_an_earlier_epoch_belong_to_the_prefix():
    world = World(40)
    ids = text(0, 16)
    world.run(ids, max_tokens=0)
    request_id = world.submit(ids)
    assert world.cache.peek(request_id) == 15
    with pytest.raises(ValueError, match="known already"):
        world.cache.add_waiting(world.waiting[request_id])


def test_a_spilled_conversation_comes_back_from_the_host():
    world = World(num_pages=12, num_host_pages=20)
    first = text(0, 24)
    world.run([*first, 99], conversation_id="c", stable=[24])
    world.run([*text(500, 40), 99], conversation_id="d", stable=[40])
    (spilled,) = [c for c in world.cache.index if c.position == 24]
    assert spilled.tier is Tier.HOST
    position, answer = world.run([*first, *text(700, 4)], conversation_id="c")
    assert position == 24
    assert answer.restored_from == "host"


def test_the_host_stores_a_shared_page_once():
    world = World(num_pages=60, num_host_pages=60)
    system = text(0, 16)  # two full pages
    world.run([*system, 1, 2, 3], conversation_id="a", stable=[18])
    world.run([*system, 4, 5, 6], conversation_id="b", stable=[18])
    tails = [c for c in world.cache.index if c.position == 18 and c.host_pages is not None]
    assert len(tails) == 2
    world.run([*system, 1, 2, 7, 8, 9], conversation_id="a", stable=[20])
    (longer,) = [c for c in world.cache.index if c.position == 20]
    (shorter,) = [c for c in tails if c.conversation is longer.conversation]
    assert longer.host_pages is not None
    assert shorter.host_pages is not None
    assert longer.host_pages[:2] == shorter.host_pages[:2]


def test_a_cancelled_turn_leaves_its_conversation_where_it_was():
    world = World(40)
    first = text(0, 20)
    world.run([*first, 99], conversation_id="c", stable=[20])
    (tail,) = world.cache.index
    for end in (world.cancel, lambda request_id: (world.preempt(request_id), world.cancel(request_id))):
        request_id = world.submit([*first, *text(700, 9), 98], conversation_id="c", stable=[29])
        assert world.start(request_id) == 20
        assert tail.is_superseded
        end(request_id)
        assert not tail.is_superseded
        assert tail.conversation.num_running == 0
