import sys
from pathlib import Path

import pytest

from gewell.model_store import model_path
from gewell.text.tokenizer import HFTokenizer

TRAINING = Path(__file__).parents[2] / "training"
sys.path.insert(0, str(TRAINING))  # the trainer is no installed package


@pytest.fixture(scope="session")
def tokenizer() -> HFTokenizer:
    return HFTokenizer.from_file(model_path("gewell-nano") / "tokenizer.json")
