# Sourced by the project's scripts: makes .venv in the repository with bmt_burst and the extras named in $1, and
# activates it. Does nothing where that is done already. BMT_BURST_TORCH names another torch to install.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python3 - <<'CHECK' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"bmt_burst needs Python 3.11 or newer, this is {sys.version.split()[0]}")
CHECK
[ -f .venv/bin/activate ] || python3 -m venv .venv
. .venv/bin/activate
stamp=".venv/installed-$1-$(python -c 'import hashlib; print(hashlib.sha256(open("setup.py", "rb").read()).hexdigest()[:12])')"
if [ ! -f "$stamp" ]; then
    echo "installing bmt_burst[$1] into .venv"
    # torch first and by version: a bare "torch" may bring another build. What install_gpu.sh brought stays.
    if [ -n "${BMT_BURST_TORCH:-}" ] || ! python -c "import torch" 2>/dev/null; then
        python -m pip install --quiet --disable-pip-version-check "${BMT_BURST_TORCH:-torch==2.13.0}"
    fi
    python -m pip install --quiet --disable-pip-version-check --editable ".[$1]"
    touch "$stamp"
fi
