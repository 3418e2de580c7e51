#!/usr/bin/env bash
# Train a small language model and print a sample of its text, on any machine with Python. This takes a few minutes on
# two cores or on GPUs. The text is the source of Python's standard library. If interrupted, run it again to resume.
#
#     bash train/quickstart.sh                  install missing packages from the package index
#     bash train/quickstart.sh --from FOLDER    install from a folder of wheels and sdists, without network
#
# On GPUs, train/install_gpu.sh installs, and training uses BMTrain. Up to four GPUs share every sequence.
set -euo pipefail
. "$(dirname "$0")/pip.sh"
if [ "${1:-}" = --from ] && [ $# -eq 2 ]; then
    use_folder "$2"
elif [ $# -gt 0 ]; then
    echo "usage: quickstart.sh [--from FOLDER]" >&2
    exit 2
fi
cd "$(dirname "$0")/.."

if ! compgen -G ".venv/installed-train-*" >/dev/null && nvidia-smi -L 2>/dev/null | grep -q "^GPU"; then
    if command -v nvcc >/dev/null; then
        bash train/install_gpu.sh
    else
        echo "nvcc is not on the PATH, so BMTrain cannot be built: training will use torch's FSDP2"
    fi
fi
. train/venv.sh train

data=data/stdlib
run=runs/quickstart

if [ ! -d "$data" ]; then
    python train/prepare_data.py --output "$data" --val-fraction 0.05 --glob '*.py' \
        --input "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
        --exclude site-packages dist-packages test tests idlelib lib2to3
fi

gpus=$(python -c "import torch; print(torch.cuda.device_count())")
if [ "$gpus" -gt 0 ]; then
    ranks=$((gpus < 4 ? gpus : 4)) dtype=bf16
else
    ranks=2 dtype=fp32
fi

trap 'interrupted=1' INT # on Ctrl-C, training saves and exits, and then so does this script
# The ranks share every sequence: each has a part of the tokens, and sends its keys and values around the ring.
python train/pretrain.py --processes "$ranks" --sp-size "$ranks" --model cpm-tiny --data "$data/train" \
    --val-data "$data/val" --steps 850 --batch-size 4 --micro-batch-size 4 --lr 4e-3 --dtype "$dtype" \
    --output "$run" --resume auto

[ -z "${interrupted:-}" ] || exit 0

echo
echo "A sample of what it learned:"
python train/generate.py --run "$run" --prompt "def " --tokens 300
echo
echo "Checkpoints, metrics.jsonl, TensorBoard events and loss.png are in $run"
