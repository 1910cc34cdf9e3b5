"""Removes secrets from texts that are written into a manifest."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"
_NAMES = r"(?:password|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|credentials?)"
# A name such as hf_token, but not max_tokens or tokenizer.
_NAME = rf"(?:[A-Za-z0-9_.-]*[_.-])?{_NAMES}"
_PATTERNS = (
    # Keys in PEM form, also where each line has the mark of a patch.
    re.compile(r"(?s)(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
    # https://user:password@host, and https://token@host.
    re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/@\"']+(@)", re.IGNORECASE),
    # token = "...", "api_key": "...".
    re.compile(rf"(\b{_NAME}[\"']?\s*[:=]\s*[\"'])[^\"'\n]+([\"'])", re.IGNORECASE),
    # key="...", if the value is as long as a key.
    re.compile(r"(\bkey\s*=\s*[\"'])[\w+/=-]{20,}([\"'])", re.IGNORECASE),
    # TOKEN=..., and --token ..., without quotes: only what is no expression of a program.
    re.compile(rf"(\b{_NAME}(?:=|:\s+|\s+))(?=[\w+/-]*\d)[\w+/-]{{8,}}=*(\s|$)", re.IGNORECASE),
    # Tokens of known services, whatever stands before them.
    re.compile(r"()\b(?:gh[pousr]|glpat|hf|sk|pk|xox[abprs])[_-][\w-]{16,}()"),
    re.compile(r"()\bgithub_pat_\w{20,}()"),
    re.compile(r"()\b(?:AKIA|ASIA)[0-9A-Z]{16}()\b"),
    re.compile(r"()\bAIza[\w-]{35}()"),
    re.compile(r"()\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*()"),
)
_OPTION = re.compile(rf"-{{1,2}}{_NAME}", re.IGNORECASE)
_SETTING = re.compile(rf"((?:-{{1,2}})?{_NAME}=).+", re.IGNORECASE)


def scrub(text: str) -> str:
    """Return a text in which passwords, tokens and keys are replaced by ``***``.

    Found are credentials in URLs, literal values of names such as ``api_key``, private keys, and
    tokens in the formats of well-known services.
    """
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}\g<2>", text)
    return text


def scrub_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without secrets, such as the value of ``--token``."""
    found, is_secret = [], False
    for argument in arguments:
        if is_secret and not argument.startswith("-"):
            found.append(HIDDEN)
        else:
            found.append(scrub(_SETTING.sub(rf"\g<1>{HIDDEN}", argument)))
        is_secret = _OPTION.fullmatch(argument) is not None
    return found
