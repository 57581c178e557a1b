import gc
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import libmla
import numpy as np
import pytest
from frameworks import TOLERANCE, Framework, float64
from hypothesis import HealthCheck, given, settings
from libmla import Bucket, CacheStrides, Geometry, Limits, LseBase, PagedAttention, SplitPolicy
from problems import problems, serving_problem

NUMPY = Framework("numpy")
SMALL = Geometry(num_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, page_size=4, dtype="fp32")
LIMITS = Limits(max_rows=8, max_tokens=64, max_listed_pages=256)


def attend(problem, framework, kernel="", lse_base=LseBase.NATURAL, **options):
    """Plans and runs; gives out, lse, the right answers, and the object."""
    attention = PagedAttention(
        geometry=problem.geometry,
        num_pages=problem.num_pages,
        device=framework.device,
        limits=LIMITS,
        kernel=kernel,
        **options,
    )
    attention.plan(
        **problem.indices(), sm_scale=problem.sm_scale, causal=problem.causal, lse_base=lse_base
    )
    q_nope, q_pe, cache = problem.tensors(framework)
    rank = problem.geometry.kv_lora_rank
    out = framework.empty(q_nope.shape, problem.geometry.dtype)
    lse = framework.empty(q_nope.shape[:2], "fp32")
    result = attention.run(
        q_nope=q_nope, q_pe=q_pe, ckv=cache[..., :rank], kpe=cache[..., rank:], out=out, lse=lse
    )
    assert result is out
    return out, lse, problem.answer(*map(float64, (q_nope, q_pe, cache))), attention


