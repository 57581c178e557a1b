"""copy and pickle: objects that hold memory refuse, a schedule starts anew, records are copied."""

import copy
import pickle

import pytest
from libmla import Executor, Geometry, Segment

torch = pytest.importorskip("torch")

from libmla.compat import flash_mla  # noqa: E402  # it needs PyTorch
from world import World, flash_mla_call, flashinfer_wrapper, mstar_wrapper  # noqa: E402


def handles(world):
    yield from (world.attention, world.pool, world.kv, world.resource, world.runner, world.step)
    yield from (Executor(1), flashinfer_wrapper(planned=False), mstar_wrapper(planned=False))


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
def test_objects_that_hold_memory_are_not_copied(copying):
    for handle in handles(World()):
        with pytest.raises(TypeError, match=f"^{type(handle).__name__}: copy, pickle: expected .*"):
            copying(handle)


@pytest.mark.parametrize(
    "copying", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_a_copied_schedule_is_a_new_one(copying):
    arguments = flash_mla_call(None)
    expected, _ = flash_mla.flash_mla_with_kvcache(**arguments)
    schedule = arguments["tile_scheduler_metadata"]
    copied = copying(schedule)
    for lengths in ([1], [3]):
        again = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
        out, _ = flash_mla.flash_mla_with_kvcache(
            **{**arguments, **again, "tile_scheduler_metadata": copied}
        )
        assert torch.equal(out, expected)  # a cache of zeros
    assert copied._key != schedule._key
    assert copied._lent.attention is not schedule._lent.attention


@pytest.mark.parametrize(
    "record",
    [Geometry(num_heads=1, kv_lora_rank=2, qk_rope_head_dim=0, page_size=1), Segment(1, 2)],
)
def test_records_are_copied(record):
    assert copy.deepcopy(record) == record == pickle.loads(pickle.dumps(record))
