"""Options of `gewell up`. One that is dropped on the way costs a user memory, speed or a wrong number format."""

import math

import pytest
from gewell_workers.cli.up import EngineFlags

from gewell.errors import ConfigError


def test_every_flag_reaches_the_engine():
    torch = pytest.importorskip("torch")
    flags = EngineFlags(rows=3, max_context=100, kv_gib=0.5, host_gib=1.5, dtype="float32", device="cpu")
    options = flags.options()
    assert (options.max_num_seqs, options.max_context) == (3, 100)
    assert (options.kv_memory_bytes, options.host_memory_bytes) == (2**29, 3 * 2**29)
    assert (options.dtype, options.device) == (torch.float32, "cpu")


def test_no_host_memory_is_taken_unless_it_is_asked_for():
    pytest.importorskip("torch")
    assert EngineFlags().options().host_memory_bytes == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", 0),
        ("max_context", 1),
        ("kv_gib", 0.0),
        ("kv_gib", math.inf),
        ("host_gib", -1.0),
        ("host_gib", math.nan),
        ("host_gib", 1e6),
        ("dtype", "int8"),
        ("device", "gpu"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_at_once(name, value):
    with pytest.raises(ConfigError) as refusal:
        EngineFlags(**{name: value})
    assert refusal.value.field == name
