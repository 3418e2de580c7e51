"""Builds the package. pyproject.toml describes it; tools that know only setup.py find this."""

from setuptools import setup

setup()
