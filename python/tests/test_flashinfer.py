"""libmla.compat.flashinfer by what the documentation of FlashInfer 0.6 says."""

import inspect
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from frameworks import TOLERANCE, Framework, float64
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from libmla import Geometry
from libmla.compat.flashinfer import (
    BatchMLAPagedAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from problems import Problem, problems, serving_problem

torch = pytest.importorskip("torch")

SMALL = Geometry(num_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, page_size=4, dtype="fp16")
TORCH = Framework("torch")
INDICES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len")


def reference(problem, q_nope, q_pe, cache):
    """Out and base-2 LSE by torch in float64, from the index arrays."""
    q = torch.cat([torch.tensor(float64(part)) for part in (q_nope, q_pe)], dim=-1)
    cache = torch.tensor(float64(cache))
    indices = problem.indices()
    out = torch.zeros(q_nope.shape, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64)
    for i, length in enumerate(indices["kv_len"]):
        rows = slice(*indices["qo_indptr"][i : i + 2])
        pages = indices["kv_indices"][slice(*indices["kv_indptr"][i : i + 2])]
        keys = cache[torch.tensor(pages, dtype=torch.long)].flatten(0, 1)[:length]
        scores = torch.einsum("thd,kd->thk", q[rows], keys) * problem.sm_scale
        if problem.causal:
            count = scores.shape[0]
            last = torch.arange(count) + int(length) - count  # the last key that each query sees
            hidden = torch.arange(int(length)) > last[:, None]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        lse[rows] = torch.logsumexp(scores, dim=-1) * np.log2(np.e)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0)
        out[rows] = weights @ keys[:, : problem.geometry.kv_lora_rank]
    return out.numpy(), lse.numpy()


def workspace_of(framework, size=1 << 20):
    return framework.from_numpy(np.zeros(size, np.int8))


def dtype_of(framework, dtype):
    """The framework's own name of an element type."""
    if framework.name == "numpy":
        return {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]


def plan(wrapper, problem, framework, device_indices=False, **changed):
    g = problem.geometry
    arrays = problem.indices()
    if device_indices:
        arrays = {name: framework.from_numpy(values) for name, values in arrays.items()}
    elif framework.name == "torch":
        arrays = {name: torch.from_numpy(values) for name, values in arrays.items()}
    dtype = dtype_of(framework, g.dtype)
    arguments = {
        "num_heads": g.num_heads,
        "head_dim_ckv": g.kv_lora_rank,
        "head_dim_kpe": g.qk_rope_head_dim,
        "page_size": g.page_size,
        "causal": problem.causal,
        "sm_scale": problem.sm_scale,
        "q_data_type": dtype,
        "kv_data_type": dtype,
        **changed,
    }
    wrapper.plan(*(arrays[name] for name in INDICES), **arguments)


def parts_of(problem, cache, separate):
    """ckv and kpe: slices of one cache row, or tensors of their own."""
    rank = problem.geometry.kv_lora_rank
    parts = cache[..., :rank], cache[..., rank:]
    if not separate:
        return parts
    return tuple(
        part.copy() if isinstance(part, np.ndarray) else part.contiguous() for part in parts
    )


