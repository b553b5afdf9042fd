"""The end of reading a call whose text is none."""


class NotACallError(Exception):
    """A text that is none of the format's calls."""
