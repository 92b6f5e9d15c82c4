"""Images through the whole engine: the right features in the right rows, also when the prompt is cached or cut.

A mistake here shows one user another user's picture.
"""

from pathlib import Path

import pytest
import torch

from gewell.engine.api import FinishedEvent, TokensEvent
from gewell.engine.build import EngineOptions, build_engine
from gewell.engine.engine import PagedEngine
from gewell.engine.golden import Case, GoldenFolder
from gewell.engine.verify_vision import image_runs
from gewell.request import EngineRequest, RequestImage
from gewell.sampling import SamplingParams
from tests.model.golden_folders import FIXTURES

FOLDER = FIXTURES / "gemma4-vision"
CASES = {case.name: case for case in GoldenFolder.read(FOLDER).cases}
IMAGE = 250


def _engine(folder: Path = FOLDER, **options) -> PagedEngine:
    settings = {"kv_memory_bytes": 60 << 20, "max_num_seqs": 4, "poison_freed_pages": True} | options
    return build_engine(folder, EngineOptions(device="cpu", dtype=torch.float32, **settings))


def _request(case: Case, request_id: str, *, digest: str = "") -> EngineRequest:
    images = []
    for n, (start, end) in enumerate(image_runs(case.prompt_ids, IMAGE)):
        places = case.tensors["image_position_ids"][n]
        real = places[:, 0] >= 0
        pixels = (case.tensors["pixel_values"][n][real] * 255).round().to(torch.uint8)
        width, height = (int(side) + 1 for side in places[real].max(dim=0).values)
        images.append(
            RequestImage(
                start=start,
                end=end,
                digest=digest or f"{hash((case.name, n)) & 0xFFFFFFFF:064x}",
                patches=pixels.numpy().tobytes(),
                grid=(height, width),
            )
        )
    return EngineRequest(
        request_id=request_id,
        prompt_ids=case.prompt_ids,
        sampling=SamplingParams(temperature=0.0, max_tokens=len(case.greedy_ids), ignore_eos=True),
        stable_lengths=(len(case.prompt_ids) - 1,),
        images=tuple(images),
    )


def _run(engine: PagedEngine, requests: list[EngineRequest]) -> dict[str, list[int]]:
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokensEvent):
                ids[event.request_id] += event.token_ids
            elif isinstance(event, FinishedEvent):
                assert event.error_code is None, event.error_message
    return ids


@pytest.mark.parametrize("budget", [8, 17, 512])
def test_all_cases_together_give_the_golden_ids(budget):
    engine = _engine(max_num_batched_tokens=budget)
    ids = _run(engine, [_request(case, name) for name, case in CASES.items()])
    assert ids == {name: case.greedy_ids for name, case in CASES.items()}


def test_a_cached_prompt_with_images_gives_the_same_ids():
    engine = _engine()
    first = _run(engine, [_request(CASES["two"], "first")])["first"]
    again = _run(engine, [_request(CASES["two"], "again")])["again"]
    assert first == again == CASES["two"].greedy_ids
    assert engine.stats().cached_tokens > 0


def test_equal_ids_with_another_image_share_nothing():
    engine = _engine()
    _run(engine, [_request(CASES["one"], "first", digest="11" * 32)])
    cached = engine.stats().cached_tokens
    _run(engine, [_request(CASES["one"], "second", digest="22" * 32)])
    image_start = image_runs(CASES["one"].prompt_ids, IMAGE)[0][0]
    assert engine.stats().cached_tokens - cached <= image_start


def test_a_text_model_refuses_images():
    engine = _engine(FIXTURES / "gemma4-dense")
    engine.add(_request(CASES["one"], "job"))
    events = engine.step()
    assert [event.error_code for event in events if isinstance(event, FinishedEvent)] == ["image_unsupported"]
    assert engine.info.vision is None


def test_the_engine_says_how_images_are_to_be_cut():
    info = _engine().info
    assert info.vision is not None
    assert (info.vision.patch_size, info.vision.pooling_size, info.vision.default_soft_tokens) == (16, 3, 70)
    assert info.image_token_id == IMAGE
