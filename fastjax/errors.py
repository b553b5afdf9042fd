"""Errors that a user can act on."""


class ConfigError(ValueError):
    """A wrong setting, argument or combination of them. The command line exits with 2."""


class DataError(ValueError):
    """A training file holds what cannot be read or learnt: the message names the file and the line. Exit status 1."""


class TrainingError(RuntimeError):
    """A run that cannot go on, such as a loss that is not finite: the message names the step. Exit status 1."""


class Interrupted(Exception):
    """A run that a signal has stopped, its state saved. Exit status 128 + the signal's number: 143, 130, 129."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number
