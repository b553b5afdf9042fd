"""Descriptions of models, without JAX: settings and weights."""
