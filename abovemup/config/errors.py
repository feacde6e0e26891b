"""What may go wrong in a way that a person can read: one or two lines and an exit code, no traceback."""


class RequestError(Exception):
    """The request is wrong (option, config, path, data): one or two lines that name the thing and the fix. Exit 2."""


class RunFailed(Exception):
    """Something outside the request failed (memory, disk): one or two lines that name the thing and the fix. Exit 4."""
