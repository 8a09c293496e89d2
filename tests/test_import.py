"""Importing ksopt is light, and its names are where the documents list them."""

import subprocess
import sys

import pytest

import ksopt

WATCH = """
import sys
{before}
seen = []

def watch(event, arguments):
    if event in ("subprocess.Popen", "os.mkdir", "os.system", "os.posix_spawn", "socket.connect"):
        seen.append((event, str(arguments[0])))
    elif event == "open":
        path, mode, _ = arguments
        # Python's own imports read sources and compiled files.
        if mode in ("r", "rb") and str(path).endswith((".py", ".pyc", ".so", ".pth", "METADATA")):
            return
        seen.append((event, str(path), str(mode)))
    elif event == "ctypes.dlopen":
        seen.append((event, str(arguments[0])))

sys.addaudithook(watch)
sys.dont_write_bytecode = True
{imports}
assert not seen, seen
{after}
"""


def run(before: str, imports: str, after: str) -> None:
    code = WATCH.format(before=before, imports=imports, after=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_import_ksopt_needs_no_torch():
    run("", "import ksopt, ksopt.patterns.chain, ksopt.errors", "assert 'torch' not in sys.modules")


def test_import_of_the_layers_touches_no_gpu_disk_or_compiler():
    run(
        # torch's own import, and the imports of its operator registration, are not ours.
        "import torch, torch._library.fake_impl, torch._library.custom_ops, torch.library",
        "import ksopt.ops, ksopt.functional, ksopt.nn, ksopt.baselines, ksopt.compile.backend",
        "assert not torch.cuda.is_initialized(); assert torch.ops.ksopt.ks_mm",
    )


def test_the_watch_sees_what_it_should():
    with pytest.raises(AssertionError, match=r"subprocess\.Popen"):
        run("import subprocess", "subprocess.run(['true'])", "")
    with pytest.raises(AssertionError, match="open"):
        run("", "open('/dev/null', 'w')", "")


def test_public_names():
    for name in ksopt.__all__:
        assert getattr(ksopt, name) is not None
    from ksopt.nn import KSLinear

    assert ksopt.KSLinear is KSLinear
    assert ksopt.nn.KSLinear is KSLinear
    assert set(ksopt.__all__) <= set(dir(ksopt))
    with pytest.raises(AttributeError, match="module 'ksopt' has no attribute 'KSlinear'"):
        _ = ksopt.KSlinear