def check(problem, out, lse, tensors, rows=slice(None)):
    expected = reference(problem, *tensors)
    tolerance = TOLERANCE[problem.geometry.dtype]
    np.testing.assert_allclose(float64(out)[rows], expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(float64(lse)[rows], expected[1], rtol=1e-4, atol=1e-4)


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


def planned_wrapper(framework, problem=None, **options):
    problem = problem or serving_problem(SMALL)
    wrapper = BatchMLAPagedAttentionWrapper(workspace_of(framework), **options)
    plan(wrapper, problem, framework)
    q_nope, q_pe, cache = problem.tensors(framework)
    return problem, wrapper, (q_nope, q_pe, *parts_of(problem, cache, separate=False)), cache


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


# Graph mode. Its checks and its padding are the same where nothing can be captured.


def decode(lengths, seed, queries=1):
    counts = [-(-length // 4) for length in lengths]
    order = list(np.random.default_rng(seed).permutation(64))
    return Problem(
        geometry=SMALL,
        queries=[queries] * len(lengths),
        lengths=lengths,
        pages=[[int(order.pop()) for _ in range(count)] for count in counts],
        num_pages=64,
        sm_scale=0.3,
        causal=True,
        seed=seed,
    )


def buffers_of(framework, rows, pages):
    sizes = {"qo_indptr": rows + 1, "kv_indptr": rows + 1, "kv_indices": pages, "kv_len_arr": rows}
    return {name: framework.from_numpy(np.full(size, -1, np.int32)) for name, size in sizes.items()}


class Decoder:
    """A wrapper in graph mode over tensors that stay where they are."""

    def __init__(self, framework, rows=3, tokens=3):
        self.framework = framework
        self.buffers = buffers_of(framework, rows, 60)
        self.wrapper = BatchMLAPagedAttentionWrapper(
            workspace_of(framework, 1 << 24), use_cuda_graph=True, **self.buffers
        )
        self.q_nope, self.out = (framework.empty((tokens, 2, 16), "fp16") for _ in range(2))
        self.q_pe = framework.empty((tokens, 2, 8), "fp16")
        self.cache = framework.empty((64, 4, 24), "fp16")
        self.lse = framework.empty((tokens, 2), "fp32")

    def load(self, problem, device_indices=True):
        plan(self.wrapper, problem, self.framework, device_indices)
        tensors = problem.tensors(self.framework)
        tokens = len(tensors[0])
        self.q_nope[:tokens], self.q_pe[:tokens], self.cache[:] = tensors
        return problem, tensors

    def run(self):
        caches = self.cache[..., :16], self.cache[..., 16:]
        self.wrapper.run(self.q_nope, self.q_pe, *caches, out=self.out, lse=self.lse)

    def check(self, problem, tensors):
        tokens = len(tensors[0])
        check(problem, self.out, self.lse, tensors, slice(tokens))
        assert not float64(self.out)[tokens:].any()
        assert np.isneginf(float64(self.lse)[tokens:]).all()


STEPS = [
    decode([5, 40, 60], seed=1),
    decode([1, 2, 3], seed=2),
    decode([17, 0, 200], seed=3),
    decode([64, 64, 64], seed=4),
]


@pytest.mark.parametrize("device_indices", [False, True])
def test_graph_mode_copies_into_the_buffers(framework, device_indices):
    decoder = Decoder(framework)
    for problem in STEPS:
        loaded = decoder.load(problem, device_indices)
        decoder.run()
        decoder.check(*loaded)
        for buffer, values in zip(
            decoder.buffers.values(), problem.indices().values(), strict=True
        ):
            assert float64(buffer)[: len(values)].tolist() == values.tolist()


def test_graph_mode_plans_from_the_buffers_themselves(framework):
    decoder = Decoder(framework)
    for problem in STEPS:
        for buffer, values in zip(
            decoder.buffers.values(), problem.indices().values(), strict=True
        ):
            buffer[: len(values)] = framework.from_numpy(values)
        dtype = dtype_of(framework, "fp16")
        decoder.wrapper.plan(*decoder.buffers.values(), 2, 16, 8, 4, True, 0.3, dtype, dtype)
        tensors = problem.tensors(framework)
        decoder.q_nope[:], decoder.q_pe[:], decoder.cache[:] = tensors
        decoder.run()
        decoder.check(problem, tensors)


def test_graph_mode_with_fewer_tokens_than_the_graph(framework):
    decoder = Decoder(framework, tokens=6)
    decoder.load(decode([30, 20, 10], seed=5, queries=2))
    decoder.run()
    loaded = decoder.load(decode([30, 20, 10], seed=6))
    decoder.run()
    decoder.check(*loaded)


def test_graph_mode_checks_the_buffers(framework):
    def wrapper(**buffers):
        return BatchMLAPagedAttentionWrapper(
            workspace_of(framework), True, **{**buffers_of(framework, 3, 60), **buffers}
        )

    three = framework.from_numpy(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"Wrapper: kv_indices: expected a buffer.*got None"):
        wrapper(kv_indices=None)
    with pytest.raises(ValueError, match=r"kv_indptr: expected 4 entries.* got 3"):
        wrapper(kv_indptr=three)
    with pytest.raises(ValueError, match=r"plan: qo_indptr: expected the buffer's 4 .* got 3"):
        plan(wrapper(), decode([5, 5], seed=0), framework)
    with pytest.raises(ValueError, match=r"plan: kv_indices: expected at most the buffer's 3 ent"):
        plan(wrapper(kv_indices=three), decode([5, 5, 5], seed=0), framework)


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"])
def test_graph_mode_refuses_buffers_that_cannot_be_written_to(framework, name):
    buffers = buffers_of(framework, 3, 60)
    if framework.name == "numpy":
        buffers[name].flags.writeable = False
        message = rf"Wrapper: {name}: expected an array that may be written to, got a read-only one"
    else:
        buffers[name] = buffers[name][:1].expand(len(buffers[name]))
        message = rf"Wrapper: {name}: expected memory of its own for each entry, got stride 0"
    with pytest.raises(ValueError, match=message):
        BatchMLAPagedAttentionWrapper(workspace_of(framework), True, **buffers)


def too_many_pages():
    problem = decode([5, 40, 60], seed=7)
    problem.pages[0][0] = 64
    return problem, {}, r"kv_indices\[0\]: expected 0 to 63.*, got 64"


def too_many_tokens():
    return decode([5, 40, 60], seed=7, queries=2), {}, "query tokens.*: expected .* 3.*, got 6"


def another_geometry():
    changed = {"num_heads": 4}
    return decode([5, 40, 60], seed=7), changed, "geometry: expected .*heads=2.*, got .*heads=4"


REFUSED = [too_many_pages, too_many_tokens, another_geometry]


@pytest.mark.parametrize("refused", REFUSED)
def test_graph_mode_refuses_what_a_run_before_cannot_take(framework, refused):
    """Its graph would be replayed with the plan before, which stays in use."""
    decoder = Decoder(framework)
    loaded = decoder.load(STEPS[0])
    decoder.run()
    held = {name: float64(buffer).tolist() for name, buffer in decoder.buffers.items()}
    problem, changed, message = refused()
    with pytest.raises(ValueError, match=message):
        plan(decoder.wrapper, problem, framework, **changed)
    decoder.out[:] = framework.empty(decoder.out.shape, "fp16")
    decoder.run()
    decoder.check(*loaded)
    assert held == {name: float64(buffer).tolist() for name, buffer in decoder.buffers.items()}


def test_graph_mode_plans_all_sizes_or_none(framework):
    decoder = Decoder(framework, tokens=6)
    loaded = decoder.load(STEPS[0])
    wide = decoder.q_nope, decoder.q_pe, decoder.out, decoder.lse
    decoder.run()
    decoder.q_nope, decoder.q_pe, decoder.out, decoder.lse = (tensor[:3] for tensor in wide)
    decoder.run()
    with pytest.raises(ValueError, match=r"query tokens.*: expected .* 3.*, got 6"):
        plan(decoder.wrapper, decode([5, 40, 60], seed=7, queries=2), framework)
    for tensors in (tuple(tensor[:3] for tensor in wide), wide):
        decoder.q_nope, decoder.q_pe, decoder.out, decoder.lse = tensors
        decoder.out[:] = framework.empty(decoder.out.shape, "fp16")
        decoder.run()
        decoder.check(*loaded)


def test_graph_mode_forgets_a_run_that_was_refused(framework):
    decoder = Decoder(framework)
    decoder.load(decode([1, 0, 0], seed=0))
    few = decoder.cache[:0, :, :16], decoder.cache[:0, :, 16:]
    with pytest.raises(ValueError, match=r"kv_indices\[0\]: expected .*, got"):
        decoder.wrapper.run(decoder.q_nope, decoder.q_pe, *few)
    loaded = decoder.load(decode([0, 0, 0], seed=0))
    with pytest.raises(ValueError, match=r"out\.shape: expected"):
        decoder.wrapper.run(decoder.q_nope, decoder.q_pe, *few, out=decoder.out[..., :8])
    loaded = decoder.load(STEPS[0])
    decoder.run()
    decoder.check(*loaded)


def test_graph_mode_takes_any_array_of_numpy(framework):
    """Reversed and read-only ones too, which PyTorch does not."""
    decoder, problem = Decoder(framework), STEPS[0]
    arrays = [values[::-1].copy()[::-1] for values in problem.indices().values()]
    for values in arrays:
        values.flags.writeable = False
    dtype = dtype_of(framework, "fp16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder.wrapper.plan(*arrays, 2, 16, 8, 4, True, 0.3, dtype, dtype)
    for buffer, values in zip(decoder.buffers.values(), arrays, strict=True):
        assert float64(buffer)[: len(values)].tolist() == values.tolist()


@pytest.mark.cuda
class TestCaptured:
    CUDA = Framework("torch", "cuda:0")

    def captured(self, decoder):
        decoder.load(STEPS[0])
        decoder.run()  # the first run, which allocates
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoder.run()
        return graph

    @pytest.mark.parametrize("device_indices", [False, True])
    def test_replays_follow_plans(self, device_indices):
        decoder = Decoder(self.CUDA)
        graph = self.captured(decoder)
        for problem in STEPS:
            loaded = decoder.load(problem, device_indices)
            decoder.out.fill_(float("nan"))
            graph.replay()
            decoder.check(*loaded)

    @pytest.mark.parametrize("refused", REFUSED)
    def test_a_refused_plan_leaves_the_one_before_to_replays(self, refused):
        decoder = Decoder(self.CUDA)
        graph = self.captured(decoder)
        loaded = decoder.load(STEPS[1])
        problem, changed, message = refused()
        with pytest.raises(ValueError, match=message):
            plan(decoder.wrapper, problem, self.CUDA, **changed)
        decoder.out.fill_(float("nan"))
        graph.replay()
        decoder.check(*loaded)

    def test_graphs_of_several_sizes_follow_the_same_plans(self):
        decoder = Decoder(self.CUDA, tokens=6)
        decoder.load(decode([30, 20, 10], seed=5, queries=2))
        decoder.run()
        wide = torch.cuda.CUDAGraph()
        with torch.cuda.graph(wide):
            decoder.run()
        whole = decoder.q_nope, decoder.q_pe, decoder.out, decoder.lse
        narrow_tensors = tuple(tensor[:3] for tensor in whole)
        decoder.q_nope, decoder.q_pe, decoder.out, decoder.lse = narrow_tensors
        narrow = self.captured(decoder)
        for graph, tensors in ((narrow, narrow_tensors), (wide, whole), (narrow, narrow_tensors)):
            decoder.q_nope, decoder.q_pe, decoder.out, decoder.lse = tensors
            for problem in STEPS:
                loaded = decoder.load(problem)
                graph.replay()
                decoder.check(*loaded)

    def test_a_first_run_in_a_capture_is_refused(self):
        decoder = Decoder(self.CUDA)
        decoder.load(STEPS[0])
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match=r"run: capture: expected a run before it"),
            torch.cuda.graph(graph),
        ):
            decoder.run()

    def test_a_capture_without_graph_mode_is_refused(self):
        _, wrapper, tensors, _ = planned_wrapper(self.CUDA)
        out = wrapper.run(*tensors)
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match="expected no capture"),
            torch.cuda.graph(graph),
        ):
            wrapper.run(*tensors, out=out)

    def test_natural_logarithms_are_captured(self):
        decoder = Decoder(self.CUDA)
        self.captured(decoder)
        caches = decoder.cache[..., :16], decoder.cache[..., 16:]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoder.wrapper.run(
                decoder.q_nope,
                decoder.q_pe,
                *caches,
                out=decoder.out,
                lse=decoder.lse,
                return_lse_base_on_e=True,
            )
        problem, tensors = decoder.load(STEPS[3])
        graph.replay()
        graph.replay()
        expected = reference(problem, *tensors)[1] * np.log(2)
        np.testing.assert_allclose(float64(decoder.lse), expected, rtol=1e-4, atol=1e-4)


