"""Retention in a model: modules, a small language model, and decoding by carried states."""
