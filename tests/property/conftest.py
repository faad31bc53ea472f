"""Hypothesis on a loaded machine: how long an example took says nothing about the code."""

from hypothesis import settings

settings.register_profile("rpipe", deadline=None)
settings.load_profile("rpipe")
