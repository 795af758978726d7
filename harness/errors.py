"""The one error type that is a user's mistake and not ours."""


class UserError(ValueError):
    """What came, what was expected, what to do: one line, shown without a traceback, exit code 2."""
