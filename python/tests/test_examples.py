import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.cuda if "captured" in path.name else ())
        for path in EXAMPLES
    ],
    ids=lambda path: path.stem,
)
def test_example_runs(path):
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_host_time_is_measured(device, tmp_path):
    pytest.importorskip("torch")
    figures = tmp_path / "figures.json"
    options = ["--device", device, "--json", figures, "--rounds", "3", "--repeats", "5"]
    command = [sys.executable, BENCH / "host_time.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results = json.loads(figures.read_text())["results"]
    assert {"PagedAttention.run", "flashinfer run"} <= {result["call"] for result in results}
    assert all(result["median_us"] > 0 for result in results)
