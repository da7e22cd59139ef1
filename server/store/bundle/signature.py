"""A signature on a whole bundle, in the OpenSSF model signing format (OMS), by an elliptic-curve key in a PEM file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server.errors import BundleError
from server.store.bundle.bag import SIGNATURE, STATE

_MISSING = (
    "signatures need the package model-signing, which is not installed here: pip install 'glmserve[sign]', or leave "
    "the key out"
)


def sign(folder: Path, key: Path) -> Path:
    """Sign every file; the signature lies in the folder, under a name that no manifest lists. Raises BundleError."""
    signing, hashing = _modules()
    target = folder / SIGNATURE
    try:
        config = signing.Config().set_hashing_config(_hashing(hashing, folder))
        config.use_elliptic_key_signer(private_key=key).sign(folder, target)
    except Exception as error:
        raise BundleError(f"the bundle cannot be signed with '{key}': {error}; give an EC key in PEM form") from error
    return target


def check(folder: Path, public_key: Path) -> None:
    """Raises BundleError when the signature is not there, not of this key, or not of these files."""
    signing, hashing = _modules(verifying=True)
    signature = folder / SIGNATURE
    if not signature.is_file():
        raise BundleError(f"'{folder}' is not signed: there is no {SIGNATURE}; leave --public-key out, or ask for one")
    try:
        config = signing.Config().set_hashing_config(_hashing(hashing, folder))
        config.use_elliptic_key_verifier(public_key=public_key).verify(folder, signature)
    except Exception as error:
        raise BundleError(f"the signature of '{folder}' does not hold with '{public_key}': {error}") from error


def _modules(*, verifying: bool = False) -> tuple[Any, Any]:
    try:
        from model_signing import hashing, signing
        from model_signing import verifying as verification
    except ImportError:
        raise BundleError(_MISSING) from None
    return (verification if verifying else signing), hashing


def _hashing(hashing: Any, folder: Path) -> Any:
    left_out = [folder / SIGNATURE, folder / STATE, *folder.rglob("__pycache__")]
    return hashing.Config().use_file_serialization().set_ignored_paths(paths=left_out, ignore_git_paths=False)