def states_of(random, framework, shape, dtype):
    """v and s of any values, with tokens that some states have no keys for."""
    v, s = random.standard_normal(shape), random.standard_normal(shape[:-1]) * 4
    s[random.random(s.shape) < 0.2] = -np.inf
    s[0] = -np.inf
    return framework.array(v, dtype), framework.array(s, "fp32")


def merged(v, s, axis):
    """In base 2, by torch in float64."""
    v, s = torch.tensor(float64(v)), torch.tensor(float64(s))
    total = torch.logsumexp(s * np.log(2), dim=axis)
    weights = torch.exp(s * np.log(2) - total.unsqueeze(axis)).nan_to_num(0)
    return (weights.unsqueeze(-1) * v).sum(axis).numpy(), (total / np.log(2)).numpy()


def check_merged(got, expected, dtype):
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(float64(got[0]), expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(float64(got[1]), expected[1], rtol=1e-5, atol=1e-5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(1, 9)),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_merge_states_of_any_shape(framework, shape, dtype, seed):
    v, s = states_of(np.random.default_rng(seed), framework, shape, dtype)
    out, lse = merge_states(v, s)
    assert out.dtype == v.dtype
    assert type(lse) is type(s)
    check_merged((out, lse), merged(v, s, 1), dtype)
    a, b = 0, shape[1] - 1
    pair = merge_state(v[:, a], s[:, a], v[:, b], s[:, b])
    check_merged(pair, merged(v[:, [a, b]], s[:, [a, b]], 1), dtype)


def test_more_states_than_one_launch_takes(framework, random):
    v, s = states_of(random, framework, (3, 700, 2, 8), "fp16")
    check_merged(merge_states(v, s), merged(v, s, 1), "fp16")


def test_an_lse_of_another_type_is_converted(framework, random):
    v, s = states_of(random, framework, (3, 2, 2, 8), "fp16")
    rounded = framework.array(float64(s), "fp16")
    out, lse = merge_states(v, rounded)
    assert lse.dtype == s.dtype
    check_merged((out, lse), merged(v, rounded, 1), "fp16")


@pytest.mark.parametrize("masked", [False, True])
def test_merge_state_in_place(framework, random, masked):
    v, s = states_of(random, framework, (6, 2, 2, 8), "fp16")
    s[:] = framework.array(random.standard_normal((6, 2, 2)), "fp32")
    first = framework.array(float64(v[:, 0]), "fp16"), framework.array(float64(s[:, 0]), "fp32")
    kept = tuple(map(float64, first))
    expected = merged(v, s, 1)
    mask = np.arange(6) % 2 == 0 if masked else np.ones(6, bool)
    lent = {"mask": framework.from_numpy(mask)} if masked else {}
    assert merge_state_in_place(*first, v[:, 1], s[:, 1], **lent) is None
    check_merged(
        tuple(part[mask] for part in map(float64, first)),
        tuple(part[mask] for part in expected),
        "fp16",
    )
    for part, before in zip(first, kept, strict=True):
        np.testing.assert_array_equal(float64(part)[~mask], before[~mask])


def test_merging_refuses_other_shapes_and_masks(framework, random):
    v, s = states_of(random, framework, (6, 2, 2, 8), "fp32")
    with pytest.raises(
        ValueError, match=r"merge_states: shapes of v and s: .*, got \[6, 1, 2, 8\]"
    ):
        merge_states(v[:, :1], s)
    for mask in (np.ones(6, np.int32), np.ones(1, bool)):
        with pytest.raises(
            ValueError, match=r"merge_state_in_place: mask: expected \[6\] bool, got"
        ):
            merge_state_in_place(
                v[:, 0], s[:, 0], v[:, 1], s[:, 1], mask=framework.from_numpy(mask)
            )


def test_attention_over_two_halves_is_merged(framework):
    """Out and LSE of run are what merge_state takes."""
    problem = decode([61, 33], seed=9)
    problem.causal = False
    q_nope, q_pe, cache = problem.tensors(framework)
    states = []
    for first in (True, False):
        half = decode([61, 33], seed=9)
        half.causal = False
        half.pages = [pages[:5] if first else pages[5:] for pages in problem.pages]
        half.lengths = [20 if first else length - 20 for length in problem.lengths]
        wrapper = BatchMLAPagedAttentionWrapper(workspace_of(framework))
        plan(wrapper, half, framework)
        caches = parts_of(half, cache, True)
        states += wrapper.run(q_nope, q_pe, *caches, return_lse=True)
    check(problem, *merge_state(*states), (q_nope, q_pe, cache))


def test_nothing_is_merged_to_nothing(framework, random):
    v, s = states_of(random, framework, (2, 2, 3, 8), "fp32")
    v, s = v[:0], s[:0]
    for out, lse in (merge_states(v, s), merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])):
        assert tuple(out.shape) == (0, 3, 8)
        assert tuple(lse.shape) == (0, 3)
    merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1])


