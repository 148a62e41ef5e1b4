"""Ed25519 signatures of documents, for runs whose readers do not trust the store."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from deltawire.errors import MissingDependency, ObjectMissing
from deltawire.redact import is_like_a_key
from deltawire.run.manifest import Sign, Verify

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def generate_key(path: Path) -> str:
    """Write a new private key (PEM, readable by the owner only) and return the public key in hexadecimal digits."""
    serialization, ed25519 = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(pem)
    return _public_hex(key)


def signer(path: str | Path) -> Sign:
    """A function that signs with the private key in a PEM file."""
    return _private_key(Path(path)).sign


def public_key_of(path: str | Path) -> str:
    """The public key that belongs to a private key file."""
    return _public_hex(_private_key(Path(path)))


def verifier(public_key: str) -> Verify:
    """A function that checks signatures with a public key: 64 hexadecimal digits, or the path of a file with them."""
    _, ed25519 = _cryptography()
    from cryptography.exceptions import InvalidSignature

    if not isinstance(public_key, str):
        raise TypeError(
            f"a public key must be 64 hexadecimal digits or a path, as a string, not {type(public_key).__name__}"
        )
    text = public_key if len(public_key) == 64 else _text_of(public_key)
    # The value is not shown: it may be a secret.
    if "PRIVATE KEY" in text:
        raise ValueError(
            "this is a private key, but a public one is expected: pass what deltawire keygen printed for it; "
            "deltawire.run.signing.public_key_of(FILE) returns it again"
        )
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
    except ValueError:
        raise ValueError(
            "this is not a public key: expected 64 hexadecimal digits, or a file that holds them"
        ) from None

    def verify(signature: bytes, message: bytes) -> bool:
        try:
            key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    return verify


def _text_of(given: str) -> str:
    """The content of the file if this is a path, otherwise the text itself."""
    try:
        with Path(given).open("rb") as file:
            return file.read(4096).decode("ascii", "replace").strip()
    except (OSError, ValueError):
        return given


def _private_key(path: Path) -> "Ed25519PrivateKey":
    key: Any
    serialization, ed25519 = _cryptography()
    if is_like_a_key(str(path)) and not os.path.isfile(path):
        raise ValueError("this seems to be a key, but the path of a key file is expected: see deltawire keygen")
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        raise ObjectMissing(f"there is no key at {path}: create one with deltawire keygen", path=str(path)) from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{path} is not an ed25519 private key in PEM format: create one with deltawire keygen")
    return cast("Ed25519PrivateKey", key)


def _public_hex(key: "Ed25519PrivateKey") -> str:
    return key.public_key().public_bytes_raw().hex()


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingDependency("signing needs another package: pip install 'deltawire[signing]'") from None
    return serialization, ed25519
