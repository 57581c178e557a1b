"""Every argument of every public call, wrong in each way: ValueError with the four parts."""

import inspect

import libmla
import pytest
from libmla import (
    AttentionResource,
    AttentionStep,
    Bucket,
    CacheStrides,
    Executor,
    Geometry,
    KvResource,
    KvStep,
    KvStream,
    LatentPool,
    Limits,
    PagedAttention,
    Segment,
    SlotLease,
    SplitPolicy,
    Step,
    StepRunner,
)

torch = pytest.importorskip("torch")

from libmla.compat import flash_mla, flashinfer, mstar  # noqa: E402  # they need PyTorch
from world import (  # noqa: E402
    World,
    flash_mla_call,
    flashinfer_plan,
    flashinfer_wrapper,
    mstar_plan,
    mstar_wrapper,
)
from wrong_arguments import (  # noqa: E402
    ARRAY,
    BASE,
    DEVICE,
    FOUR_PARTS,
    HUGE,
    INTEGER,
    INTEGERS,
    NUMBER,
    OBJECT,
    PAIRS,
    TEXT,
    left_out,
    torch_only,
)

CONFIG = {
    "geometry": OBJECT,
    "num_pages": INTEGER,
    "device": DEVICE,
    "strides": left_out(OBJECT),
    "limits": left_out(OBJECT),
    "bucket": left_out(OBJECT),
    "splits": left_out(OBJECT),
    "kernel": TEXT,
    "executor": left_out(OBJECT),
}
MEMORY = left_out(ARRAY, "dtype", "rank", "scalar")  # of any shape and type
POOL = dict.fromkeys(
    ("num_layers", "num_pages", "page_size", "kv_lora_rank", "qk_rope_head_dim"), INTEGER
)
QUERIES = {
    "q_nope": ARRAY,
    "q_pe": ARRAY,
    "out": left_out(ARRAY),
    "lse": left_out(ARRAY),
}


def config(world):
    return {"geometry": world.geometry, "num_pages": 4}


def pool_shape(world):
    return {"num_layers": 1, "num_pages": 2, "page_size": 4, "kv_lora_rank": 4} | {
        "qk_rope_head_dim": 4
    }


def options(world):
    return {"kv": world.kv, "num_heads": 2, "sm_scale": 1.0}


OPTIONS = {
    "kv": OBJECT,
    "num_heads": INTEGER,
    "sm_scale": NUMBER,
    "lse_base": BASE,
    "limits": left_out(OBJECT),
    "splits": left_out(OBJECT),
    "kernel": TEXT,
    "executor": left_out(OBJECT),
}
STREAM = {"request": INTEGER, "label": TEXT}

