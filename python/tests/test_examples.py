import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


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
