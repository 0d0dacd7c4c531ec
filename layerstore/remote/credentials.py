"""
Credentials for S3, from the profiles of the AWS tools in ``~/.aws``.

obstore itself reads keys, endpoint and region from the environment, and falls back to the machine's own role. This
module reads profiles that have keys; boto3 handles other profiles (single sign-on, assumed roles, a process).
"""

import configparser
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerstore.errors import InvalidInput, Unsupported

_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_SETTINGS = {"region": "region", "endpoint_url": "endpoint"}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_VARIABLES = {"region": ("AWS_REGION", "AWS_DEFAULT_REGION"), "endpoint_url": _ENDPOINTS}
_NEED_BOTO3 = frozenset({"sso_session", "sso_start_url", "role_arn", "credential_process", "source_profile"})


def s3_options(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """
    Return the chosen profile's settings as arguments for obstore; the environment takes precedence.

    Raises:
        InvalidInput: The profile in ``AWS_PROFILE`` does not exist, a profile file is malformed, or an endpoint is not
            a URL.
        Unsupported: The profile needs boto3, which is not installed.
    """
    chosen = environment.get("AWS_PROFILE")
    name = chosen or "default"
    settings = _profile(environment, name)
    if chosen and not settings:
        raise InvalidInput(
            f"there is no profile {chosen!r}, which AWS_PROFILE names", hint="aws configure list-profiles"
        )
    options: dict[str, Any] = {}
    for setting, argument in _SETTINGS.items():
        if setting in settings and not any(environment.get(name) for name in _VARIABLES[setting]):
            options[argument] = settings[setting]
    endpoints = {name: environment[name] for name in _ENDPOINTS if environment.get(name)}
    for origin, endpoint in {"the profile's endpoint_url": options.get("endpoint", "http://"), **endpoints}.items():
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidInput(f"{origin} is not a URL: it does not begin with https:// or http://")
    # As in the AWS tools, keys in the environment replace all of the profile's keys, never just some.
    if "AWS_ACCESS_KEY_ID" in environment:
        return options
    options |= {argument: settings[key] for key, argument in _KEYS.items() if key in settings}
    if "access_key_id" not in options and not _NEED_BOTO3.isdisjoint(settings):
        options["credential_provider"] = _from_boto3(name)
    return options


def _profile(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the settings of the profile *name* from both files; ``credentials`` takes precedence."""
    home = Path.home() / ".aws"
    config = _read(Path(environment.get("AWS_CONFIG_FILE", home / "config")))
    keys = _read(Path(environment.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials")))
    settings: dict[str, str] = {}
    for parser, section in ((config, name if name == "default" else f"profile {name}"), (keys, name)):
        if parser.has_section(section):
            settings |= {key: value.strip() for key, value in parser.items(section)}
    service = f"services {settings.get('services', '')}"
    if config.has_section(service):
        for line in config.get(service, "s3", fallback="").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "endpoint_url":
                settings["endpoint_url"] = value.strip()
    return settings


def _read(path: Path) -> configparser.ConfigParser:
    # No section supplies defaults for the others, not even a section called DEFAULT.
    parser = configparser.ConfigParser(interpolation=None, default_section="\0")
    try:
        parser.read(path.expanduser(), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError) as exc:
        # The error's text may contain keys, so report only the error's type.
        raise InvalidInput(f"{path} cannot be read: {type(exc).__name__}", hint="aws configure writes it") from None
    return parser


def _from_boto3(profile: str) -> Any:
    if importlib.util.find_spec("boto3") is None:
        raise Unsupported(f"the profile {profile!r} has no keys of its own", hint="pip install boto3, which gets them")
    from boto3 import Session
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider(Session(profile_name=profile))
