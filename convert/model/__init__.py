"""Descriptions of models, without JAX: their settings and their weights."""
