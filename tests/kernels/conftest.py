"""Kernels run compiled where a GPU is, else under Triton's interpreter, chosen before Triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# The interpreter's dot misreads bf16 operands, so bf16 is tried on a GPU alone.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What only the interpreter warns of: overflow to inf where the formula wants it, and Triton's own habits."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"))
