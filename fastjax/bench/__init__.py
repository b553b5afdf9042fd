"""Measurements that a user can repeat: `fastjax bench`."""