# Name, what is called, good arguments, and how each is wrong.
CALLS = {
    "Executor": (lambda w: Executor, lambda w: {"num_threads": 1}, {"num_threads": INTEGER}),
    "supports": (
        lambda w: libmla.supports,
        lambda w: {"geometry": w.geometry},
        {"geometry": OBJECT, "device": DEVICE, "strides": left_out(OBJECT), "kernel": TEXT},
    ),
    "PagedAttention": (lambda w: PagedAttention, config, {**CONFIG, "scratch": MEMORY}),
    "PagedAttention.scratch_bytes": (lambda w: PagedAttention.scratch_bytes, config, CONFIG),
    "PagedAttention.plan": (
        lambda w: w.attention.plan,
        lambda w: {**w.indices, "sm_scale": 1.0},
        {
            "qo_indptr": INTEGERS,
            "kv_indptr": INTEGERS,
            "kv_indices": INTEGERS,
            "kv_len": INTEGERS,
            "kv_last_page_len": left_out(INTEGERS),
            "sm_scale": NUMBER,
            "lse_base": BASE,
        },
    ),
    "PagedAttention.run": (
        lambda w: w.attention.run,
        lambda w: {**w.queries(), "ckv": w.ckv, "kpe": w.kpe},
        {**QUERIES, "ckv": ARRAY, "kpe": ARRAY},
    ),
    "merge_states": (
        lambda w: libmla.merge_states,
        lambda w: {"states": [(w.out, w.lse)], "out": w.out.clone(), "lse": w.lse.clone()},
        {
            "states": PAIRS,
            "out": left_out(ARRAY, "dtype"),
            "lse": left_out(ARRAY),
            "lse_base": BASE,
            "executor": left_out(OBJECT),
        },
    ),
    "LatentPool": (lambda w: LatentPool, pool_shape, {**POOL, "device": DEVICE, "memory": MEMORY}),
    "LatentPool.bytes": (lambda w: LatentPool.bytes, pool_shape, POOL),
    "LatentPool.layer": (lambda w: w.pool.layer, lambda w: {"layer": 0}, {"layer": INTEGER}),
    "LatentPool.views": (lambda w: w.pool.views, lambda w: {"layer": 0}, {"layer": INTEGER}),
    "LatentPool.append": (
        lambda w: w.pool.append,
        lambda w: {"layer": 0, "slots": [3], "ckv": w.ckv_rows, "kpe": w.kpe_rows},
        {"layer": INTEGER, "slots": INTEGERS, "ckv": ARRAY, "kpe": ARRAY},
    ),
    "LatentPool.gather": (
        lambda w: w.pool.gather,
        lambda w: {"layer": 0, "slots": [3], "rows": torch.zeros(1, 24)},
        {"layer": INTEGER, "slots": INTEGERS, "rows": ARRAY},
    ),
    "LatentPool.copy_pages": (
        lambda w: w.pool.copy_pages,
        lambda w: {"copies": [(0, 1)]},
        {"copies": PAIRS},
    ),
    "KvResource": (
        lambda w: KvResource,
        lambda w: {"pool": LatentPool(**pool_shape(w))},
        {"pool": OBJECT, "key": TEXT},
    ),
    "KvResource.open": (
        lambda w: w.kv.open,
        lambda w: {"request": 9, "num_tokens": 1, "page_keys": [(1, 2)]},
        {**STREAM, "num_tokens": INTEGER, "page_keys": PAIRS},
    ),
    "KvResource.add_page_keys": (
        lambda w: w.kv.add_page_keys,
        lambda w: {"request": 8, "page_keys": [(1, 2)]},
        {**STREAM, "page_keys": PAIRS},
    ),
    "KvResource.fork": (
        lambda w: w.kv.fork,
        lambda w: {"source": KvStream(8), "target": KvStream(9)},
        {"source": OBJECT, "target": OBJECT},
    ),
    "KvResource.trim": (
        lambda w: w.kv.trim,
        lambda w: {"request": 8, "num_tokens": 0},
        {**STREAM, "num_tokens": INTEGER},
    ),
    "KvResource.remove": (lambda w: w.kv.remove, lambda w: {"request": 8}, {"request": INTEGER}),
    "KvResource.contains": (lambda w: w.kv.contains, lambda w: {"request": 8}, STREAM),
    "KvResource.length": (lambda w: w.kv.length, lambda w: {"request": 8}, STREAM),
    "KvResource.pages": (lambda w: w.kv.pages, lambda w: {"request": 8}, STREAM),
    "KvResource.label_plan": (lambda w: w.kv.label_plan, lambda w: {}, {"label": TEXT}),
    "KvResource.slots_buf": (lambda w: w.kv.slots_buf, lambda w: {}, {"label": TEXT}),
    "KvResource.write": (
        lambda w: w.kv.write,
        lambda w: {"layer": 0, "ckv": w.ckv_rows, "kpe": w.kpe_rows},
        {"layer": INTEGER, "ckv": ARRAY, "kpe": ARRAY, "label": TEXT},
    ),
    "AttentionResource": (
        lambda w: AttentionResource,
        options,
        {**OPTIONS, "key": TEXT, "scratch": MEMORY},
    ),
    "AttentionResource.scratch_bytes": (
        lambda w: AttentionResource.scratch_bytes,
        options,
        OPTIONS,
    ),
    "AttentionResource.set_cursor": (
        lambda w: w.resource.set_cursor,
        lambda w: {"label": "main", "layer": 0},
        {"label": TEXT, "layer": INTEGER},
    ),
    "AttentionResource.run": (
        lambda w: w.resource.run,
        lambda w: w.queries(),
        {
            **QUERIES,
            "label": left_out(TEXT),
            "layer": left_out(INTEGER),
            "cache": left_out(PAIRS),
            "pass_index": INTEGER,
        },
    ),
    "AttentionResource.qo_indptr_buf": (
        lambda w: w.resource.qo_indptr_buf,
        lambda w: {},
        {"label": TEXT, "pass_index": INTEGER},
    ),
    "AttentionResource.kv_len_buf": (
        lambda w: w.resource.kv_len_buf,
        lambda w: {},
        {"label": TEXT, "pass_index": INTEGER},
    ),
    "AttentionResource.select_last_hidden": (
        lambda w: w.resource.select_last_hidden,
        lambda w: {"hidden": torch.zeros(1, 6), "out": torch.zeros(1, 6)},
        {"hidden": ARRAY, "out": ARRAY, "label": TEXT, "pass_index": INTEGER},
    ),
    "Step": (lambda w: Step, lambda w: {"parts": {"kv": KvStep()}}, {"parts": OBJECT}),
    "StepRunner": (lambda w: StepRunner, lambda w: {"resources": []}, {"resources": PAIRS}),
    "StepRunner.admit": (lambda w: w.runner.admit, None, {"step": OBJECT}),
    "StepRunner.plan": (
        lambda w: w.runner.plan,
        lambda w: {"step": w.step},
        {"step": OBJECT, "lease": left_out(OBJECT)},
    ),
    "StepRunner.pre_admit": (lambda w: w.runner.pre_admit, None, {"step": OBJECT}),
    "StepRunner.pre_plan": (
        lambda w: w.runner.pre_plan,
        None,
        {"step": OBJECT, "lease": left_out(OBJECT)},
    ),
    "StepRunner.size_graph_buffers": (
        lambda w: w.runner.size_graph_buffers,
        lambda w: {"shapes": [(Bucket(1, 1), 1)]},
        {"shapes": PAIRS},
    ),
    "Geometry": (
        lambda w: Geometry,
        lambda w: {"num_heads": 1, "kv_lora_rank": 1, "qk_rope_head_dim": 0, "page_size": 1},
        dict.fromkeys(
            ("num_heads", "kv_lora_rank", "qk_rope_head_dim", "page_size"),
            left_out(INTEGER, "negative") | {"none": lambda good: None},
        )
        | {"dtype": DEVICE},
    ),
    "CacheStrides": (
        lambda w: CacheStrides,
        lambda w: {"ckv_page": 1, "ckv_row": 1},
        dict.fromkeys(
            ("ckv_page", "ckv_row", "kpe_page", "kpe_row"), left_out(INTEGER, "negative")
        ),
    ),
    "Limits": (
        lambda w: Limits,
        lambda w: {},
        dict.fromkeys(
            ("max_rows", "max_tokens", "max_listed_pages"), left_out(INTEGER, "negative")
        ),
    ),
    "Bucket": (
        lambda w: Bucket,
        lambda w: {"num_rows": 1, "num_tokens": 1},
        dict.fromkeys(("num_rows", "num_tokens"), left_out(INTEGER, "negative")),
    ),
    "SplitPolicy": (
        lambda w: SplitPolicy,
        lambda w: {},
        dict.fromkeys(("fixed_tokens", "forced_count"), left_out(INTEGER, "negative")),
    ),
    "SlotLease": (
        lambda w: SlotLease,
        lambda w: {"bucket": Bucket(1, 1)},
        {"slot": left_out(INTEGER, "negative"), "walk": TEXT, "bucket": left_out(OBJECT)},
    ),
    "to_torch": (lambda w: libmla.to_torch, lambda w: {"tensor": w.out}, {"tensor": OBJECT}),
    "to_numpy": (lambda w: libmla.to_numpy, lambda w: {"tensor": w.out}, {"tensor": OBJECT}),
}


