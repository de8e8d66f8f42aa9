#!/usr/bin/env bash
# GRPO with unified FP8 and AIS on a machine without a GPU: installs, makes model and data, trains, prints a summary.
#   bash recipes/quickstart.sh [--model smollm2|tiny] [--steps N] [--fp8 unified|rollout|rollout_per_tensor|bf16|off]
#                              [--correction ais|tis|tis_seq|icepop|mis|geo_rs|k3_rs|none|off] [--out DIR] [extra verl overrides]
MODEL=smollm2 STEPS="" FP8=unified CORRECTION=ais OUT="" EXTRA=()
usage() { sed -n '2,4p' "${BASH_SOURCE[0]}" | cut -c3-; }
wrong() { echo "quickstart: $1" >&2; usage >&2; exit 2; }
need() { [ $# -ge 2 ] || wrong "$1 needs a value"; }
one_of() { for word in $3; do [ "$word" != "$2" ] || return 0; done; wrong "$1 is one of $3, not '$2'"; }
while [ $# -gt 0 ]; do
  case "$1" in
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --model) need "$@"; MODEL="$2"; shift 2 ;;
    --steps) need "$@"; STEPS="$2"; shift 2 ;;
    --fp8) need "$@"; FP8="$2"; shift 2 ;;
    --correction) need "$@"; CORRECTION="$2"; shift 2 ;;
    --out) need "$@"; OUT="$2"; shift 2 ;;
    -h|--help) usage; exit 0 ;;
    +fp8=*) wrong "write --fp8 ${1#*=} instead of $1" ;;
    +is_correction=*) wrong "write --correction ${1#*=} instead of $1" ;;
    [A-Za-z+~]*=*|~[A-Za-z]*) EXTRA+=("$1"); shift ;;
    *) wrong "'$1' is neither an option nor an override of verl (key=value)" ;;
  esac
done
one_of --model "$MODEL" "smollm2 tiny"
one_of --fp8 "$FP8" "unified rollout rollout_per_tensor bf16 off"
one_of --correction "$CORRECTION" "ais tis tis_seq icepop mis geo_rs k3_rs none off"
case "$STEPS" in ""|[1-9]|[1-9][0-9]|[1-9][0-9][0-9]) ;; *) wrong "--steps is a whole number from 1 to 999, not '$STEPS'" ;; esac
# The folder is emptied before the run: only one that such a run has made.
[ -z "$OUT" ] || OUT="$(realpath -m -- "$OUT")"
if [ -n "$OUT" ] && [ -e "$OUT" ] && [ ! -f "$OUT/train.log" ] && [ -n "$(ls -A -- "$OUT" 2>/dev/null || echo file)" ]; then
  wrong "--out $OUT is there and holds something else than a run; name a new folder"
fi

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
HOME_DIR="$ROOT/runs/$MODEL"
OUT="${OUT:-$ROOT/runs/$MODEL-$FP8-$CORRECTION}"
[ -f "$HOME_DIR/data/val.parquet" ] || "$PY" "$ROOT/recipes/prepare.py" --model "$MODEL" --out "$HOME_DIR"
rm -rf -- "$OUT"; mkdir -p -- "$OUT"

ARGS=(actor_rollout_ref.model.path="$HOME_DIR/model"
      data.train_files="$HOME_DIR/data/train.parquet" data.val_files="$HOME_DIR/data/val.parquet"
      reward.custom_reward_function.path="$ROOT/recipes/reward.py"
      trainer.experiment_name="$(basename "$OUT")" trainer.default_local_dir="$OUT/checkpoints")
if [ "$MODEL" = tiny ]; then
  ARGS+=(trainer.total_training_steps="${STEPS:-40}" actor_rollout_ref.actor.optim.lr=1e-3)
else
  ARGS+=(trainer.total_training_steps="${STEPS:-16}" actor_rollout_ref.actor.optim.lr=5e-5
         data.max_prompt_length=32 data.max_response_length=8 actor_rollout_ref.rollout.max_model_len=64
         actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
         actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32)
  if [ "$FP8" = off ]; then
    # Stock verl sends a tied lm_head a second time, and vLLM refuses it unless all weights come in one bucket.
    ARGS+=(actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1024)
  elif [ "$FP8" = unified ] || [ "$FP8" = rollout ]; then
    ARGS+=('fp8.recipe.weight_block=[64,64]')
  fi
fi
[ "$FP8" = off ] || ARGS+=("+fp8=$FP8")
[ "$CORRECTION" = off ] || ARGS+=("+is_correction=$CORRECTION")

export VERL_FILE_LOGGER_PATH="$OUT/metrics.jsonl"
echo "verl_fp8: training ${MODEL} (fp8 ${FP8}, correction ${CORRECTION}), log in $OUT/train.log"
set +e
timeout "${QUICKSTART_TIMEOUT:-3000}" "$PY" -m verl.trainer.main_ppo --config-dir "$ROOT/recipes" --config-name quickstart \
  hydra.run.dir="$OUT/hydra" "${ARGS[@]}" "${EXTRA[@]}" > "$OUT/train.log" 2>&1
CODE=$?
set -e
if [ $CODE -ne 0 ]; then
  echo "verl_fp8: the run failed with exit code $CODE; the end of $OUT/train.log:" >&2
  tail -n 30 "$OUT/train.log" >&2
  exit $CODE
fi
"$PY" -m verl_fp8 report "$OUT"
