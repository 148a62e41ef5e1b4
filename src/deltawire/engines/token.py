"""The secret between an agent and the server next to it.

Taken from `DELTAWIRE_ENGINE_TOKEN`. Without that it is a random one in a file that only this user can read, made by
whichever of the two comes first: on one machine, or in one container, nothing has to be configured.
"""

import os
import stat
import tempfile
from pathlib import Path
from secrets import token_hex

from deltawire.errors import EngineRejected

VARIABLE = "DELTAWIRE_ENGINE_TOKEN"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def engine_token() -> str:
    given = os.environ.get(VARIABLE)
    if given is not None:
        if not given.strip() or not (given.isascii() and given.isprintable()):
            raise ValueError(f"{VARIABLE} is empty, or has characters that are not allowed in an HTTP header")
        return given.strip()
    return _own_token(shared_memory() / f"deltawire-{os.getuid()}")


def shared_memory() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _own_token(folder: Path) -> str:
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise EngineRejected(f"{folder} is not a folder that only this user can read: remove it, or set {VARIABLE}")
    path = folder / "engine-token"
    made = folder / f"engine-token.{token_hex(4)}"
    made.touch(mode=0o600)
    made.write_text(token_hex(32))
    try:
        # Whole from the first moment on, and never replaced.
        os.link(made, path)
    except FileExistsError:
        pass
    finally:
        made.unlink()
    return path.read_text().strip()
