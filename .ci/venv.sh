#!/bin/sh
# Makes the virtual environment that `make tune` and `make test` use: .ci/venv.sh FOLDER PYTHON [PIP ARGUMENT...]
set -eu

venv=$1
python=$2
shift 2
cd "$(dirname "$0")/.."

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "error: Python >= 3.10 is needed, $python is $("$python" --version 2>&1); try make PYTHON=python3.12" >&2
    exit 1
}

# Distributions split venv from Python, or leave out the ensurepip module that puts pip into a new environment.
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv "$venv" >/dev/null 2>&1 || {
        echo "$python -m venv could not put pip into $venv (no ensurepip?); borrowing the pip of $python" >&2
        { "$python" -m venv --clear --without-pip "$venv" &&
            "$python" -m pip --python "$venv/bin/python" install --quiet pip; } || {
            echo "error: cannot make a virtual environment: $python has no ensurepip and no pip of its own." >&2
            echo "Install its venv package (Debian, Ubuntu: apt install python3-venv) or name another: make PYTHON=..." >&2
            exit 1
        }
    }
fi

# A compiler from wheels where the machine has none.
extras=torch,dev,docs,report,inspect
if [ -z "${ATTENTION_AUTOTUNER_NVCC:-}" ] && ! command -v nvcc >/dev/null 2>&1 &&
    [ ! -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
    extras=$extras,toolchain
fi

# Without bytecode, which is nearly half of the time: most modules of the dependencies are never imported, and the
# others are compiled when they are.
pip_install() {
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt "$@"
}
echo "installing into $venv: .[$extras]"
pip_install "$@" --editable ".[$extras]"
# Headers only; what the package depends on is heavy and unused here.
pip_install --no-deps "$@" nvidia-cutlass
