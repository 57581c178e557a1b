import ctypes
import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from frameworks import Framework, float64
from libmla import LatentPool, PagedAttention

pytest.importorskip("libmla.layer", reason="built without the layer")
from libmla.layer import HeadRange, Layer, LayerConfig, LayerWorkspace
from wrong_arguments import ARRAY, DEVICE, FOUR_PARTS, INTEGER, OBJECT, TEXT, left_out

# Outputs of public implementations in float64; the folder has a page about them.
GOLDEN = Path(os.environ.get("MLA_GOLDEN_LAYERS", Path(__file__).parents[2] / "tests/layer/golden"))
FILES = sorted(GOLDEN.glob("*.safetensors"))
try:
    ctypes.CDLL("libdnnl.so.2")
    has_onednn = True
except OSError:
    has_onednn = False


def read(path):
    """The metadata and tensors of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    dtypes = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[begin:end], dtypes[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return metadata, tensors


class Case:
    """A file's layer over one page that holds all of its tokens."""

    def __init__(self, path, framework, dtype, **options):
        if framework.device == "cpu" and not has_onednn:
            pytest.skip("libdnnl.so.2 is not installed")
        metadata, self.tensors = read(path)
        self.config = LayerConfig(metadata["config"])
        options = {"dtype": dtype, "device": framework.device, **options}
        weights = {
            name: tensor
            for name, tensor in self.tensors.items()
            if name not in ("hidden_states", "attn_output")
        }
        self.layer = Layer(self.config, weights, **options)
        hidden = self.tensors["hidden_states"]
        self.tokens = len(hidden)
        self.hidden = framework.array(hidden, dtype)
        self.positions = framework.from_numpy(np.arange(self.tokens, dtype=np.int32))
        self.slots = framework.from_numpy(np.arange(self.tokens))
        self.workspace = LayerWorkspace(self.layer, self.tokens)
        self.pool = LatentPool(
            num_pages=1,
            page_size=self.tokens,
            kv_lora_rank=self.config.kv_lora_rank,
            qk_rope_head_dim=self.config.qk_rope_head_dim,
            dtype=dtype,
            device=framework.device,
        )
        self.attention = PagedAttention(
            geometry=self.layer.geometry(self.tokens),
            num_pages=self.pool.total_pages,
            device=framework.device,
        )
        self.attention.plan(
            qo_indptr=[0, self.tokens],
            kv_indptr=[0, 1],
            kv_indices=[0],
            kv_len=[self.tokens],
            sm_scale=self.config.sm_scale,
        )

    def forward(self, hidden=None):
        return self.layer.forward(
            self.hidden if hidden is None else hidden,
            self.positions,
            slots=self.slots,
            pool=self.pool,
            attention=self.attention,
            workspace=self.workspace,
        )

    def check(self, out, tolerance):
        expected = self.tensors["attn_output"]
        np.testing.assert_allclose(
            float64(out), expected, rtol=0, atol=tolerance * np.abs(expected).max()
        )


def test_golden_files_are_there():
    assert len(FILES) >= 9


# bf16 rounds hidden states, latents and outputs; fp32 the sums alone.
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_layers(framework, path, dtype, tolerance):
    case = Case(path, framework, dtype)
    case.check(case.forward(), tolerance)


def test_stage_by_stage(framework):
    case = Case(FILES[0], framework, "fp32")
    parts = case.layer.project(case.hidden, case.positions, case.workspace)
    kpe = parts.kpe if case.config.qk_rope_head_dim else None
    case.pool.append(0, case.slots, framework.view(parts.ckv), framework.view(kpe))
    ckv, kpe = case.pool.views(0)
    case.attention.run(q_nope=parts.q_nope, q_pe=parts.q_pe, ckv=ckv, kpe=kpe, out=parts.attended)
    out = framework.empty(case.hidden.shape, "fp32")
    assert case.layer.output(parts.attended, out, case.workspace) is out
    case.check(out, 1e-4)
    assert np.array_equal(float64(out), float64(case.forward()))


def test_ranks_add_up():
    path = GOLDEN / "deepseek_v3_small.safetensors"
    parts = [Case(path, Framework("numpy"), "fp32", heads=HeadRange(begin, 2)) for begin in (0, 2)]
    assert parts[0].layer.num_heads == 2
    parts[0].check(sum(part.forward() for part in parts), 1e-4)


