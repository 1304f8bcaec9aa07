"""The errors of Troupe. Each carries one sentence that says what was wrong, where, and what to do."""


class TroupeError(Exception):
    """Base of all errors that a user may see as one sentence."""

    exit_code = 1


class UserError(TroupeError):
    """The user asked for something that cannot be: exit code 2, no traceback."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration value, option or pair that makes no sense."""


class MissingExtra(UserError):
    """An optional part is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} is not installed: install it with  pip install 'troupe[{extra}]'")


class EnvironmentFault(UserError):
    """The environment raised, hung, or returned something that is not a number."""


class RunDirError(UserError):
    """A run directory that is missing, locked, damaged or belongs to something else."""


class PeerLost(TroupeError):
    """The other side of a mailbox did not take or answer a message in time, or is gone."""


class BadMessage(TroupeError):
    """A message that is malformed, too large or of the wrong shape; it was not delivered."""


def last_line(e: BaseException) -> str:
    """What somebody else's exception comes to, in one line for a sentence of ours."""
    text = str(e).strip().splitlines()
    return f"{type(e).__name__}: {text[-1] if text else ''}".rstrip(": ")