def buffers(world):
    return {
        "float_workspace_buffer": torch.zeros(64),
        "use_cuda_graph": True,
        "qo_indptr": torch.zeros(3, dtype=torch.int32),
        "kv_indptr": torch.zeros(3, dtype=torch.int32),
        "kv_indices": torch.zeros(4, dtype=torch.int32),
        "kv_len_arr": torch.zeros(2, dtype=torch.int32),
    }


def merged(world):
    return {"v_a": world.out, "s_a": world.lse, "v_b": world.out, "s_b": world.lse}


TENSOR = torch_only(ARRAY)
INDEX = {**left_out(ARRAY), "none": lambda good: None}
SOME_DTYPE = left_out(ARRAY, "dtype") | {"none": lambda good: None}  # converted

CALLS |= {
    "flash_mla.flash_mla_with_kvcache": (
        lambda w: flash_mla.flash_mla_with_kvcache,
        flash_mla_call,
        {
            "q": TENSOR,
            "k_cache": TENSOR,
            "block_table": TENSOR,
            "cache_seqlens": TENSOR,
            "head_dim_v": INTEGER,
            "tile_scheduler_metadata": OBJECT,
            "softmax_scale": left_out(NUMBER),
        },
    ),
    "flashinfer.BatchMLAPagedAttentionWrapper": (
        lambda w: flashinfer.BatchMLAPagedAttentionWrapper,
        buffers,
        {"float_workspace_buffer": MEMORY | {"none": lambda good: None}}
        | dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), INDEX),
    ),
    "flashinfer.BatchMLAPagedAttentionWrapper.plan": (
        lambda w: flashinfer_wrapper().plan,
        flashinfer_plan,
        dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), INDEX)
        | dict.fromkeys(
            ("num_heads", "head_dim_ckv", "head_dim_kpe", "page_size"),
            left_out(INTEGER, "negative") | {"none": lambda good: None},
        )
        | {"sm_scale": NUMBER, "q_data_type": DEVICE, "kv_data_type": DEVICE},
    ),
    "flashinfer.BatchMLAPagedAttentionWrapper.run": (
        lambda w: flashinfer_wrapper().run,
        lambda w: {**w.queries(), "ckv_cache": w.ckv, "kpe_cache": w.kpe},
        {**QUERIES, "ckv_cache": ARRAY, "kpe_cache": ARRAY},
    ),
    "flashinfer.merge_state": (
        lambda w: flashinfer.merge_state,
        merged,
        {"v_a": SOME_DTYPE, "v_b": SOME_DTYPE, "s_a": SOME_DTYPE, "s_b": SOME_DTYPE},
    ),
    "flashinfer.merge_states": (
        lambda w: flashinfer.merge_states,
        lambda w: {"v": w.out[:, None], "s": w.lse[:, None]},
        {"v": SOME_DTYPE, "s": SOME_DTYPE},
    ),
    "flashinfer.merge_state_in_place": (
        lambda w: flashinfer.merge_state_in_place,
        lambda w: {
            "v": w.out,
            "s": w.lse,
            "v_other": w.out.clone(),
            "s_other": w.lse.clone(),
            "mask": torch.ones(1, dtype=torch.bool),
        },
        {
            "v": SOME_DTYPE,
            "s": ARRAY,
            "v_other": SOME_DTYPE,
            "s_other": SOME_DTYPE,
            "mask": left_out(ARRAY, "negative"),
        },
    ),
    "mstar.FlashInferMLAWrapper": (
        lambda w: mstar.FlashInferMLAWrapper,
        lambda w: {
            "workspace_buffer": None,
            "num_qo_heads": 2,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "page_size": 4,
            "sm_scale": 1.0,
            "device": "cpu",
        },
        dict.fromkeys(("num_qo_heads", "kv_lora_rank", "qk_rope_head_dim", "page_size"), INTEGER)
        | dict.fromkeys(("batch_size", "max_num_pages", "max_listed_pages"), left_out(INTEGER))
        | {"sm_scale": NUMBER, "device": left_out(DEVICE, "number"), "backend": TEXT},
    ),
    "mstar.FlashInferMLAWrapper.plan": (
        lambda w: mstar_wrapper().plan,
        mstar_plan,
        dict.fromkeys(
            ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"), INDEX
        )
        | {"kv_dtype": {**left_out(DEVICE), "list": lambda good: [1]}},
    ),
    "mstar.FlashInferMLAWrapper.run": (
        lambda w: mstar_wrapper().run,
        lambda w: {
            "q_nope": w.q_nope,
            "q_pe": w.q_pe,
            "kv_cache_layer": torch.zeros(5, 4, 24),
        },
        {
            "q_nope": torch_only(SOME_DTYPE),
            "q_pe": torch_only(SOME_DTYPE),
            "kv_cache_layer": torch_only(ARRAY),
        },
    ),
    "mstar.flashinfer_mla_supports": (
        lambda w: mstar.flashinfer_mla_supports,
        lambda w: {"kv_lora_rank": 16, "qk_rope_head_dim": 8},
        dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim"), left_out(INTEGER, "negative")),
    ),
}