def check(problem, out, lse, answer):
    tolerance = TOLERANCE[problem.geometry.dtype]
    np.testing.assert_allclose(float64(out), answer[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(float64(lse), answer[1], rtol=1e-4, atol=1e-4)


# A function-scoped fixture is the same for every case here: it only names the framework.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems())
def test_any_shape_matches_float64(framework, problem):
    out, lse, answer, _ = attend(problem, framework)
    check(problem, out, lse, answer)


def kernels(device):
    return [name for name, _ in libmla.supports(SMALL, device=device).considered]


@pytest.mark.parametrize("kernel", kernels("cpu"))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_kernel_of_this_cpu_matches_float64(kernel, dtype):
    geometry = Geometry(num_heads=3, kv_lora_rank=48, qk_rope_head_dim=16, page_size=8, dtype=dtype)
    support = libmla.supports(geometry, kernel=kernel)
    if not support:
        pytest.skip(support.reason)
    problem = serving_problem(geometry)
    out, lse, answer, attention = attend(problem, NUMPY, kernel=kernel)
    check(problem, out, lse, answer)
    assert attention.kernel == kernel == support.kernel


def test_lse_in_base_two(framework):
    problem = serving_problem(SMALL)
    out, lse, answer, _ = attend(problem, framework, lse_base=LseBase.TWO)
    check(problem, out, lse, (answer[0], answer[1] / np.log(2)))


def test_deepseek_shape(framework):
    problem = serving_problem(
        Geometry(num_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, page_size=64)
    )
    out, lse, answer, attention = attend(problem, framework)
    check(problem, out, lse, answer)
    assert attention.device == framework.device
    assert attention.info.num_tokens == 46
    assert attention.info.num_rows == 4


def test_out_is_made_where_none_is_given(framework):
    problem = serving_problem(SMALL)
    given, _, _, attention = attend(problem, framework)
    q_nope, q_pe, cache = problem.tensors(framework)
    out = attention.run(q_nope=q_nope, q_pe=q_pe, ckv=cache[..., :16], kpe=cache[..., 16:])
    assert type(out) is type(q_nope)
    assert out.dtype == q_nope.dtype
    assert np.array_equal(float64(out), float64(given))


def test_same_bits_whatever_the_batch_with_fixed_splits():
    problem = serving_problem(SMALL)
    together, _, _, attention = attend(problem, NUMPY, splits=SplitPolicy(fixed_tokens=16))
    assert attention.info.num_splits > 1
    attention.plan(
        qo_indptr=[0, 1],
        kv_indptr=[0, len(problem.pages[1])],
        kv_indices=problem.pages[1],
        kv_len=[problem.lengths[1]],
        sm_scale=problem.sm_scale,
    )
    q_nope, q_pe, cache = problem.tensors(NUMPY)
    alone = attention.run(
        q_nope=q_nope[40:41], q_pe=q_pe[40:41], ckv=cache[..., :16], kpe=cache[..., 16:]
    )
    assert np.array_equal(alone[0], together[40])


def test_last_page_lengths_say_the_same_as_lengths():
    problem = serving_problem(SMALL)
    out, _, _, attention = attend(problem, NUMPY)
    indices = problem.indices()
    lengths = indices.pop("kv_len")
    last = np.where(lengths > 0, (lengths - 1) % 4 + 1, 0).astype(np.int32)
    attention.plan(**indices, kv_last_page_len=last, sm_scale=problem.sm_scale)
    q_nope, q_pe, cache = problem.tensors(NUMPY)
    again = attention.run(q_nope=q_nope, q_pe=q_pe, ckv=cache[..., :16], kpe=cache[..., 16:])
    assert np.array_equal(out, again)


def test_caches_of_their_own_and_read_only_inputs():
    problem = serving_problem(SMALL)
    expected, _, _, _ = attend(problem, NUMPY)
    q_nope, q_pe, cache = problem.tensors(NUMPY)
    ckv, kpe = cache[..., :16].copy(), cache[..., 16:].copy()
    attention = PagedAttention(
        geometry=SMALL,
        num_pages=problem.num_pages,
        limits=LIMITS,
        strides=CacheStrides(ckv_page=64, ckv_row=16, kpe_page=32, kpe_row=8),
    )
    indices = problem.indices()
    for array in (q_nope, q_pe, ckv, kpe, *indices.values()):
        array.flags.writeable = False
    attention.plan(**indices, sm_scale=problem.sm_scale)
    assert np.array_equal(attention.run(q_nope=q_nope, q_pe=q_pe, ckv=ckv, kpe=kpe), expected)


def test_a_bucket_pads_with_empty_rows(framework):
    attention = PagedAttention(
        geometry=SMALL,
        num_pages=4,
        device=framework.device,
        bucket=Bucket(num_rows=3, num_tokens=5),
        limits=LIMITS,
    )
    attention.plan(qo_indptr=[0, 2], kv_indptr=[0, 1], kv_indices=[2], kv_len=[3], sm_scale=1.0)
    q_nope, q_pe = framework.array(np.ones((5, 2, 16)), "fp32"), framework.empty((5, 2, 8), "fp32")
    q_pe[:] = 1
    cache = framework.array(np.ones((4, 4, 24)), "fp32")
    lse = framework.empty((5, 2), "fp32")
    out = attention.run(q_nope=q_nope, q_pe=q_pe, ckv=cache[..., :16], kpe=cache[..., 16:], lse=lse)
    assert np.array_equal(float64(out)[:2], np.ones((2, 2, 16)))
    assert np.array_equal(float64(out)[2:], np.zeros((3, 2, 16)))
    assert np.all(np.isneginf(float64(lse)[2:]))
    assert float64(framework.view(attention.qo_indptr_buf)).tolist() == [0, 2, 2, 2]
    assert float64(framework.view(attention.kv_len_buf)).tolist() == [3, 0, 0]


def test_lent_scratch():
    problem = serving_problem(SMALL)
    options = {"splits": SplitPolicy(forced_count=4), "num_pages": problem.num_pages}
    needed = PagedAttention.scratch_bytes(geometry=SMALL, limits=LIMITS, **options)
    assert needed > 0
    memory = np.zeros(needed + 64, np.uint8)
    start = -memory.ctypes.data % 64
    scratch = memory[start : start + needed]
    with pytest.raises(
        ValueError, match=rf"scratch\.size\(\): expected at least {needed} bytes, got"
    ):
        PagedAttention(geometry=SMALL, limits=LIMITS, scratch=scratch[:-1], **options)
    del options["num_pages"]
    own, lent = (attend(problem, NUMPY, **options, scratch=s)[0] for s in (None, scratch))
    assert np.array_equal(own, lent)


def test_objects_outlive_their_names():
    problem = serving_problem(SMALL)
    _, _, _, attention = attend(problem, NUMPY)
    buffer = attention.kv_len_buf
    del attention
    gc.collect()
    assert libmla.to_numpy(buffer).tolist() == problem.lengths


def test_two_objects_on_two_threads():
    def serve(seed):
        problem = serving_problem(SMALL, seed)
        for _ in range(20):
            out, lse, answer, _ = attend(problem, NUMPY)
            check(problem, out, lse, answer)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(serve, range(2)))


def test_a_forked_process_has_threads_of_its_own():
    problem = serving_problem(SMALL)
    expected, _, _, attention = attend(problem, NUMPY)  # starts this process's threads
    q_nope, q_pe, cache = problem.tensors(NUMPY)

    def child():
        out = attention.run(q_nope=q_nope, q_pe=q_pe, ckv=cache[..., :16], kpe=cache[..., 16:])
        assert np.array_equal(out, expected)
        assert np.array_equal(attend(problem, NUMPY)[0], expected)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0


def test_supports_says_why():
    support = libmla.supports(SMALL)
    assert support
    assert support.kernel in dict(support.considered)
    refused = libmla.supports(
        Geometry(num_heads=0, kv_lora_rank=1, qk_rope_head_dim=0, page_size=1)
    )
    assert not refused
    assert "num_heads" in refused.reason
    assert not libmla.supports(SMALL, kernel="no such kernel")


def test_an_executor_of_its_own():
    executor = libmla.Executor(2)
    assert executor.num_threads == 2
    problem = serving_problem(SMALL)
    out, lse, answer, _ = attend(problem, NUMPY, executor=executor)
    check(problem, out, lse, answer)


@pytest.fixture
def planned():
    """An attention with a plan of one token, and the arguments of its run."""
    attention = PagedAttention(geometry=SMALL, num_pages=4, limits=LIMITS)
    attention.plan(qo_indptr=[0, 1], kv_indptr=[0, 1], kv_indices=[2], kv_len=[3], sm_scale=1.0)
    cache = np.zeros((4, 4, 24), np.float32)
    return attention, {
        "q_nope": np.zeros((1, 2, 16), np.float32),
        "q_pe": np.zeros((1, 2, 8), np.float32),
        "ckv": cache[..., :16],
        "kpe": cache[..., 16:],
    }


def read_only(shape):
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_nope": np.zeros((2, 2, 16), np.float32)}, r"q_nope\.shape\[0\]: expected 1 .*, got 2"),
        ({"q_nope": np.zeros((1, 2), np.float32)}, "q_nope: expected 3 dimensions, got 2"),
        ({"q_nope": np.zeros((1, 2, 16))}, "q_nope dtype: expected fp32, .*, got fp64"),
        ({"q_nope": np.zeros((1, 2, 16), ">f4")}, "dtype: expected the byte order .*, got >f4"),
        ({"kpe": np.zeros((4, 4, 8), np.float32)}, r"cache\.kpe\.stride\[1\]: expected 24"),
        ({"q_pe": None}, "q_pe.*expected .*, got"),
        ({"lse": np.zeros((1, 2))}, "lse dtype: expected fp32, got fp64"),
        ({"out": read_only((1, 2, 16))}, "out: expected an array that may be written to, got"),
    ],
)
def test_run_refuses(planned, change, message):
    attention, arguments = planned
    with pytest.raises(ValueError, match=f"^(PagedAttention::run|libmla): {message}"):
        attention.run(**{**arguments, **change})


