"""Tests of what depends on torch's version, on every version that ksopt supports.

    pipx run nox                          # all versions, each in an environment of its own
    pipx run nox -s "torch(2.11.0)"       # one of them
    pipx run nox -s "torch(2.14.1)" -- -k corpus

CI tests one version, which constraints.txt names. pip's own settings say where torch comes from: a
build for CPUs is enough, and a tenth of the size of one for CUDA.
"""

from pathlib import Path

import nox

VERSIONS = ["2.11.0", "2.13.0", "2.14.1"]
TESTS = ["tests/compile", "tests/ops/test_ops.py"]
# Each torch needs other versions of these (2.11: setuptools below 82).
_OF_TORCH = ("torch==", "triton==", "nvidia-", "cuda-", "setuptools==")

nox.options.default_venv_backend = "venv"
nox.options.stop_on_first_error = False


@nox.session
@nox.parametrize("version", VERSIONS, ids=VERSIONS)
def torch(session: nox.Session, version: str) -> None:
    """The backend and the operators under a version of torch; words behind -- go to pytest."""
    pins = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    others = Path(session.create_tmp()) / "constraints.txt"
    independent = [pin for pin in pins if not pin.startswith(_OF_TORCH)]
    others.write_text("\n".join([*independent, f"torch=={version}"]), encoding="utf-8")
    session.install("-c", str(others), "setuptools>=77", f"torch=={version}")
    session.install("-c", str(others), "--no-build-isolation", "--editable", ".[test,models]")
    print_version = "import torch; print(torch.__version__)"
    installed = session.run("python", "-c", print_version, silent=True)
    if not str(installed).startswith(version):
        session.error(f"torch {version} was asked for, but {installed} is installed")
    session.run("python", "-m", "pytest", *TESTS, *session.posargs)
