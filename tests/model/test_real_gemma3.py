"""The real Gemma 3 270M, where its weights have been fetched: real numbers have outliers that tiny random ones lack."""

import pytest

from gewell.engine.verify import verify
from gewell.errors import GewellError
from gewell.model_store import model_path
from tests.model.golden_folders import FIXTURES


@pytest.mark.slow
def test_real_weights_give_the_golden_logits_and_ids():
    try:
        folder = model_path("gemma3-270m")
    except GewellError:
        pytest.skip("gemma3-270m is not stored: gewell model get gemma3-270m")
    result = verify(FIXTURES / "gemma3-270m", model_dir=folder, only_cases=["france", "story"], only_ways=["together"])
    assert {finding.what for finding in result.findings} == {"logits", "greedy ids"}
    assert [finding for finding in result.findings if not finding.is_ok] == []
