# Functions for the scripts that install into .venv, which source this file.

# Make pip install from a folder of wheels and sdists, instead of from the package index.
use_folder() {
    [ -d "$1" ] || { echo "$(basename "$0"): --from expects a folder, got $1" >&2; exit 2; }
    export PIP_NO_INDEX=1 PIP_FIND_LINKS
    PIP_FIND_LINKS=$(python3 -c 'import pathlib, sys; print(pathlib.Path(sys.argv[1]).resolve().as_uri())' "$1")
}

install() { python -m pip install --quiet --disable-pip-version-check --retries 2 "$@"; }

# Print what to do after pip failed, and end the script.
explain_pip() {
    {
        if [ -n "${PIP_NO_INDEX:-}" ]; then
            echo "$(basename "$0"): pip failed, see above. PIP_NO_INDEX is set, so pip only looked in '${PIP_FIND_LINKS:-}'."
        else
            echo "$(basename "$0"): pip failed, see above. It needs a network, or a folder of wheels: --from FOLDER, which"
            echo "train/quickstart.sh and train/install_gpu.sh take."
        fi
        echo "To fill a folder on a machine with a network and the same system and Python, run in this repository"
        echo "    python3 -m pip download --dest FOLDER '${BMT_BURST_TORCH:-torch==2.13.0}' setuptools wheel '.[train]'"
        echo "and for GPUs also"
        echo "    python3 -m pip download --dest FOLDER --pre 'flash-attn-4[cu13]' cmake ninja pybind11"
        echo "    python3 -m pip download --dest FOLDER --no-deps --no-build-isolation --no-binary=bmtrain bmtrain==1.0.1"
    } >&2
    exit 1
}

# Print the file that exists if bmt_burst and its extra $1 are installed as in this pyproject.toml.
stamp() {
    echo ".venv/installed-$1-$(python -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest()[:12])')"
}
