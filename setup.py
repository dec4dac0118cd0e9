"""Packages to install, found in the tree and not listed: three of them lie beside the others, see pyproject.toml."""

from setuptools import find_packages, setup

BESIDE = ("arch", "codegen", "templates")

setup(packages=[*find_packages("python"), *(f"attention_autotuner.{name}" for name in BESIDE)])
