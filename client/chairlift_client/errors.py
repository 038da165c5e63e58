"""The two ways in which a command of the client can fail."""


class SetupError(Exception):
    """Something on this machine keeps the server from starting; the text says what to do."""


class GenerateError(Exception):
    """The server refused a request, ended it early, or could not be reached."""
