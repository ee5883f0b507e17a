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
for model in $MODELS; do
    models="$models --model $model"
done

# shellcheck disable=SC2086  # the list is meant to be split
if run autotune tune $models --data "$DEMO/data" --device cpu --memory "$MEMORY" --here --seq-length 128 \
    --global-batch-tokens 4096 --window 0.5s --time-limit "${MINUTES}min" --out "$DEMO/profiles" --reports "$DEMO/reports"
then
    code=0
else
    code=$?
fi

# On a slow or busy machine, some models may be left without a profile: go on with the others.
profiles=""
for model in $MODELS; do
    case $model in */*) model=$(basename "$(dirname "$model")") ;; esac # a config.json goes by its directory's name
    profile="$DEMO/profiles/$model-cpu.toml"
    if [ -f "$profile" ]; then
        profiles="$profiles $profile"
    fi
done
if [ "$code" != 0 ]; then
    printf '\ntune ended with exit code %s. To give it more time: make demo DEMO_MINUTES=%s\n' "$code" "$((MINUTES * 4))" >&2
fi
if [ -z "$profiles" ]; then
    exit "$code"
fi
first="${profiles# }"
first="${first%% *}"

run_directory="$DEMO/runs/$(date -u +%Y%m%dT%H%M%SZ)"
run autotune train "$first" --data "$DEMO/data" --out "$run_directory" \
    --set "train.max_steps=$STEPS" --set train.warmup_steps=3 --set train.learning_rate=1e-3

run autotune advise "$run_directory" "$first" --data "$DEMO/data" --reports "$DEMO/reports"

# shellcheck disable=SC2086
run autotune report $profiles --run "$run_directory" --reports "$DEMO/reports" --data "$DEMO/data" \
    --out "$DEMO/reports/report.html"

printf '\ndone in %s s\nprofiles:%s\nreport: %s\n' "$(($(date +%s) - start))" "$profiles" "$DEMO/reports/report.html"
