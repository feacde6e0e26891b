"""The one exception a user can cause."""


class RequestError(Exception):
    """The request is wrong (option, config, path, data): one or two lines that name the thing and the fix. Exit 2."""


class RunFailed(Exception):
    """Something outside the request failed (memory, disk): one or two lines that name the thing and the fix. Exit 4."""
