#!/bin/sh
# The main job, end to end, as a person would type it. `make demo` runs this; every command is shown before it runs.
set -eu

run() {
    printf '\n\033[1m$ %s\033[0m\n' "$*"
    PATH="$BIN:$PATH" "$@"
}

start=$(date +%s)
mkdir -p "$DEMO"

run autotune doctor --path "$DEMO"

if [ ! -f "$DEMO/data/manifest.json" ]; then
    run autotune data prepare elf:/usr/bin --out "$DEMO/data" --max-samples "$FUNCTIONS"
fi

models=""
profiles=""
for model in $MODELS; do
    models="$models --model $model"
    case $model in */*) model=$(basename "$(dirname "$model")") ;; esac # a config.json goes by its directory's name
    profiles="$profiles $DEMO/profiles/$model-cpu.toml"
done
first="${profiles# }"
first="${first%% *}"

# shellcheck disable=SC2086  # the lists are meant to be split
run autotune tune $models --data "$DEMO/data" --device cpu --memory "$MEMORY" --here --seq-length 128 \
    --global-batch-tokens 4096 --window 0.5s --time-limit "${MINUTES}min" --out "$DEMO/profiles" --reports "$DEMO/reports"

run_directory="$DEMO/runs/$(date -u +%Y%m%dT%H%M%SZ)"
run autotune train "$first" --data "$DEMO/data" --out "$run_directory" \
    --set "train.max_steps=$STEPS" --set train.warmup_steps=3 --set train.learning_rate=1e-3

run autotune advise "$run_directory" "$first" --data "$DEMO/data" --reports "$DEMO/reports"

# shellcheck disable=SC2086
run autotune report $profiles --run "$run_directory" --reports "$DEMO/reports" --data "$DEMO/data" \
    --out "$DEMO/reports/report.html"

printf '\ndone in %s s\nprofile: %s\nreport: %s\n' "$(($(date +%s) - start))" "$first" "$DEMO/reports/report.html"
