"""Errors that a user can act on."""


class ConfigError(ValueError):
    """What was asked for is wrong: a setting, an argument, a combination of them. The command line exits with 2."""
