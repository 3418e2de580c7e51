#!/usr/bin/env bash
# Install the packages for training on GPUs into .venv: torch, FlashAttention, BMTrain and bmt_burst.
#
#     bash train/install_gpu.sh                  from the package index
#     bash train/install_gpu.sh --from FOLDER    from a folder of wheels and sdists, without network
#
# If the present Python has a CUDA build of torch, the script uses that one. It builds BMTrain from its sdist for the
# GPUs of this machine, against torch's NCCL. BMTrain's wheels do not support Hopper, and its requirement
# nvidia-nccl-cu11 would overwrite torch's NCCL. The build needs nvcc. Afterwards run .venv/bin/python -m
# bmt_burst.doctor, and start training with .venv/bin/torchrun: another torchrun on the PATH starts another Python.
set -euo pipefail
. "$(dirname "$0")/pip.sh"

while [ $# -gt 0 ]; do
    case $1 in
        --from) use_folder "${2:?--from needs a folder}"; shift ;;
        *) echo "usage: install_gpu.sh [--from FOLDER]" >&2; exit 2 ;;
    esac
    shift
done
cd "$(dirname "$0")/.."

has_cuda_torch() { "$1" -c 'import torch, sys; sys.exit(torch.version.cuda is None)' 2>/dev/null; }
if [ ! -f .venv/bin/activate ]; then
    if has_cuda_torch python3; then
        python3 -m venv --system-site-packages .venv
        # --system-site-packages does not include the packages of a virtual environment
        python3 -c 'import site, sysconfig; print(sysconfig.get_path("purelib"))' \
            >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
    else
        python3 -m venv .venv
    fi
fi
. .venv/bin/activate

echo "installing missing packages into .venv: torch (3 GB), FlashAttention (200 MB), other packages (100 MB), and BMTrain,"
echo "which is built here in a minute. This takes three to ten minutes, once."
has_cuda_torch python || install torch || explain_pip
command -v nvcc >/dev/null || { echo "install_gpu.sh: nvcc is not on the PATH; BMTrain's build needs CUDA's compiler" >&2; exit 1; }
architectures=$(python - <<'FIND'
import torch
if not torch.cuda.is_available():
    raise SystemExit("install_gpu.sh: torch sees no GPU")
print(";".join(sorted({"%d%d" % torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})))
FIND
)
echo "torch $(python -c 'import torch; print(torch.__version__)'), GPUs of architecture $architectures"

have() { python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null; }

# Print the requirements of a package and of its requirements that are not installed, one a line. Skip torch's.
lacking() {
    python - "$1" <<'FIND'
import sys
from importlib.metadata import PackageNotFoundError, requires
from pip._vendor.packaging.requirements import Requirement

left, seen = [Requirement(sys.argv[1])], {"torch"}
while left:
    package = left.pop()
    package.marker = None  # it is true
    if package.name in seen or str(package) in seen:
        continue
    seen.add(str(package))
    try:
        needs = [Requirement(line) for line in requires(package.name) or ()]
    except PackageNotFoundError:
        print(package)
        continue
    extras = ("", *package.extras)
    left += [n for n in needs if n.marker is None or any(n.marker.evaluate({"extra": e}) for e in extras)]
FIND
}

# Install a package and its requirements one by one, and print which are not available.
install_pieces() {
    local tried=none pieces
    while pieces=$(lacking "$1" | grep -vxF -e "$tried"); do
        tried+=$'\n'${pieces%%$'\n'*}
        install --pre --no-deps "${pieces%%$'\n'*}" 2>/dev/null || true
    done
    echo "$1 is installed without: $(lacking "$1" | paste -sd ' ')" >&2
}

if [ "${architectures%%;*}" -ge 90 ]; then
    # Its compiler requires libraries for CUDA 12 even if it uses those for CUDA 13, and a folder may lack them.
    flash_attn=$(python -c 'import torch; print("flash-attn-4" + "[cu13]" * (int(torch.version.cuda.split(".")[0]) >= 13))')
    have flash_attn.cute || install --pre "$flash_attn" || install_pieces "$flash_attn"
    python -c 'import flash_attn.cute.interface' ||
        echo "flash-attn-4 could not be installed: attention will run on cuDNN" >&2
else
    have flash_attn_2_cuda || install --no-build-isolation flash-attn ||
        echo "flash-attn could not be installed: attention will run on torch's own kernel" >&2
fi

if ! python -c 'import torch, bmtrain' 2>/dev/null; then
    for tool in setuptools wheel cmake ninja pybind11; do have $tool || command -v $tool >/dev/null || install $tool || explain_pip; done
    build=$(mktemp -d)
    trap 'rm -rf "$build"' EXIT
    python -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        --no-binary=bmtrain --dest "$build" bmtrain==1.0.1 || explain_pip
    tar -xzf "$build"/bmtrain-*.tar.gz -C "$build"
    # Build for the present architectures only: CUDA 13 refuses the old ones that the file lists.
    sed -i -e 's/-gencode=arch=compute_[0-9]*,code=sm_[0-9]*//g' \
        -e "s/CUDA_ARCHITECTURES \"[0-9;]*\"/CUDA_ARCHITECTURES \"$architectures\"/" "$build"/bmtrain-*/CMakeLists.txt
    nccl=$(python -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null) &&
        export NCCL_ROOT_DIR=$nccl
    install --no-deps --no-build-isolation "$build"/bmtrain-*/
fi

have numpy && have safetensors && have tqdm && have tensorboard && have tokenizers && have sentencepiece &&
    have matplotlib && have huggingface_hub && deps=--no-deps
install --no-build-isolation ${deps:-} --editable '.[train]' || explain_pip
touch "$(stamp train)"

if [ ! -e .venv/bin/torchrun ]; then  # if torch belongs to another environment, so does its torchrun
    printf '#!/usr/bin/env bash\nexec "$(dirname "$0")/python" -m torch.distributed.run "$@"\n' >.venv/bin/torchrun
    chmod +x .venv/bin/torchrun
fi
echo "start training with .venv/bin/torchrun: another torchrun on the PATH starts a Python without these packages"
python -m bmt_burst.doctor
