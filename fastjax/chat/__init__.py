"""Talking to a model in a terminal, or through a pipe.

`subject` finds what a folder has to talk to, `voices` generates, `conversation` keeps what was said, `commands` are the
lines that begin with a slash, and `screen` shows all of it.
"""
