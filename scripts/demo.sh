#!/usr/bin/env bash
# Trains a small Llama over four fault domains, kills one in the middle of a step, and shows that
# nothing was lost. No GPU, no network once it is set up.
# usage: scripts/demo.sh [--venv DIR]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="$(scripts/setup.sh "$@" | tail -n 1)"
[[ -d "$venv" ]] || exit 0 # only help was asked for
export PATH="$venv/bin:$PATH"

if [[ -f scripts/make_debug_assets.py ]]; then
    python scripts/make_debug_assets.py
fi
mkdir -p outputs
folder="$(mktemp -d "outputs/demo-$(date +%Y%m%d-%H%M%S)-XXXX")"

code=0
torchtitan-ft launch --config train_configs/llama3_debug_ft.toml --domains 4 \
    --chaos "kill:domain=2,step=8,phase=backward" \
    -- --training.steps 20 --dump_folder "$folder" || code=$?
echo
python -m torchtitan_ft.summary "$folder" || true
exit "$code"
