#!/usr/bin/env bash
# Installs fastjax with its test dependencies in virtual environments of its own and runs what must pass: style, manual,
# types and tests. Arguments go to pytest:
#
#     scripts/test.sh                                    the default tier: every mechanism once
#     scripts/test.sh --quick                            while writing: style, manual, the fast modules, one Python
#     scripts/test.sh --all                              before a release: every case, under both Pythons
#     scripts/test.sh tests/fastjax/training -k loop     only these tests
#
# The environments .venv-test-3.11 and .venv-test-3.12 are kept and reused until what they install changes, and so are
# the compiled programs in .venv-test-programs. The newer pair of Python and JAX runs the tests; beside it the older one,
# which has torch, runs what compares with that, and the command line's smoke tests.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# Modules are compiled once, not once a process: half of what importing JAX, transformers and torch takes.
export PYTHONDONTWRITEBYTECODE="" PYTHONPYCACHEPREFIX="$PWD/.venv-test-bytecode"

# What each world pins. JAX's CUDA plugin is installed without CUDA itself: it compiles for a GPU that is not there.
declare -A PINS=(
  [3.11]="jax==0.10.2 flax==0.12.8"
  [3.12]="jax==0.11.2"
)
declare -A EXTRAS=([3.11]="test,docs,parity" [3.12]="test,docs")

# Prints the path of a working Python of version $1, or fails.
find_python() {
  local candidate
  for candidate in "python$1" python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python \
    "$(dirname "$(command -v python3)")"/../versions/"$1".*/bin/python; do
    "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1'); " >/dev/null 2>&1 || continue
    "$candidate" -c "import sys; print(sys.executable)"
    return 0
  done
  return 1
}

# What the environment of world $1 is made from, as one word, and whether it is.
stamp() {
  { sed -n '/^\[build-system\]/,/^\[tool/p' pyproject.toml; echo "${PINS[$1]} ${EXTRAS[$1]}"; "${pythons[$1]}" -VV; pwd; } |
    sha256sum | cut -d' ' -f1
}
is_ready() { [ "$(cat ".venv-test-$1/.stamp" 2>/dev/null)" = "$(stamp "$1")" ]; }

# Makes or refreshes the environment of world $1.
prepare() {
  local world=$1 environment=.venv-test-$1 python=${pythons[$1]} version
  if is_ready "$world"; then return 0; fi
  echo "== $environment: installing (Python $("$python" -V | cut -d' ' -f2), ${PINS[$world]})"
  rm -rf "$environment"
  "$python" -m venv "$environment"
  # shellcheck disable=SC2086  # the pins are several words
  "$environment/bin/python" -m pip install -qq --no-compile --editable ".[${EXTRAS[$world]}]" ${PINS[$world]}
  version=$("$environment/bin/python" -c "from importlib.metadata import version; print(version('jax'))")
  "$environment/bin/python" -m pip install -qq --no-compile --no-deps "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version"
  stamp "$world" >"$environment/.stamp"
}

failed=()
# Runs a command; a failure is remembered and the rest still runs.
check() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  if "$@"; then echo "== $name: ok ($((SECONDS - start)) s)"; else
    failed+=("$name")
    echo "== $name: FAILED ($((SECONDS - start)) s)"
  fi
}

tier=default
case "${1:-}" in
  --quick | --all)
    tier=${1#--}
    shift
    ;;
esac

worlds=()
declare -A pythons
for world in 3.12 3.11; do
  [ $tier = quick ] && [ ${#worlds[@]} -gt 0 ] && break
  if python=$(find_python "$world"); then
    worlds+=("$world")
    pythons[$world]=$python
  fi
done
if [ ${#worlds[@]} -eq 0 ]; then # another Python: the newer world's pins
  python=$(command -v python3)
  "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" || {
    echo "fastjax needs Python 3.11 or newer; python3 is $("$python" -V 2>&1)" >&2
    exit 1
  }
  worlds=(3.12)
  pythons[3.12]=$python
fi
newer=${worlds[0]} older=${worlds[1]:-}
for world in "${worlds[@]}"; do is_ready "$world" || rm -rf .venv-test-programs; done

# The types by the packages of world $1, and its tests in $2 processes; what follows goes to pytest.
types() { check "pyright" ".venv-test-$1/bin/pyright" --pythonpath ".venv-test-$1/bin/python"; }
tests() {
  local world=$1 processes=$2 select=(--tier "$tier")
  shift 2
  if [ $# -eq 0 ] && [ -n "$older" ]; then
    case $tier:$world in
      default:3.11) select+=(--share older) ;;
      default:3.12) select+=(--share newer) ;;
      all:3.12) select+=(-m "not torch") ;;
    esac
  fi
  check "tests, Python $world" ".venv-test-$world/bin/python" -m pytest -n "$processes" --dist worksteal \
    --durations 15 "${select[@]}" "$@" </dev/null
}

# The older world beside the newer one, whose tests alone leave a tenth of two cores idle; it is shown behind it.
beside=
if [ -n "$older" ]; then
  shown=$(mktemp) processes=1
  if [ $tier = all ]; then processes=2; fi # as much as the newer one has
  set -m # a process group of its own, which ends with this script
  (
    prepare "$older"
    if [ $# -eq 0 ]; then types "$older"; fi # it has torch, whose types pyright reads
    tests "$older" $processes "$@"
    [ ${#failed[@]} -eq 0 ]
  ) >"$shown" 2>&1 </dev/null &
  beside=$!
  set +m
  trap 'kill -- "-$beside" 2>/dev/null || true; rm -f "$shown"' EXIT
  trap 'exit 130' INT
fi
prepare "$newer"
bin=.venv-test-$newer/bin
if [ $# -eq 0 ]; then
  check "ruff check" $bin/ruff check .
  check "ruff format" $bin/ruff format --check .
  check "manual" env NO_MKDOCS_2_WARNING=1 $bin/python -m mkdocs build --strict --site-dir $bin/../site
  if [ -z "$older" ] && [ $tier != quick ]; then types "$newer"; fi
fi
tests "$newer" 2 "$@"
if [ -n "$beside" ]; then
  tail -n +1 -f --pid "$beside" "$shown"
  wait "$beside" || failed+=("Python $older: see above")
fi

if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "All passed in $((SECONDS / 60)) min $((SECONDS % 60)) s."
