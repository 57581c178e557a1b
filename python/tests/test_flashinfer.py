"""libmla.compat.flashinfer by what the documentation of FlashInfer 0.6 says."""

import inspect
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from flashinfer_calls import (
    SMALL,
    TORCH,
    check,
    dtype_of,
    parts_of,
    plan,
    planned_wrapper,
    workspace_of,
)
from frameworks import float64
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from libmla.compat.flashinfer import (
    BatchMLAPagedAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from problems import Problem, problems, serving_problem

torch = pytest.importorskip("torch")


# A function-scoped fixture is the same for every case here: it only names the framework.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(), separate=st.booleans(), device_indices=st.booleans())
def test_any_shape_matches_float64(framework, problem, separate, device_indices):
    wrapper = BatchMLAPagedAttentionWrapper(workspace_of(framework))
    plan(wrapper, problem, framework, device_indices)
    q_nope, q_pe, cache = problem.tensors(framework)
    caches = parts_of(problem, cache, separate)
    out, lse = wrapper.run(q_nope, q_pe, *caches, return_lse=True)
    assert type(out) is type(q_nope)
    assert out.dtype == q_nope.dtype
    check(problem, out, lse, (q_nope, q_pe, cache))


def test_names_order_and_defaults_are_those_of_the_documentation():
    def parameters(function):
        return {
            name: parameter.default
            for name, parameter in inspect.signature(function).parameters.items()
            if name != "self"
        }

    required = inspect.Parameter.empty
    assert list(parameters(BatchMLAPagedAttentionWrapper).items()) == [
        ("float_workspace_buffer", required),
        ("use_cuda_graph", False),
        ("qo_indptr", None),
        ("kv_indptr", None),
        ("kv_indices", None),
        ("kv_len_arr", None),
        ("backend", "auto"),
    ]
    planned = (
        "qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size "
        "causal sm_scale q_data_type kv_data_type"
    )
    assert list(parameters(BatchMLAPagedAttentionWrapper.plan).items()) == [
        *((name, required) for name in planned.split()),
        ("use_profiler", False),
    ]
    assert list(parameters(BatchMLAPagedAttentionWrapper.run).items())[:11] == [
        *((name, required) for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache")),
        ("out", None),
        ("lse", None),
        ("return_lse", False),
        ("profiler_buffer", None),
        ("kv_len", None),
        ("page_table", None),
        ("return_lse_base_on_e", False),
    ]
    assert list(parameters(merge_state)) == ["v_a", "s_a", "v_b", "s_b"]
    assert list(parameters(merge_states)) == ["v", "s"]
    assert list(parameters(merge_state_in_place)) == ["v", "s", "v_other", "s_other", "mask"]


def test_out_and_lse_in_place(framework):
    problem, wrapper, tensors, cache = planned_wrapper(framework)
    out = framework.empty(tensors[0].shape, "fp16")
    lse = framework.empty(out.shape[:2], "fp32")
    assert wrapper.run(*tensors, out=out, lse=lse) is out  # a lent lse is written in any case
    check(problem, out, lse, (*tensors[:2], cache))
    returned = wrapper.run(*tensors, out=out, lse=lse, return_lse=True)
    assert returned[0] is out
    assert returned[1] is lse


def test_base_of_the_lse(framework):
    _, wrapper, tensors, _ = planned_wrapper(framework)
    two = float64(wrapper.run(*tensors, return_lse=True)[1])
    natural = float64(wrapper.run(*tensors, return_lse=True, return_lse_base_on_e=True)[1])
    np.testing.assert_allclose(natural, two * np.log(2), rtol=1e-6)
    assert np.isneginf(natural[-1]).all()  # of the request without keys


@pytest.mark.parametrize("size", [0, 1, 1 << 24])
def test_a_workspace_of_any_size(framework, size):
    """A large one is the scratch, another is not enough and left alone."""
    problem = serving_problem(SMALL)
    memory = workspace_of(framework, size)
    wrapper = BatchMLAPagedAttentionWrapper(memory)
    plan(wrapper, problem, framework)
    q_nope, q_pe, cache = problem.tensors(framework)
    out, lse = wrapper.run(q_nope, q_pe, *parts_of(problem, cache, True), return_lse=True)
    check(problem, out, lse, (q_nope, q_pe, cache))


def test_wrappers_on_several_cpu_threads_may_share_a_workspace():
    memory = workspace_of(TORCH, 1 << 24)

    def serve(seed):
        problem = serving_problem(SMALL, seed)
        wrapper = BatchMLAPagedAttentionWrapper(memory)
        plan(wrapper, problem, TORCH)
        tensors = q_nope, q_pe, cache = problem.tensors(TORCH)
        for _ in range(20):
            out, lse = wrapper.run(q_nope, q_pe, *parts_of(problem, cache, False), return_lse=True)
            check(problem, out, lse, tensors)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(serve, range(3)))
    assert not memory.any()  # nothing of one wrapper is where another's could be


def test_more_than_the_default_limits(framework):
    """2000 requests, where the first plan had 4."""
    first, wrapper, tensors, cache = planned_wrapper(framework)
    out, lse = wrapper.run(*tensors, return_lse=True)
    check(first, out, lse, (*tensors[:2], cache))
    large = Problem(
        geometry=SMALL,
        queries=[1] * 2000,
        lengths=[3] * 2000,
        pages=[[i % 7] for i in range(2000)],
        num_pages=7,
        sm_scale=0.1,
        causal=True,
        seed=1,
    )
    for problem in (large, first):
        plan(wrapper, problem, framework)
        q_nope, q_pe, cache = problem.tensors(framework)
        out, lse = wrapper.run(q_nope, q_pe, *parts_of(problem, cache, True), return_lse=True)
        check(problem, out, lse, (q_nope, q_pe, cache))


def test_caches_of_several_shapes_under_one_plan(framework):
    problem, wrapper, (q_nope, q_pe, *_), cache = planned_wrapper(framework)
    larger = framework.empty((len(cache) + 5, *cache.shape[1:]), "fp16")
    larger[: len(cache)] = cache
    for _ in range(2):
        for separate, pages in ((False, cache), (True, cache), (True, larger)):
            caches = parts_of(problem, pages, separate)
            out, lse = wrapper.run(q_nope, q_pe, *caches, return_lse=True)
            check(problem, out, lse, (q_nope, q_pe, cache))
        plan(wrapper, problem, framework)


def test_a_cache_that_grew():
    """Pages that the last cache did not have are no error before the new one is seen."""
    problem, wrapper, tensors, _ = planned_wrapper(TORCH)
    wrapper.run(*tensors)
    moved = serving_problem(SMALL)
    moved.pages = [[page + 100 for page in pages] for pages in moved.pages]
    moved.num_pages = problem.num_pages + 100
    plan(wrapper, moved, TORCH)
    larger = moved.tensors(TORCH)
    caches = parts_of(moved, larger[2], False)
    check(moved, *wrapper.run(*larger[:2], *caches, return_lse=True), larger)
    with pytest.raises(ValueError, match=r"kv_indices\[.*expected 0 to .* got 1"):
        wrapper.run(*tensors)
    check(moved, *wrapper.run(*larger[:2], *caches, return_lse=True), larger)


def test_caches_of_two_sizes_in_turn():
    """A plan for one is no error of the other, and a wrong one is said by plan."""
    large, wrapper, tensors, cache = planned_wrapper(TORCH)
    wrapper.run(*tensors)
    small = serving_problem(SMALL, seed=3)
    small.lengths, small.pages = [8, 8, 8, 0], [[0, 1], [2, 3], [4, 5], []]
    small.queries, small.num_pages = [1, 1, 1, 1], 6
    q_nope, q_pe, few = small.tensors(TORCH)
    for _ in range(2):
        plan(wrapper, small, TORCH)
        out, lse = wrapper.run(q_nope, q_pe, *parts_of(small, few, False), return_lse=True)
        check(small, out, lse, (q_nope, q_pe, few))
        broken = serving_problem(SMALL)
        broken.lengths[1] += 100
        with pytest.raises(ValueError, match=r"plan: kv_len\[1\]: expected 0 to .*, got 230"):
            plan(wrapper, broken, TORCH)
        plan(wrapper, large, TORCH)
        check(large, *wrapper.run(*tensors, return_lse=True), (*tensors[:2], cache))


def test_page_indices_longer_than_the_plan(framework):
    """The array may be a buffer of which the plan uses the first entries."""
    problem = serving_problem(SMALL)
    wrapper = BatchMLAPagedAttentionWrapper(workspace_of(framework))
    indices = problem.indices()
    long = np.concatenate([indices["kv_indices"], np.full(50, -1, np.int32)])
    arrays = [indices["qo_indptr"], indices["kv_indptr"], long, indices["kv_len"]]
    dtype = dtype_of(framework, "fp16")
    wrapper.plan(*map(framework.from_numpy, arrays), 2, 16, 8, 4, True, 0.1, dtype, dtype)
    q_nope, q_pe, cache = problem.tensors(framework)
    out, lse = wrapper.run(q_nope, q_pe, *parts_of(problem, cache, True), return_lse=True)
    check(problem, out, lse, (q_nope, q_pe, cache))


def test_arrays_may_change_after_plan():
    problem, wrapper = serving_problem(SMALL), BatchMLAPagedAttentionWrapper(workspace_of(TORCH))
    arrays = [torch.from_numpy(values) for values in problem.indices().values()]
    wrapper.plan(*arrays, 2, 16, 8, 4, True, 0.1, torch.float16, torch.float16)
    for array in arrays:
        array.fill_(-7)
    q_nope, q_pe, cache = problem.tensors(TORCH)
    out, lse = wrapper.run(q_nope, q_pe, *parts_of(problem, cache, True), return_lse=True)
    check(problem, out, lse, (q_nope, q_pe, cache))


def test_a_refused_plan_leaves_the_last_one():
    problem, wrapper, tensors, cache = planned_wrapper(TORCH)
    wrapper.run(*tensors)
    broken = serving_problem(SMALL)
    broken.lengths[1] += 100
    with pytest.raises(ValueError, match=r"kv_len\[1\]: expected 0 to .*, got 230"):
        plan(wrapper, broken, TORCH)
    beyond_the_limits = Problem(SMALL, [1] * 2000, [5] * 2000, [[0]] * 2000, 7, 0.1, True, seed=1)
    with pytest.raises(ValueError, match=r"kv_len\[0\]: expected 0 to .*, got 5"):
        plan(wrapper, beyond_the_limits, TORCH)
    out, lse = wrapper.run(*tensors, return_lse=True)
    check(problem, out, lse, (*tensors[:2], cache))


def test_a_cache_without_pages(framework):
    nothing = Problem(SMALL, [1, 2], [0, 0], [[], []], 0, 0.1, True, seed=1)
    q_nope, q_pe, cache = nothing.tensors(framework)
    wrapper = BatchMLAPagedAttentionWrapper(workspace_of(framework))
    plan(wrapper, nothing, framework)
    for separate in (False, True):
        out, lse = wrapper.run(q_nope, q_pe, *parts_of(nothing, cache, separate), return_lse=True)
        assert not float64(out).any()
        assert np.isneginf(float64(lse)).all()


@pytest.mark.parametrize("scale", [1e-60, 1e300, 0.0, -1.0, float("nan")])
def test_a_scale_that_is_none_is_shown_as_given(scale):
    wrapper = BatchMLAPagedAttentionWrapper(workspace_of(TORCH))
    with pytest.raises(
        ValueError, match=rf"Wrapper\.plan: sm_scale: expected .*, got {re.escape(str(scale))}$"
    ):
        plan(wrapper, serving_problem(SMALL), TORCH, sm_scale=scale)


@pytest.mark.parametrize("backend", ["auto", "fa2", "fa3"])
def test_backends_that_are_accepted(backend):
    problem, wrapper, tensors, cache = planned_wrapper(TORCH, backend=backend)
    check(problem, *wrapper.run(*tensors, return_lse=True), (*tensors[:2], cache))


@pytest.mark.parametrize("backend", ["cutlass", "trtllm-gen"])
def test_backends_that_are_not(backend):
    with pytest.raises(NotImplementedError, match=rf"Wrapper: backend '{backend}' is not impl"):
        BatchMLAPagedAttentionWrapper(workspace_of(TORCH), backend=backend)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kv_data_type": torch.float8_e4m3fn}, r"kv_data_type torch\.float8_e4m3fn"),
        ({"q_data_type": torch.float8_e5m2}, r"q_data_type torch\.float8_e5m2"),
        ({"kv_data_type": torch.bfloat16}, "q_data_type fp16 with kv_data_type bf16"),
        ({"use_profiler": True}, "use_profiler"),
    ],
)
def test_plans_that_are_not_implemented(changed, named):
    wrapper = BatchMLAPagedAttentionWrapper(workspace_of(TORCH))
    with pytest.raises(NotImplementedError, match=rf"Wrapper\.plan: {named} is not implemented"):
        plan(wrapper, serving_problem(SMALL), TORCH, **changed)


