"""The two kinds of errors a user can cause. Every message says what happened, which value, what to do."""


class GptlmError(ValueError):
    """The run cannot go on for a reason the user can mend. The commands print it and exit with 1."""

    exit_code = 1


class UsageError(GptlmError):
    """The command itself is wrong: flags, values, or combinations of them. Exit code 2."""

    exit_code = 2
