"""Images from a job to the vision tower: as data URLs, as uploaded blobs, and refused ones with their reason."""

import base64
import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Harness, wait_for
from PIL import Image
from tokenizers import Tokenizer, models

from gewell.protocol import BLOB_TTL_S, State

pytestmark = pytest.mark.redis

VISION_MODEL = Path(__file__).parents[1] / "fixtures" / "gemma4-vision"
CONTROLS = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<|turn>": 3, "<turn|>": 4}
CONTROLS |= {"<|image|>": 250, "<|image>": 251, "<image|>": 252}


def _picture(colour: str, width: int = 60, height: int = 40) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def _data_url(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def _body(*parts: Any) -> str:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What colour?"}]}]
    request = {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return json.dumps({"kind": "chat", "request": request})


@pytest.fixture(scope="module")
def seeing(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A worker with the tiny vision checkpoint and a vocabulary of single letters."""
    folder = tmp_path_factory.mktemp("seeing")
    model = folder / "vision"
    shutil.copytree(VISION_MODEL, model, ignore=shutil.ignore_patterns("golden.*"))
    vocab = dict(CONTROLS)
    letters = iter("▁\n" + "".join(chr(c) for c in range(33, 127)))
    for token_id in range(256):
        if token_id not in vocab.values():
            vocab[next(letters, f"<unused{token_id}>")] = token_id
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    backend.add_special_tokens(list(CONTROLS))
    backend.save(str(model / "tokenizer.json"))
    harness = Harness(server, "seeing", folder)
    worker = harness.start_worker("--model", str(model), "--device", "cpu", wait=False)
    wait_for(lambda: "send a job" in worker.log or worker.process.poll(), timeout_s=90, what="worker with a real model")
    assert worker.process.poll() is None, worker.log
    yield harness
    harness.close()


def _answer(harness: Harness, job_id: str, *parts: Any) -> tuple[list[int], int]:
    harness.submit_raw(job_id, _body(*parts))
    record = harness.check_stream(job_id)
    assert record.state == State.DONE, record.error
    return list(record.token_ids), record.usage.prompt


def test_a_picture_in_the_job_reaches_the_tower(seeing: Harness):
    red, num_red = _answer(seeing, "red", _data_url(_picture("red")))
    blue, num_blue = _answer(seeing, "blue", _data_url(_picture("blue")))
    _, num_text = _answer(seeing, "text")
    assert num_red == num_blue
    # 60 x 40 pixels in a budget of 70 soft tokens: 6 rows of 10, and the two marks around them.
    assert num_red - num_text == 60 + 2
    assert red != blue
    assert _answer(seeing, "red-again", _data_url(_picture("red")))[0] == red


def test_an_uploaded_picture_is_the_same_picture_and_lives_on(seeing: Harness):
    data = _picture("green")
    sha256 = hashlib.sha256(data).hexdigest()
    key = seeing.keys.blob(sha256)
    seeing.redis.set(key, data, ex=60)
    inline, _ = _answer(seeing, "green", _data_url(data))
    assert _answer(seeing, "green-blob", {"type": "image", "image": sha256})[0] == inline
    assert _answer(seeing, "green-url", {"type": "image_url", "image_url": f"blob:{sha256}"})[0] == inline
    assert seeing.redis.pttl(key) > (BLOB_TTL_S - 60) * 1000


REFUSED = {
    "web": ({"type": "image_url", "image_url": "https://example.org/cat.png"}, "unsupported", "fetched"),
    "no-base64": ({"type": "image_url", "image_url": "data:image/png;base64,???"}, "bad_image", "base64"),
    "no-image": (_data_url(b"hello"), "bad_image", "not readable"),
    "no-blob": ({"type": "image", "image": "0" * 64}, "bad_image", "is not there"),
    "no-sha": ({"type": "image", "image": "../../etc"}, "bad_image", "sha256"),
    "too-thin": (_data_url(_picture("red", 4000, 2)), "bad_image", "long and thin"),
}


def test_a_picture_that_cannot_be_used_is_named(seeing: Harness):
    for name, (part, _, _) in REFUSED.items():
        seeing.submit_raw(f"refused-{name}", _body(part))
    for name, (_, code, words) in REFUSED.items():
        record = seeing.check_stream(f"refused-{name}")
        assert record.state == State.ERROR, name
        assert (record.error.code, record.error.field) == (code, "request.messages[0].content[0]"), name
        assert words in record.error.message, name


def test_more_pictures_than_allowed_are_refused(seeing: Harness):
    seeing.submit_raw("many", _body(*[_data_url(_picture("red"))] * 33))
    record = seeing.check_stream("many")
    assert (record.error.code, record.error.field) == ("invalid_request", "request.messages")
    assert "33 images, at most 32" in record.error.message
