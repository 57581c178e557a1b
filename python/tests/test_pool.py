import gc

import libmla
import numpy as np
import pytest
from frameworks import Framework, float64
from libmla import LatentPool

SHAPE = {"num_layers": 2, "num_pages": 5, "page_size": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_append_scatters_and_gather_reads(framework, random, dtype):
    pool = LatentPool(**SHAPE, dtype=dtype, device=framework.device)
    rows = framework.array(random.standard_normal((3, 24)), dtype)
    pool.append(1, [7, -1, 20], rows[:, :16], rows[:, 16:])
    expected = np.zeros((24, 24))
    expected[[7, 20]] = float64(rows)[[0, 2]]
    layer = framework.view(pool.layer(1))
    assert layer.shape == (pool.total_pages, 4, 24)
    assert np.array_equal(float64(layer).reshape(24, 24), expected)
    assert not float64(framework.view(pool.layer(0))).any()

    read = framework.empty((2, 24), dtype)
    pool.gather(1, np.array([20, 7]), read)
    assert np.array_equal(float64(read), float64(rows)[[2, 0]])

    with pytest.raises(ValueError, match=r"copy_pages: copies\[1\]: expected two pages, got 4"):
        pool.copy_pages([(1, 3), (0, 1, 2, 3)])
    pool.copy_pages([(1, 3), (3, pool.sink_page)])
    layer = float64(framework.view(pool.layer(1)))
    assert np.array_equal(layer[3], layer[1])
    assert np.array_equal(layer[pool.sink_page], layer[1])

    ckv, kpe = map(framework.view, pool.views(1))
    assert np.array_equal(float64(ckv), layer[..., :16])
    assert np.array_equal(float64(kpe), layer[..., 16:])


def test_slots_on_the_device(torch_framework, random):
    pool = LatentPool(**SHAPE, dtype="fp32", device=torch_framework.device)
    rows = torch_framework.array(random.standard_normal((2, 24)), "fp32")
    slots = torch_framework.from_numpy(np.array([9, 3]))
    pool.append(0, slots, rows[:, :16], rows[:, 16:])
    layer = float64(torch_framework.view(pool.layer(0))).reshape(24, 24)
    assert np.array_equal(layer[[9, 3]], float64(rows))


def test_rope_width_0():
    pool = LatentPool(num_pages=2, page_size=2, kv_lora_rank=3, qk_rope_head_dim=0, dtype="fp32")
    pool.append(0, [1], np.ones((1, 3), np.float32))
    ckv, kpe = pool.views(0)
    assert kpe is None
    assert libmla.to_numpy(ckv).reshape(6, 3)[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("lend", [False, True])
def test_views_keep_the_memory(lend):
    memory = None
    if lend:
        needed = LatentPool.bytes(**SHAPE, dtype="fp32")
        whole = np.zeros(needed + 64, np.uint8)
        start = -whole.ctypes.data % 64
        memory = whole[start : start + needed]
    pool = LatentPool(**SHAPE, dtype="fp32", memory=memory)
    layer = libmla.to_numpy(pool.layer(0))
    layer[:] = 5
    if lend:
        assert memory.view(np.float32).sum() == layer.sum()
        del memory, whole
    del pool
    gc.collect()
    assert np.all(layer == 5)


def test_pool_refuses():
    with pytest.raises(ValueError, match=r"LatentPool: config.num_pages: expected .*, got 0"):
        LatentPool(**{**SHAPE, "num_pages": 0})
    pool = LatentPool(**SHAPE, dtype="fp32")
    rows = np.zeros((1, 24), np.float32)
    with pytest.raises(ValueError, match=r"LatentPool::append: slots\[0\]: expected .*, got 24"):
        pool.append(0, [24], rows[:, :16], rows[:, 16:])
    with pytest.raises(ValueError, match=r"slots dtype: expected int64, got int32"):
        pool.append(0, np.zeros(1, np.int32), rows[:, :16], rows[:, 16:])
    with pytest.raises(ValueError, match=r"layer: expected .*, got 2"):
        pool.layer(2)
    with pytest.raises(ValueError, match=r"memory.*expected .*, got"):
        LatentPool(**SHAPE, memory=np.zeros(64, np.uint8))


def test_nothing_is_appended(framework):
    pool = LatentPool(**SHAPE, dtype="fp32", device=framework.device)
    rows = framework.empty((0, 24), "fp32")
    pool.append(0, framework.from_numpy(np.zeros(0, np.int64)), rows[:, :16], rows[:, 16:])


def test_arrays_pass_between_frameworks():
    torch = pytest.importorskip("torch")
    pool = LatentPool(**SHAPE, dtype="bf16")
    libmla.to_torch(pool.layer(0)).fill_(3)
    assert np.all(float64(libmla.to_numpy(pool.layer(0))) == 3)
    assert libmla.to_torch(pool.layer(0)).dtype == torch.bfloat16
    assert Framework("torch").view(pool.layer(0)).shape == (6, 4, 24)