def wrong_arguments():
    for name, (_, _, parameters) in CALLS.items():
        for parameter, ways in parameters.items():
            for way in ways:
                yield pytest.param(name, parameter, way, id=f"{name}-{parameter}-{way}")


@pytest.mark.parametrize(("name", "parameter", "way"), list(wrong_arguments()))
def test_a_wrong_argument_is_refused_in_four_parts(name, parameter, way):
    world = World()
    function, make_good, parameters = CALLS[name]
    good = make_good(world) if make_good else {"step": world.step, "lease": None}
    good = {key: value for key, value in good.items() if make_good or key in parameters}
    bad = parameters[parameter][way](good.get(parameter, world.out))
    with pytest.raises(ValueError, match=FOUR_PARTS):
        function(world)(**{**good, parameter: bad})


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call[1]])
def test_the_good_arguments_are_good(name):
    world = World()
    function, make_good, _ = CALLS[name]
    if name == "StepRunner.plan":
        world.runner.commit()
        world.runner.admit(world.step)
    if name == "StepRunner.size_graph_buffers":
        world.runner.commit()
    function(world)(**make_good(world))


GRADIENTS = [
    pytest.param(name, parameter, id=f"{name}-{parameter}")
    for name, (_, _, parameters) in CALLS.items()
    for parameter, ways in parameters.items()
    if "sparse" in ways
    and not any(word in parameter for word in ("ind", "len", "table", "mask", "scratch", "memory"))
    and parameter not in ("float_workspace_buffer", "cache_seqlens")
]


