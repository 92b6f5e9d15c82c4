import sys
from pathlib import Path

import pytest

from gewell.text.tokenizer import HFTokenizer

TRAINING = Path(__file__).parents[2] / "training"
sys.path.insert(0, str(TRAINING))  # the trainer is no installed package


@pytest.fixture(scope="session")
def tokenizer() -> HFTokenizer:
    return HFTokenizer.from_file(TRAINING / "nano" / "tokenizer.json")