def test_a_mask_of_another_library(torch_framework, random):
    """Read-only and reversed, too."""
    mask = np.array([True, False, True])[::-1]
    mask.flags.writeable = False
    v, s = states_of(random, Framework("numpy"), (3, 2, 2, 8), "fp32")
    s[:] = random.standard_normal(s.shape)
    mixed = [
        (torch_framework.from_numpy, lambda mask: mask),
        (np.array, lambda mask: torch_framework.from_numpy(mask.copy())),
    ]
    for values, masks in mixed:
        first = values(v[:, 0].copy()), values(s[:, 0].copy())
        merge_state_in_place(*first, values(v[:, 1].copy()), values(s[:, 1].copy()), masks(mask))
        check_merged(
            tuple(float64(part)[mask] for part in first),
            tuple(part[mask] for part in merged(v, s, 1)),
            "fp32",
        )
        np.testing.assert_array_equal(float64(first[0])[~mask], v[~mask, 0])


def test_merge_refuses():
    with pytest.raises(ValueError, match="merge_states: num_states: expected 1 or more, got 0"):
        merge_states(torch.zeros(2, 0, 3, 4), torch.zeros(2, 0, 3))
    v, s = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"merge_states: .*expected .*, got"):
        merge_state(v, s, v[:1], s)
    with pytest.raises(ValueError, match=r"merge_states: states\[0\]\.lse\.shape: expected"):
        merge_state(v, s[:1], v, s)
    with pytest.raises(ValueError, match=r"merge_states: .*fp32"):
        merge_state_in_place(v, s.half(), v, s)