def test_outputs_that_overlap_an_input_are_refused(planned):
    attention, arguments = planned
    with pytest.raises(
        ValueError, match="run: out: expected memory apart from that of q_nope, got"
    ):
        attention.run(**arguments, out=arguments["q_nope"])
    rows = np.zeros((1, 2, 24), np.float32)  # beside each other in one buffer they may lie
    attention.run(**{**arguments, "q_pe": rows[..., 16:]}, out=rows[..., :16])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_indices": [4]}, r"kv_indices\[0\]: expected .*, got 4"),
        ({"qo_indptr": np.array([0, 1])}, "qo_indptr dtype: expected int32, got int64"),
        ({"kv_len": np.zeros((1, 1), np.int32)}, "kv_len: expected 1 dimensions, got 2"),
        (
            {"kv_len": np.array([1, 9, 1, 9], np.int32)[::2]},
            "kv_len: expected an array without gaps",
        ),
        ({"kv_len": None}, "kv_len.*expected .*, got"),
        ({"sm_scale": float("nan")}, "sm_scale: expected .*, got nan"),
        ({"sm_scale": 1e-60}, "sm_scale: expected .*, got 1e-60"),
        ({"sm_scale": 1e300}, r"sm_scale: expected .*, got 1e\+300"),
    ],
)
def test_plan_refuses_and_keeps_the_plan_before(planned, change, message):
    attention, arguments = planned
    batch = {"qo_indptr": [0, 1], "kv_indptr": [0, 1], "kv_indices": [2], "kv_len": [3]}
    with pytest.raises(ValueError, match=f"^PagedAttention::plan: {message}"):
        attention.plan(**{**batch, "sm_scale": 1.0, **change})
    attention.run(**arguments)


