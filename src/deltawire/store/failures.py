"""Translates the exceptions of store clients into the errors of deltawire."""

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from obstore import exceptions

from deltawire.errors import Conflict, ObjectMissing, StoreError, StoreUnavailable
from deltawire.redact import redacted

MAX_MESSAGE_CHARS = 300

_CREDENTIAL_ERRORS = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_BAD_CREDENTIALS = re.compile(
    r"ExpiredToken|InvalidToken|status code: 40[13]\b"
    # Instance metadata endpoints of the clouds.
    r"|/latest/api/token|/latest/meta-data|metadata\.google|/metadata/identity"
)
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
_DISK_FULL = re.compile(rf"os error ({errno.ENOSPC}|{errno.EDQUOT})\b")
# Retrying does not help with these, unlike 408 (timeout) and 429 (too many requests).
_REFUSED = re.compile(r"status code: 4(?!08|29)\d\d|builder error|LocalFileSystem error")


@contextmanager
def translated(url: str, key: str, *, environment: Sequence[str]) -> Iterator[None]:
    """Translate every failure of the store. The cause is not chained: it is long, and it may contain signed URLs."""
    try:
        yield
    except (exceptions.BaseError, OSError, NotImplementedError) as error:
        raise translate(error, url, key, environment) from None
    except BaseException as error:
        # A panic of the client is no Exception, and its class cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        message = f"{url}: the client failed: {shorten(str(error))}{_look_at(environment)}"
        raise StoreUnavailable(message, url=url, key=key, refused=True, uncertain=False) from None


def translate(error: Exception, url: str, key: str, environment: Sequence[str]) -> StoreError:
    """The corresponding deltawire error; `environment` are the variables to check when access is refused."""
    where = {"url": url, "key": key}
    text = str(error)
    if _NO_BUCKET.search(text):
        return StoreUnavailable(f"{url}: the bucket does not exist", **where, refused=True, uncertain=False)
    if isinstance(error, FileNotFoundError):
        return ObjectMissing(f"{url} has no {key}", **where)
    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        return Conflict(f"{url} already has {key}", **where)
    message, refused = _explain(error, text, environment)
    return StoreUnavailable(f"{url}: {message}", **where, refused=refused, uncertain=False)


def _explain(error: Exception, text: str, environment: Sequence[str]) -> tuple[str, bool]:
    """The message, and whether the refusal is final."""
    if _DISK_FULL.search(text) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full", True
    words = shorten(text)
    if isinstance(error, _CREDENTIAL_ERRORS) or _BAD_CREDENTIALS.search(text):
        return f"access was refused: {words}{_look_at(environment)}", True
    return words, bool(_REFUSED.search(text)) or isinstance(error, NotImplementedError | exceptions.NotSupportedError)


def _look_at(environment: Sequence[str]) -> str:
    return f"; look at {', '.join(environment)}" if environment else ""


def shorten(text: str) -> str:
    """The store's own message on one line, without the client's debug output, its times and the queries of URLs."""
    text = re.sub(r"^Generic \w+ error: | in [\d.]+[nµm]?s\b", "", text.partition("\n\nDebug source:")[0])
    said = [found for tag in ("Code", "Message") for found in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)]
    if said:
        text = f"{text.partition('<')[0].rstrip(' :')}: {': '.join(said)}"
    line = " ".join(re.sub(r"\?\S+", "", redacted(text)).split()).rstrip(" :")
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 1] + "…"
