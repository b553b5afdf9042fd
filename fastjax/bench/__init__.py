"""Repeatable measurements: `fastjax bench`."""
