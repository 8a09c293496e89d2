"""A device type that torch does not have by itself: all that ksopt does, on it.

A process takes its name for good, so each test runs in a process of its own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

SOURCES = Path(__file__).with_name("toy_device")
pytestmark = pytest.mark.slow

LAYER = """
import toy_device, torch
from ksopt import KSLinear
from ksopt.kernels.backends.base import backend_of, unregister_backend
from ksopt.reference import chain_to_dense
toy = backend_of("toy")
layer = KSLinear(64, 64, "(1,8,8,8)*(8,8,8,1)").to("toy")
x = torch.randn(5, 64, device="toy", requires_grad=True)
y = layer(x)
assert toy.products == 2
dense = chain_to_dense([weight.detach().cpu() for weight in layer.weights])
expected = x.detach().cpu() @ dense.T + layer.bias.detach().cpu()
torch.testing.assert_close(y.detach().cpu(), expected)
y.sum().backward()
assert toy.products == 4 and x.grad.device == y.device == torch.device("toy:0")
with torch.autocast("toy", torch.bfloat16):
    assert layer(x).dtype == torch.bfloat16
with torch.no_grad():  # Inductor has no code for this type: a graph without it
    compiled = torch.compile(layer, backend="aot_eager")
    assert torch.equal(compiled(x).cpu(), layer(x).cpu())
unregister_backend("toy")
try:
    layer(x)
    raise AssertionError
except Exception as error:
    assert "no backend for toy devices" in str(error)
"""

TUNE = """
from ksopt.cli.main import main
words = ["--pattern", "(2,8,8,2)", "--batch", "16", "--device", "toy", "--plugins", "toy_device"]
assert main(["tune", *words, "--json"]) == 0
"""

BENCH = """
import sys
from ksopt.cli.main import main
words = ["--patterns", "(2,8,8,2)", "--batch", "16", "--device", "toy", "--inductor-sample", "0"]
words += ["--plugins", "toy_device", "--out", sys.argv[1]]
if __name__ == "__main__":
    assert main(["bench", "kernels", *words]) == 0
"""

SEARCH = """
import sys
from ksopt.cli.main import main
words = ["search", "32x64", "--budget", "50%", "--batch", "16", "--trials", "3"]
words += ["--device", "toy", "--plugins", "toy_device", "--out", sys.argv[1]]
if __name__ == "__main__":
    assert main(words) == 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler on this machine")
    folder = tmp_path_factory.mktemp("toy")
    for file in (*SOURCES.glob("*.py"), Path(__file__).with_name("toy_backend.py")):
        shutil.copy(file, folder)
    headers = [word for path in cpp_extension.include_paths() for word in ("-I", path)]
    (libraries, *_) = cpp_extension.library_paths()
    output = folder / "libtoy_torch.so"
    command = ["c++", "-std=c++20", "-fPIC", "-shared", *headers, SOURCES / "toy_torch.cpp"]
    command += ["-o", output, "-L", libraries, "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run([*command, f"-Wl,-rpath,{libraries}"], check=True)
    return folder


@pytest.fixture
def run(folder, tmp_path):
    def run(script: str, *words: str) -> str:
        (tmp_path / "script.py").write_text(script)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        cache = str(tmp_path / "cache")
        environment = {"PYTHONPATH": os.pathsep.join(paths), "KSOPT_CACHE_DIR": cache}
        command = [sys.executable, tmp_path / "script.py", *words]
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_a_layer_and_its_gradients(run):
    run(LAYER)


def test_tune(run):
    assert '"way": "reference"' in run(TUNE)


def test_bench_kernels(run, tmp_path):
    assert "(2,8,8,2)     16" in run(BENCH, str(tmp_path / "out"))
    assert "Toy 1" in (tmp_path / "out" / "bench.html").read_text()


def test_search(run, tmp_path):
    printed = run(SEARCH, str(tmp_path / "out"))
    assert "Fastest chain of each budget" in printed
    assert '"name": "Toy 1"' in (tmp_path / "out" / "results.json").read_text()