def test_a_cache_without_pages(framework):
    attention = PagedAttention(geometry=SMALL, num_pages=0, limits=LIMITS, device=framework.device)
    attention.plan(qo_indptr=[0, 2], kv_indptr=[0, 0], kv_indices=[], kv_len=[0], sm_scale=1.0)
    heads, rank, rope = SMALL.num_heads, SMALL.kv_lora_rank, SMALL.qk_rope_head_dim
    cache = framework.empty((0, SMALL.page_size, rank + rope), SMALL.dtype)
    out = attention.run(
        q_nope=framework.empty((2, heads, rank), SMALL.dtype),
        q_pe=framework.empty((2, heads, rope), SMALL.dtype),
        ckv=cache[..., :rank],
        kpe=cache[..., rank:],
    )
    assert not float64(out).any()


def test_numbers_that_are_no_integers_are_refused(planned):
    with pytest.raises(ValueError, match=r"plan: qo_indptr\[1\]: expected an integer, got 1\.5"):
        planned[0].plan(
            qo_indptr=[0, 1.5], kv_indptr=[0, 1], kv_indices=[2], kv_len=[3], sm_scale=1.0
        )


def test_a_run_before_a_plan_is_a_runtime_error(planned):
    attention = PagedAttention(geometry=SMALL, num_pages=4, limits=LIMITS)
    with pytest.raises(RuntimeError, match=r"^PagedAttention::run: plan: expected .*, got none"):
        attention.run(**planned[1])
    with pytest.raises(RuntimeError, match=r"^PagedAttention::info: plan: expected .*, got none"):
        _ = attention.info


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": -1}, "num_pages: expected .*, got -1"),
        ({"num_pages": 1, "kernel": "none"}, 'kernel: expected .*, got cpu has no kernel "none"'),
        ({"num_pages": 1, "capture": True}, "capture: expected .*, got"),
        ({"num_pages": 1, "device": "tpu"}, "device: expected cpu, cuda or cuda:INDEX, got tpu"),
        ({"num_pages": 1, "splits": SplitPolicy(fixed_tokens=2**40)}, "splits.fixed_tokens: .*"),
    ],
)
def test_creation_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        PagedAttention(geometry=SMALL, **options)


def test_geometry_takes_the_dtypes_of_frameworks():
    dtypes = ["bf16", "bfloat16", np.float16, np.dtype("float32")]
    names = [
        Geometry(num_heads=1, kv_lora_rank=1, qk_rope_head_dim=0, page_size=1, dtype=dtype).dtype
        for dtype in dtypes
    ]
    assert names == ["bf16", "bf16", "fp16", "fp32"]
    with pytest.raises(ValueError, match="dtype: expected fp32, bf16 or fp16, got int8"):
        Geometry(num_heads=1, kv_lora_rank=1, qk_rope_head_dim=0, page_size=1, dtype="int8")
