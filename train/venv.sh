# Make .venv in the repository with bmt_burst and the extras named in $1, and activate it. The project's scripts source
# this file. It installs nothing if this script or install_gpu.sh did so before. BMT_BURST_TORCH names another torch.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. train/pip.sh
python3 - <<'CHECK' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"bmt_burst needs Python 3.11 or newer, this is {sys.version.split()[0]}")
CHECK
[ -f .venv/bin/activate ] || python3 -m venv .venv
. .venv/bin/activate
if [ ! -f "$(stamp "$1")" ]; then
    what="bmt_burst[$1] with about 100 MB of packages"
    # Install torch first and by version: a bare "torch" may install another build. Keep the one of install_gpu.sh.
    torch=
    if [ -n "${BMT_BURST_TORCH:-}" ] || ! python -c "import torch" 2>/dev/null; then
        torch=${BMT_BURST_TORCH:-torch==2.13.0}
        what="$torch (up to 3 GB with CUDA, else 200 MB) and $what"
    fi
    echo "installing into .venv: $what. This takes one to ten minutes, once."
    [ -z "$torch" ] || install "$torch" || explain_pip
    install --editable ".[$1]" || explain_pip
    touch "$(stamp "$1")"
fi
