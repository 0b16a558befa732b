"""Bearer tokens: reading them, and comparing them in constant time."""

import hmac
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from regard.errors import RegardError

TOKENS_VARIABLE = "REGARD_SERVE_TOKENS"
MIN_LENGTH = 16


class Authentication:
    """The tokens that a server accepts; without tokens it accepts every request.

    >>> tokens = Authentication(["0123456789abcdef"])
    >>> tokens.accepts("Bearer 0123456789abcdef"), tokens.accepts("Bearer wrong"), tokens.accepts(None)
    (True, False, False)
    """

    def __init__(self, tokens: Sequence[str] = ()) -> None:
        self._tokens = [token.encode() for token in tokens]

    @property
    def is_required(self) -> bool:
        return bool(self._tokens)

    def accepts(self, header: str | None, api_key: str | None = None) -> bool:
        """Whether a request is allowed, by its Authorization header or its API key."""
        if not self._tokens:
            return True
        given = [api_key] if api_key else []
        scheme, _, credentials = (header or "").partition(" ")
        if scheme.lower() == "bearer":
            given.append(credentials.strip())
        # Every token is compared, so that the time does not depend on which one matches.
        # A key from JSON may have halves of surrogate pairs.
        values = [value.encode(errors="surrogatepass") for value in given]
        matches = [hmac.compare_digest(value, token) for value in values for token in self._tokens]
        return any(matches)


def read_tokens(file: Path | None) -> list[str]:
    """The tokens of a file (one per line; # starts a comment) and of the environment variable (separated by commas).

    >>> read_tokens(Path("no-such-file"))
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-file: cannot be read (No such file or directory). Pass a file with one token \
per line.
    """
    lines = os.environ.get(TOKENS_VARIABLE, "").split(",")
    if file is not None:
        try:
            lines += file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise RegardError(f"{file}: cannot be read ({reason}).", "Pass a file with one token per line.") from None
    tokens = [token for line in lines if (token := line.partition("#")[0].strip())]
    if file is not None and not tokens:
        raise RegardError(f"{file} contains no token.", "Write one token per line.")
    for token in tokens:
        if len(token) < MIN_LENGTH:
            raise RegardError(
                f"A token has {len(token)} characters; at least {MIN_LENGTH} are required.",
                "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
    return tokens


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of this machine alone.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "127.0.0.1.example")]
    [True, True, True, False, False]
    """
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, tokens: Sequence[str], no_authentication: bool) -> None:
    """Refuse to listen on a public address without tokens, unless that is explicitly allowed.

    >>> check_exposure("127.0.0.1", [], False)
    """
    if not is_loopback(host) and not tokens and not no_authentication:
        raise RegardError(
            f"--host {host}: other machines could use the server without a token.",
            f"Pass --tokens FILE, set {TOKENS_VARIABLE}, or pass --no-authentication.",
        )
