#!/usr/bin/env bash
# Installs fastjax in .venv and fine-tunes the embedded tiny Llama with QLoRA: answers before and after, an adapter on
# disk. Needs Python 3.11 or newer. With an NVIDIA GPU the CUDA build of JAX is installed. Arguments go to
# `fastjax quickstart`.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

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

# Runs a command beside a line that tells the seconds and the command's last line: on a terminal it moves, elsewhere there
# is one every ten seconds. A command that fails shows all that it has said.
moving() {
  local log process start=$SECONDS last told=0
  log=$(mktemp)
  "$@" >"$log" 2>&1 &
  process=$!
  trap 'kill $process 2>/dev/null; rm -f "$log"' EXIT
  while kill -0 $process 2>/dev/null; do
    last=$(tail -n 1 "$log" | tr -d '\r' | sed 's/^ *//' | cut -c1-60)
    if [ -t 1 ]; then
      printf '\r\033[K  %d s  %s' $((SECONDS - start)) "$last"
    elif [ $((SECONDS - start - told)) -ge 10 ]; then
      told=$((SECONDS - start))
      echo "  $told s  $last"
    fi
    sleep 0.5
  done
  if [ -t 1 ]; then printf '\r\033[K'; fi
  wait $process || { cat "$log" >&2; exit 1; }
  echo "Installed in $((SECONDS - start)) s."
  rm -f "$log"
  trap - EXIT
}

extra=
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then extra="[cuda]"; fi
if [ ! -x .venv/bin/python ]; then "$python" -m venv .venv; fi
echo "Installing fastjax$extra in .venv ($(.venv/bin/python -V)); the first time takes a minute or two."
moving .venv/bin/python -m pip install --no-compile --editable ".$extra"
.venv/bin/fastjax quickstart "$@"
echo "fastjax is in .venv: source .venv/bin/activate"
