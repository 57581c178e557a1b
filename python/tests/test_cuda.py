"""What only a GPU can show: streams, captured runs, plans that replays follow."""

import libmla
import numpy as np
import pytest
from frameworks import TOLERANCE, Framework, float64
from libmla import (
    AttentionResource,
    AttentionStep,
    Bucket,
    Geometry,
    KvResource,
    KvStep,
    LatentPool,
    Limits,
    PagedAttention,
    Segment,
    SlotLease,
    Step,
    StepRunner,
)
from problems import Problem

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda

CUDA = Framework("torch", "cuda:0")
GEOMETRY = Geometry(num_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, page_size=16)
BUCKET = Bucket(num_rows=4, num_tokens=4)


def decode(lengths, seed):
    """One query a request."""
    counts = [-(-length // 16) for length in lengths]
    order = list(np.random.default_rng(seed).permutation(64))
    return Problem(
        geometry=GEOMETRY,
        queries=[1] * len(lengths),
        lengths=lengths,
        pages=[[int(order.pop()) for _ in range(count)] for count in counts],
        num_pages=64,
        sm_scale=0.1,
        causal=True,
        seed=seed,
    )


class Decoder:
    """A captured run over tensors that stay where they are."""

    def __init__(self):
        self.attention = PagedAttention(
            geometry=GEOMETRY,
            num_pages=64,
            device="cuda",
            bucket=BUCKET,
            capture=True,
            limits=Limits(max_rows=4, max_tokens=4, max_listed_pages=64),
        )
        self.q_nope, self.out = (CUDA.empty((4, 16, 512), "bf16") for _ in range(2))
        self.q_pe = CUDA.empty((4, 16, 64), "bf16")
        self.cache = CUDA.empty((64, 16, 576), "bf16")
        self.lse = CUDA.empty((4, 16), "fp32")

    def load(self, problem):
        """Plans on the current stream and fills the inputs."""
        self.attention.plan(**problem.indices(), sm_scale=problem.sm_scale)
        q_nope, q_pe, cache = problem.tensors(CUDA)
        tokens = len(q_nope)
        self.q_nope[:tokens], self.q_pe[:tokens] = q_nope, q_pe
        self.cache.copy_(cache)
        return tokens, problem.answer(*map(float64, (q_nope, q_pe, cache)))

    def run(self):
        self.attention.run(
            q_nope=self.q_nope,
            q_pe=self.q_pe,
            ckv=self.cache[..., :512],
            kpe=self.cache[..., 512:],
            out=self.out,
            lse=self.lse,
        )

    def check(self, tokens, answer):
        tolerance = TOLERANCE["bf16"]
        np.testing.assert_allclose(float64(self.out)[:tokens], answer[0], rtol=0, atol=tolerance)
        np.testing.assert_allclose(float64(self.lse)[:tokens], answer[1], rtol=1e-4, atol=1e-4)
        assert not float64(self.out)[tokens:].any()


def test_replays_follow_plans():
    decoder = Decoder()
    decoder.load(decode([5, 40], seed=1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.run()
    for seed, lengths in enumerate(([5, 40], [100], [17, 1, 0, 200], [64, 64, 64])):
        loaded = decoder.load(decode(lengths, seed))
        graph.replay()
        decoder.check(*loaded)


def test_replays_on_another_stream():
    decoder = Decoder()
    decoder.load(decode([9], seed=0))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        decoder.run()
    for seed in range(3):
        loaded = decoder.load(decode([30, 70 + seed], seed))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            decoder.attention.order_replay()
            graph.replay()
        torch.cuda.current_stream().wait_stream(stream)
        decoder.check(*loaded)


@pytest.mark.parametrize("named", [False, True])
def test_runs_on_the_current_stream(named):
    """A run that is not behind the slow copy of its queries would read NaN."""
    decoder = Decoder()
    tokens, answer = decoder.load(decode([50], seed=3))
    queries = decoder.q_nope.clone()
    decoder.q_nope.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    arguments = {
        "q_nope": decoder.q_nope,
        "q_pe": decoder.q_pe,
        "ckv": decoder.cache[..., :512],
        "kpe": decoder.cache[..., 512:],
        "out": decoder.out,
        "lse": decoder.lse,
    }
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        decoder.q_nope.copy_(queries)
        if not named:
            decoder.attention.run(**arguments)
    if named:
        decoder.attention.run(**arguments, stream=stream)
    stream.synchronize()
    decoder.check(tokens, answer)


def test_a_run_allocates_nothing():
    decoder = Decoder()
    decoder.load(decode([50], seed=3))
    decoder.run()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]

    def run_leaves_free_memory():
        before = torch.cuda.mem_get_info()[0]
        decoder.run()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0] == before

    # The card's other users take and give memory too, but not during every run; ours would.
    assert any(run_leaves_free_memory() for _ in range(20))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


def test_tensors_of_another_device_are_refused():
    decoder = Decoder()
    decoder.load(decode([5], seed=0))
    decoder.q_pe = decoder.q_pe.cpu()
    with pytest.raises(ValueError, match=r"q_pe.*expected cuda:0, got cpu"):
        decoder.run()


def test_compiled_and_captured():
    decoder = Decoder()
    loaded = decoder.load(decode([9, 30], seed=5))

    def body(scale):
        decoder.run()
        return decoder.out * scale

    compiled = torch.compile(body, fullgraph=True, backend="aot_eager")
    scale = torch.ones((), device="cuda")
    compiled(scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compiled(scale)
    graph.replay()
    decoder.check(*loaded)
    assert torch.equal(result, decoder.out)


def serve(captured):
    """The outputs of six steps in alternating slots."""
    torch.manual_seed(0)
    pool = LatentPool(
        num_pages=32, page_size=16, kv_lora_rank=512, qk_rope_head_dim=64, device="cuda"
    )
    kv = KvResource(pool)
    attention = AttentionResource(
        kv, num_heads=16, sm_scale=0.1, capture=True, limits=Limits(max_tokens=64)
    )
    runner = StepRunner([kv, attention])
    runner.size_graph_buffers([(BUCKET, 32)])
    latent = torch.empty(4, 576, device="cuda", dtype=torch.bfloat16)
    query = torch.empty(4, 16, 576, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(4, 16, 512, device="cuda", dtype=torch.bfloat16)
    graphs, results = {}, []

    def body():
        kv.write(0, latent[:, :512], latent[:, 512:])
        attention.run(q_nope=query[..., :512], q_pe=query[..., 512:], out=out, layer=0)

    for request in range(3):
        kv.open(request)
    for number in range(6):
        segments = [Segment(request, 1) for request in range(number % 3 + 1)]
        step = Step({"kv": KvStep(segments=segments), "attention": AttentionStep()})
        assert runner.admit(step)
        slot = number % 2
        runner.plan(step, SlotLease(slot=slot, walk="decode", bucket=BUCKET))
        latent.normal_()
        query.normal_()
        if not captured:
            body()
        else:
            if slot not in graphs:
                graphs[slot] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[slot]):
                    body()
            runner.order_replay()
            graphs[slot].replay()
        results.append(out.clone())
        runner.commit()
    return torch.stack(results)


def test_captured_steps_equal_eager_ones():
    eager = serve(captured=False)
    assert torch.equal(eager, serve(captured=True))
    assert eager.any()


def test_device_of_a_pool_and_its_views():
    pool = LatentPool(
        num_pages=2, page_size=4, kv_lora_rank=8, qk_rope_head_dim=8, device=torch.device("cuda")
    )
    assert pool.device == "cuda:0"
    layer = libmla.to_torch(pool.layer(0))
    assert layer.device == torch.device("cuda:0")
    assert not layer.any()