@pytest.mark.parametrize(
    "name",
    [
        *("profiler_buffer", "kv_len", "page_table"),
        *("o_scale", "ckv_scale", "ckv_scale_arr", "kpe_scale"),
    ],
)
def test_run_arguments_that_are_not_implemented(name):
    _, wrapper, tensors, _ = planned_wrapper(TORCH)
    with pytest.raises(NotImplementedError, match=rf"Wrapper\.run: {name}.* is not implemented"):
        wrapper.run(*tensors, **{name: torch.ones(())})


def test_errors_name_what_is_wrong():
    wrapper = BatchMLAPagedAttentionWrapper(workspace_of(TORCH))
    q_nope, q_pe, cache = serving_problem(SMALL).tensors(TORCH)
    with pytest.raises(RuntimeError, match=r"run: plan: expected a plan before it, got none"):
        wrapper.run(q_nope, q_pe, cache[..., :16], cache[..., 16:])
    _, wrapper, (q_nope, q_pe, ckv, kpe), _ = planned_wrapper(TORCH)
    with pytest.raises(ValueError, match=r"ckv_cache: expected 3 dimensions, got 2"):
        wrapper.run(q_nope, q_pe, ckv[0], kpe)
    with pytest.raises(ValueError, match=r"q_nope\.shape\[0\]: expected 46 query tokens.* got 45"):
        wrapper.run(q_nope[1:], q_pe[1:], ckv, kpe)
    with pytest.raises(ValueError, match=r"out\.shape: expected \[46, 2, 16\], got"):
        wrapper.run(q_nope, q_pe, ckv, kpe, out=torch.empty(46, 2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="lse"):
        wrapper.run(q_nope, q_pe, ckv, kpe, lse=torch.empty(46, 2, dtype=torch.float16))
    for name, left_out in (
        ("q_pe", (q_nope, None, ckv, kpe)),
        ("kpe_cache", (q_nope, q_pe, ckv, None)),
    ):
        with pytest.raises(ValueError, match=rf"Wrapper\.run: {name}: expected .*, got None"):
            wrapper.run(*left_out)


def test_compiled_whole(torch_framework):
    problem, wrapper, tensors, _ = planned_wrapper(torch_framework)
    wrapper.run(*tensors)

    def layer(q_nope, q_pe, ckv, kpe):
        out, lse = wrapper.run(q_nope * 2, q_pe * 2, ckv, kpe, return_lse=True)
        return merge_state(out, lse, out, lse)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for queries in ([40, 1, 4, 1], [30, 6, 8, 2]):  # a plan is not compiled in
        problem.queries = queries
        plan(wrapper, problem, torch_framework)
        for mine, expected in zip(compiled(*tensors), layer(*tensors), strict=True):
            assert torch.equal(mine, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