def test_weights_of_a_file():
    case = Case(FILES[0], Framework("numpy"), "fp32")
    expected = case.forward()
    case.layer = Layer.from_safetensors(case.config, FILES[0], dtype="fp32")
    assert np.array_equal(case.forward(), expected)


def test_compiled_whole(torch_framework):
    torch = pytest.importorskip("torch")
    case = Case(FILES[0], torch_framework, "fp32")
    expected = case.forward() * 2
    compiled = torch.compile(
        lambda hidden: case.forward(hidden) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(case.hidden), expected)


def test_layer_refuses():
    with pytest.raises(ValueError, match=r"model_type: expected .*, got"):
        LayerConfig('{"model_type": "llama"}')
    metadata, tensors = read(FILES[0])
    config = LayerConfig(metadata["config"])
    with pytest.raises(ValueError, match=r"Layer: q_proj\.shape: expected .*, got \[0, 0\]"):
        Layer(config, {"o_proj": tensors["o_proj.weight"]})
    with pytest.raises(ValueError, match=r"Layer: weights: expected of the names .*, got bias"):
        Layer(config, {"bias": tensors["o_proj.weight"]})
    with pytest.raises(ValueError, match=r"expected .*, got"):
        Layer.from_safetensors(config, "/nowhere")


def layer_calls():
    """What is called, with which good arguments, and how each is wrong."""
    torch = pytest.importorskip("torch")
    case = Case(FILES[0], Framework("torch"), "fp32")
    weights = {name: case.tensors[name] for name in case.tensors if "weight" in name}
    tokens = {"hidden": case.hidden, "positions": case.positions, "workspace": case.workspace}
    attended = torch.zeros(case.tokens, case.layer.num_heads, case.config.kv_lora_rank)
    array = {"none": lambda good: None, **left_out(ARRAY)}
    some_weight = next(iter(weights))
    no_weights = {
        "no array": lambda good: {**good, some_weight: 5},
        "meta": lambda good: {**good, some_weight: torch.zeros(2, 2, device="meta")},
    }
    options = {
        "config": OBJECT,
        "heads": left_out(OBJECT),
        "dtype": DEVICE,
        "device": DEVICE,
        "executor": left_out(OBJECT),
    }
    return {
        "LayerConfig": (LayerConfig, {}, {"config_json": TEXT}),
        "Layer": (
            Layer,
            {"config": case.config, "weights": weights},
            {**options, "weights": {**OBJECT, **no_weights}},
        ),
        "Layer.from_safetensors": (
            Layer.from_safetensors,
            {"config": case.config, "path": FILES[0]},
            {**options, "path": OBJECT, "prefix": TEXT},
        ),
        "Layer.geometry": (case.layer.geometry, {}, {"page_size": left_out(INTEGER, "negative")}),
        "LayerWorkspace": (
            LayerWorkspace,
            {"layer": case.layer, "max_tokens": 1},
            {"layer": OBJECT, "max_tokens": INTEGER},
        ),
        "Layer.project": (
            case.layer.project,
            tokens,
            {"hidden": array, "positions": array, "workspace": OBJECT},
        ),
        "Layer.output": (
            case.layer.output,
            {"attended": attended, "out": case.hidden.clone(), "workspace": case.workspace},
            {"attended": array, "out": array, "workspace": OBJECT},
        ),
        "Layer.forward": (
            case.layer.forward,
            {**tokens, "slots": case.slots, "pool": case.pool, "attention": case.attention},
            {
                "hidden": array,
                "positions": array,
                "slots": array,
                "pool": OBJECT,
                "layer_idx": INTEGER,
                "attention": OBJECT,
                "workspace": OBJECT,
                "out": left_out(ARRAY),
            },
        ),
    }


def test_a_wrong_argument_of_the_layer_is_refused_in_four_parts():
    for name, (function, good, parameters) in layer_calls().items():
        for parameter, ways in parameters.items():
            for way, make in ways.items():
                bad = make(good.get(parameter, good.get("hidden")))
                with pytest.raises(ValueError, match=FOUR_PARTS):
                    pytest.fail(f"{name} {parameter} {way}: {function(**{**good, parameter: bad})}")
