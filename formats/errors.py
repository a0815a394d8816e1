"""The one error of this package."""


class FormatError(ValueError):
    """A file or folder on disk is not what it claims to be.

    The message names the file, says what it holds and what was wanted.
    """
