"""Installs the library bmt_burst alone; models/, train/ and bench/ are used from a checkout."""

from setuptools import find_packages, setup

TRAIN = ["numpy", "safetensors", "huggingface_hub", "tqdm", "tensorboard", "matplotlib", "tokenizers", "sentencepiece"]

setup(
    name="bmt_burst",
    version="0.1.0",
    description="Exact attention over sequences cut over many ranks, for pretraining on long contexts with BMTrain",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["bmt_burst", "bmt_burst.*"]),
    package_data={"bmt_burst": ["py.typed"]},
    install_requires=["torch>=2.11"],
    extras_require={
        "flash-attn": ["flash-attn>=2.6"],
        # BMTrain is no extra: it requires nvidia-nccl-cu11, which overwrites torch's NCCL. See train/install_gpu.sh.
        "train": TRAIN,
        "test": [*TRAIN, "triton", "pytest", "pytest-xdist", "ruff==0.17.5", "transformers"],
    },
)