@pytest.mark.parametrize(("name", "parameter"), GRADIENTS)
def test_an_input_that_asks_for_a_gradient_is_refused(name, parameter):
    world = World()
    function, make_good, _ = CALLS[name]
    good = make_good(world)
    asking = good[parameter].clone() if parameter not in ("ckv", "kpe") else good[parameter]
    good[parameter] = asking.detach().requires_grad_()
    message = r"^[\w.:]+: [\w.]+: expected no gradient .*torch\.no_grad.*, got"
    with pytest.raises(RuntimeError, match=message):
        function(world)(**good)
    with torch.no_grad():
        function(world)(**good)


# What takes any value, is the caller's to duck-type, or is looked at on CUDA alone.
UNCHECKED = {"stream", "capture", "causal", "dtype", "self", "kwargs"}
UNCHECKED |= {"use_cuda_graph", "use_profiler", "return_lse", "return_lse_base_on_e"}
UNCHECKED |= {"workspace_buffer", "num_splits"}
# What the compatible interfaces refuse with NotImplementedError, whatever it is.
REFUSED = {"backend", "profiler_buffer", "kv_len", "page_table", "o_scale", "ckv_scale"}
REFUSED |= {"ckv_scale_arr", "kpe_scale", "is_fp8_kvcache", "indices", "attn_sink", "topk_length"}
REFUSED |= {"extra_topk_length", "extra_indices_in_kvcache", "extra_k_cache"}


def parameters_of(function):
    return set(inspect.signature(function).parameters) - UNCHECKED


