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
  packages=setuptools.find_packages(include=["grpojax", "grpojax.*"]),
  package_data={"grpojax": ["assets/**/*"]},
  python_requires=">=3.11",
  install_requires=[
    "flax>=0.11",
    "grain>=0.2.16",
    "jax>=0.7.2",
    "jaxtyping",
    "jinja2",
    "matplotlib",
    "ml-collections>=1.1.0",
    "numpy",
    "optax>=0.2.7",
    "orbax-checkpoint>=0.12.4",
    "safetensors",
    "tensorboardX",
    "tokenizers",
    "transformers>=5.0",
  ],
  extras_require={
    "tpu": ["jax[tpu]"],
    "cuda": ["jax[cuda13]"],
    # Only for datasets of TensorFlow Datasets. It needs no TensorFlow, but
    # imports importlib_resources without declaring it.
    "tfds": ["tensorflow-datasets>=4.9.9", "importlib_resources"],
    # With PyTorch installed too, models are compared with transformers' own.
    "test": ["beartype", "pytest", "pytest-xdist", "ruff>=0.15"],
  },
)
