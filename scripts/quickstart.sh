#!/usr/bin/env bash
# Installs fastjax in .venv and fine-tunes the embedded tiny Llama with QLoRA: answers before and after, an adapter on
# disk. Needs Python 3.11 or newer. With an NVIDIA GPU the CUDA build of JAX is installed. Arguments go to
# `fastjax quickstart`.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

python=
for candidate in python3.12 python3.11 python3 python3.13 python3.14; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    python=$(command -v "$candidate")
    break
  fi
done
if [ -z "$python" ]; then
  echo "fastjax needs Python 3.11 or newer; python3 is $(python3 -V 2>&1)" >&2
  exit 1
fi

extra=
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then extra="[cuda]"; fi
if [ ! -x .venv/bin/python ]; then "$python" -m venv .venv; fi
echo "Installing fastjax$extra in .venv ($(.venv/bin/python -V)); the first time takes a minute or two."
.venv/bin/python -m pip install -qq --editable ".$extra"
.venv/bin/fastjax quickstart "$@"
echo "fastjax is in .venv: source .venv/bin/activate"