def public_calls(module, prefix=""):
    for name in module.__all__:
        item = getattr(module, name)
        if not callable(item):
            continue
        yield prefix + name, item
        if inspect.isclass(item) and item.__module__.startswith("libmla"):
            for member, function in inspect.getmembers(item, inspect.isfunction):
                if not member.startswith("_") and not hasattr(tuple, member):
                    yield f"{prefix}{name}.{member}", function


# Records that are checked where they are used, results, and what asks for nothing.
ELSEWHERE = {"AttentionPass", "AttentionStep", "Fork", "KvStep", "KvStream", "QuerySegment"}
ELSEWHERE |= {"Segment", "AdmitResult", "LabelPlan", "PageCounts", "PlanInfo", "Shortage"}
ELSEWHERE |= {"Support", "LseBase", "SupportsDLPack", "flash_mla.get_mla_metadata"}
# Of the engine's own objects; its runs are the wrapper's.
ELSEWHERE |= {"mstar.FlashInferMLAManager"}


COMPATIBLE = [*public_calls(flashinfer, "flashinfer."), *public_calls(flash_mla, "flash_mla.")]
COMPATIBLE += public_calls(mstar, "mstar.")


def test_every_argument_of_every_call_is_in_the_list():
    for name, function in [*public_calls(libmla), *COMPATIBLE]:
        if name in ELSEWHERE or name.rpartition(".")[0] in ELSEWHERE:
            continue
        missing = parameters_of(function) - set(CALLS.get(name, (0, 0, ()))[2])
        if (name, function) in COMPATIBLE:
            missing -= REFUSED
        assert not missing, f"{name}: {missing}"


def segments(**change):
    return KvStep(segments=[Segment(**{"request": 7, "span": 1, **change})])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda: segments(span=1.5), r"KvStep: segments\[0\]\.span: expected an integer, got 1\.5"),
        (lambda: segments(span=2**40), r"segments\[0\]\.span: expected -2147483648 to .*, got 109"),
        (lambda: segments(span=HUGE), r"segments\[0\]\.span: expected .*, got 1180591620717411303"),
        (lambda: segments(request=1.5), r"segments\[0\]\.request: expected an integer, got 1\.5"),
        (lambda: segments(request=HUGE), r"segments\[0\]\.request: expected .*, got 11805916207"),
        (lambda: segments(request=-1), r"segments\[0\]\.request: expected .* 0 to 2\^63 - 1, got"),
        (lambda: segments(label=5), r"segments\[0\]\.label: expected a string, got 5"),
        (lambda: KvStep(segments=[(7, 1)]), r"segments\[0\]: expected a Segment, got tuple"),
        (lambda: KvStep(segments=5), "segments: expected a sequence, got 5"),
        (lambda: KvStep(forks_before=[5]), r"forks_before\[0\]: expected a Fork, got 5"),
        (
            lambda: KvStep(forks_after=[libmla.Fork(KvStream(1), KvStream(0.5))]),
            r"forks_after\[0\]\.target\.request: expected an integer, .* got 0\.5",
        ),
        (lambda: KvStep(combined=5), "combined: expected a Mapping, got 5"),
        (lambda: KvStep(labels=[5]), r"labels\[0\]: expected a string, got 5"),
        (lambda: AttentionStep(passes=[5]), r"passes\[0\]: expected an AttentionPass, got 5"),
        (
            lambda: AttentionStep(
                passes=[libmla.AttentionPass(segments=[libmla.QuerySegment(1.5)])]
            ),
            r"passes\[0\]\.segments\[0\]\.num_queries: expected an integer, got 1\.5",
        ),
        (
            lambda: AttentionStep(
                passes=[libmla.AttentionPass(segments=[libmla.QuerySegment(1, num_appended=-1)])]
            ),
            r"passes\[0\]\.segments\[0\]\.num_appended: expected 0 to .*, got -1",
        ),
    ],
)
def test_what_a_step_refuses(part, message):
    with pytest.raises(ValueError, match=message):
        Step({"part": part()})
