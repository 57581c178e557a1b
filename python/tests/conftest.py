import numpy as np
import pytest
from frameworks import Framework, torch
from hypothesis import settings

# Shared machines pause now and then: time is no measure of a case.
settings.register_profile("libmla", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("libmla")


def pytest_collection_modifyitems(items):
    """Tests of a GPU are skipped without one, those of PyTorch without that."""
    no_gpu = torch is None or not torch.cuda.is_available()
    for item in items:
        if no_gpu and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no GPU, or no PyTorch that sees it"))


def _require_torch():
    if torch is None:
        pytest.skip("PyTorch is not installed")


@pytest.fixture(params=["numpy", "torch", pytest.param("cuda", marks=pytest.mark.cuda)])
def framework(request):
    """Each library and device in turn."""
    if request.param == "numpy":
        return Framework("numpy")
    _require_torch()
    return Framework("torch", "cuda:0" if request.param == "cuda" else "cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)])
def torch_framework(request):
    """PyTorch on each device."""
    _require_torch()
    return Framework("torch", request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)])
def engine(request):
    """An engine around libmla.compat.mstar on each device."""
    _require_torch()
    from mstar_engine import Engine

    return Engine(request.param)


@pytest.fixture
def random():
    """Numbers of a fixed seed."""
    return np.random.default_rng(20240504)
