#!/usr/bin/env bash
# Installs into .venv (created or reused) and runs the whole suite, real training runs included.
#   bash tests/run.sh [pytest arguments]      e.g. bash tests/run.sh -m "not e2e"
source "$(dirname "${BASH_SOURCE[0]}")/../recipes/setup.sh"
cd "$ROOT"
exec "$PY" -m pytest -n 2 --dist loadscope --no-loadscope-reorder "$@"
