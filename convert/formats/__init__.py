"""Packed formats, bit for bit."""
