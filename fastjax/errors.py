"""Errors that a user can act on."""


class ConfigError(ValueError):
    """What was asked for is wrong: a setting, an argument, a combination of them. The command line exits with 2."""


class DataError(ValueError):
    """A training file holds what cannot be read or learnt: the message names the file and the line. Exit status 1."""


class TrainingError(RuntimeError):
    """A run that cannot go on, such as a loss that is not finite: the message names the step. Exit status 1."""
