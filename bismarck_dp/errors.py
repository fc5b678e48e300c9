"""One exception for everything a user can mend: it says what is wrong and, as a hint, what would work."""

from __future__ import annotations


class BismarckError(Exception):
    """A refusal with a remedy. `sqlstate` is what PostgreSQL reports when the refusal happens in the server."""

    def __init__(self, message: str, hint: str = "", sqlstate: str = "22023") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.sqlstate = sqlstate

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message
