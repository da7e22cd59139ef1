"""The model hub: which files a repository has at which commit, through huggingface_hub (listing, revisions, tokens,
offline rules), and every way in which it can fail as one sentence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

from server.errors import ConfigError, FetchError
from server.store.http_range import Source, retry_after_s
from server.store.names import HubName
from server.store.quants import RemoteFile
from server.store.recipes import load_recipes, near_repo

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

DEFAULT_ENDPOINT = "https://huggingface.co"

_TRUE = frozenset({"1", "ON", "YES", "TRUE"})  # as huggingface_hub reads its variables
_LIST_TIMEOUT_S = 30.0
_LIST_TRIES = 5


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository's files at one commit."""

    repo: str  # its present name, which may be another than was asked for
    commit: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True, slots=True)
class Hub:
    """`token` None: huggingface_hub looks for one (HF_TOKEN, the file of `hf auth login`)."""

    endpoint: str = DEFAULT_ENDPOINT
    token: str | None = field(default=None, repr=False)
    offline: bool = False

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], *, token: str | None = None, offline: bool = False
    ) -> Hub:
        """HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE), as huggingface_hub has them. Raises
        ConfigError for an endpoint that is no address."""
        endpoint = (environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"HF_ENDPOINT is '{endpoint}', but must be an address, such as https://{endpoint}")
        told = environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE") or ""
        return cls(
            endpoint=endpoint,
            token=token or environment.get("HF_TOKEN") or None,
            offline=offline or told.upper() in _TRUE,
        )

    def list_files(self, name: HubName, sleep: Callable[[float], None] = time.sleep) -> Listing:
        """Tries again when the hub is busy. Raises FetchError, and ConfigError for a name that cannot be one."""
        if self.offline:
            raise FetchError(f"{name} cannot be fetched: --offline or HF_HUB_OFFLINE forbids it")
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        attempt = 0
        while True:
            attempt += 1
            try:
                return self._list_files(name)
            except HFValidationError as error:
                raise ConfigError(f"'{name.repo}' cannot be a repository's name: {error}") from None
            except HfHubHTTPError as error:
                wait_s = self._wait_before_again(error, attempt)
                if wait_s is None:
                    raise FetchError(self._refusal(name, error)) from None
                sleep(wait_s)
            except ValueError:
                raise FetchError(
                    f"{self.endpoint} does not answer as a model hub (no JSON); a proxy or a login page is in between, "
                    f"so set HTTPS_PROXY or NO_PROXY, or give a mirror with HF_ENDPOINT"
                ) from None
            except (transport_error(), OSError) as error:
                raise FetchError(
                    f"{self.endpoint} cannot be reached ({_reason(error)}); check the network, HTTPS_PROXY and "
                    f"HF_ENDPOINT, or fetch {name} on a connected machine and give the folder with its files to --gguf"
                ) from None

    def _list_files(self, name: HubName) -> Listing:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint, token=self._token_to_send() or False)
        info = api.model_info(name.repo, revision=name.revision, files_metadata=True, timeout=_LIST_TIMEOUT_S)
        siblings = info.siblings or []
        if any(each.size is None for each in siblings) and info.id not in (None, name.repo):
            return self._list_files(replace(name, repo=info.id))  # renamed, and the redirect has lost what was asked
        files = tuple(
            RemoteFile(
                path=each.rfilename,
                size=each.lfs.size if each.lfs else each.size or 0,
                sha256=each.lfs.sha256 if each.lfs else None,
                blob=each.blob_id,
            )
            for each in siblings
            if each.lfs or each.size is not None
        )
        if siblings and not files:
            raise FetchError(
                f"{self.endpoint} does not tell how large the files of {name.repo} are; change HF_ENDPOINT"
            )
        return Listing(info.id or name.repo, info.sha or name.revision, files)

    def source(self, listing: Listing, file: RemoteFile) -> Source:
        """Where the bytes of a file are."""
        url = f"{self.endpoint}/{listing.repo}/resolve/{quote(listing.commit, safe='')}/{quote(file.path)}"
        return Source(url, file.name, file.size, file.sha256 or file.blob, self._token_to_send())

    def _token_to_send(self) -> str | None:
        if self.token:
            return self.token
        from huggingface_hub import get_token

        return get_token()

    def _wait_before_again(self, error: HfHubHTTPError, attempt: int) -> float | None:
        """None: it is of no use."""
        status = error.response.status_code
        if attempt == _LIST_TRIES or not (status == 429 or status >= 500):
            return None
        after_s = retry_after_s(error.response.headers.get("Retry-After"))
        wait_s = float(2 ** (attempt - 1)) if after_s is None else after_s
        return wait_s if wait_s <= 300 else None

    def _refusal(self, name: HubName, error: HfHubHTTPError) -> str:
        from huggingface_hub.errors import (
            DisabledRepoError,
            GatedRepoError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        status = error.response.status_code
        has_token = self._token_to_send() is not None
        match error:
            case GatedRepoError():
                return _gated(name, self.endpoint, has_token=has_token)
            case RevisionNotFoundError():
                return f"{name.repo} has no revision '{name.revision}'; leave --revision out for its newest"
            case DisabledRepoError():
                return f"{name.repo} has been disabled at {self.endpoint}; take another repository"
            case _ if "Invalid credentials" in (error.response.headers.get("X-Error-Message") or ""):
                return f"{self.endpoint} does not know the token; give a valid one with HF_TOKEN or --hf-token, or none"
            case RepositoryNotFoundError():
                return _not_found(name, self.endpoint, has_token=has_token)
            case _ if status in (401, 403, 404):
                return _not_found(name, self.endpoint, has_token=has_token)
            case _:
                reason = error.response.reason_phrase
                return f"{self.endpoint} answers {status} {reason} for {name.repo}; try later, or another HF_ENDPOINT"


def transport_error() -> type[Exception]:
    """The error of the HTTP library that huggingface_hub happens to use."""
    from huggingface_hub.errors import HfHubHTTPError

    return cast("type[Exception]", HfHubHTTPError.__mro__[1])


def _gated(name: HubName, endpoint: str, *, has_token: bool) -> str:
    page = f"{endpoint}/{name.repo}"
    if has_token:
        return f"{name.repo} is gated and the token may not see it; ask for access at {page} with its account"
    return f"{name.repo} is gated; accept its terms at {page}, then give a token with HF_TOKEN or --hf-token"


def _not_found(name: HubName, endpoint: str, *, has_token: bool) -> str:
    way = "the token may not see it" if has_token else "it is private and needs a token (HF_TOKEN or --hf-token)"
    near = near_repo(name.repo, load_recipes())
    hint = f"did you mean {near}?" if near else "check OWNER/REPO"
    return f"there is no model '{name.repo}' at {endpoint}, or {way}; {hint}"


def _reason(error: BaseException) -> str:
    """The innermost cause says the most."""
    while error.__cause__ is not None or error.__context__ is not None:
        inner = error.__cause__ or error.__context__
        if inner is None or not str(inner):
            break
        error = inner
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
