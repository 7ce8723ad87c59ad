#!/bin/sh
# The GPU script on a machine with a GPU and no package registry.
#
#   sh tests/tools/gpu_machine.sh prepare          here, with a registry: wheels into build/gpu-machine
#   sh tests/tools/gpu_machine.sh run [OPTIONS]    there, with the checkout and build/gpu-machine: one call
#
# OPTIONS are those of `dynamiccl lab gpu-check`. That machine has Python 3.12, PyTorch with CUDA, numpy, pandas, pyarrow,
# rich, fsspec and nvidia-ml-py; the wheels bring the rest. The results lie in $OUT (default: runs/gpu-machine) as
# gpu-check.tar.gz, with the page of results in page.txt. The whole call takes less than ten minutes.
set -eu
cd "$(dirname "$0")/../.."
WHEELS="${WHEELS:-build/gpu-machine}"
PLATFORMS="--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64"
NEEDED="click gymnasium farama-notifications stable-baselines3 sb3-contrib orjson"

case "${1:-}" in
prepare)
    rm -rf "$WHEELS"
    mkdir -p "$WHEELS"
    "${PYTHON:-python3}" -m pip wheel --quiet --no-deps --wheel-dir "$WHEELS" .
    # shellcheck disable=SC2086
    "${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp $PLATFORMS --constraint constraints.txt --dest "$WHEELS" $NEEDED
    git rev-parse --short=12 HEAD > "$WHEELS/commit"
    ls -l "$WHEELS"
    ;;
run)
    shift
    OUT="${OUT:-runs/gpu-machine}"
    mkdir -p "$OUT"
    SITE=$(mktemp -d)
    WORK=$(mktemp -d)
    trap 'rm -rf "$SITE" "$WORK"' EXIT
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$SITE" "$WHEELS"/*.whl
    DYNAMICCL_COMMIT=$(cat "$WHEELS/commit")
    PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"
    export DYNAMICCL_COMMIT PYTHONPATH PYTHONUNBUFFERED=1
    OUT=$(cd "$OUT" && pwd)
    status=0
    # Away from the checkout: the wheel is what runs.
    (cd "$WORK" && timeout --signal INT --kill-after 15 570 \
        python3 -m dynamiccl.agent.cli lab gpu-check --out results "$@") > "$OUT/page.txt" 2> "$OUT/said.txt" || status=$?
    [ "$status" -eq 0 ] || (cd "$WORK" && python3 -m dynamiccl.agent.cli lab gpu-check results/*) >> "$OUT/page.txt" || true
    [ ! -d "$WORK/results" ] || tar -czf "$OUT/gpu-check.tar.gz" -C "$WORK/results" .
    cat "$OUT/said.txt" "$OUT/page.txt"
    exit "$status"
    ;;
*)
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
