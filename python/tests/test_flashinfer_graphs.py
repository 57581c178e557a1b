"""libmla.compat.flashinfer in graph mode: plans that captured runs follow."""

import warnings

import numpy as np
import pytest
from flashinfer_calls import check, decode, dtype_of, plan, planned_wrapper, reference, workspace_of
from frameworks import Framework, float64
from libmla.compat.flashinfer import BatchMLAPagedAttentionWrapper

torch = pytest.importorskip("torch")


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
