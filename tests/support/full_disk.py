"""A full disk, for writers through `open`."""

import errno
import os


class FullDisk:
    """A file that takes `room` bytes and no more."""

    def __init__(self, file, mode, room):
        self.stream, self.room = open(file, mode), room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.stream.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stream.close()
