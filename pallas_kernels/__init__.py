"""Kernels and their references: arrays in, arrays out.

Dimension letters used in every signature and shape comment of the project: B batch, S query length, T key length,
H query heads, K key heads, D head size, E model width, F feed-forward width, V vocabulary, L layers, R LoRA rank,
X experts, N tokens.
"""
