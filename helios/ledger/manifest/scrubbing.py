"""Removes secrets from texts that are written into a manifest."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"
_STRONG = r"(?:password|passwd|pwd|passphrase|secret|(?:api|access|private|secret)[_-]?key)"
_NAMES = rf"(?:{_STRONG}|token|credentials?|o?auth(?:orization)?|bearer)"
# Long prefixes would take quadratic time in long lines of data.
_PREFIX = r"(?:[A-Za-z0-9_.-]{0,40}[_.-])?"
# A name such as hf_token, but not max_tokens or tokenizer.
_NAME = _PREFIX + _NAMES
# What follows a name in a program, up to the quotation mark of its value: also an annotation.
_IS = r"[\"']?\]?(?:\s*:\s*[\w.]+(?:\s*\|\s*None)?)?\s*[:=]\s*(?:[rbu]{1,2}(?=[\"']))?[\"']"
_SCHEME = r"(?:Bearer|Basic|Token)"
_WORD = r"(?:[a-z]+(?:[_.-][a-z]+)+[\"'])"
_NO_VALUE = r"(?:str|bytes|bool|int|float|object|Any|None|null|true|false|Optional|SecretStr)\b"
_PATTERNS = (
    # Keys in PEM form, also where each line has the mark of a patch.
    re.compile(r"(?s)(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
    # https://user:password@host, where the password may hold / and @, and https://token@host.
    re.compile(
        r"([a-z][a-z0-9+.-]{0,20}://)[^\s/@:\"']{0,99}:(?!\d+/)[^\s\"']{1,300}(@)", re.IGNORECASE
    ),
    re.compile(r"([a-z][a-z0-9+.-]{0,20}://)[^\s/@\"']{1,300}(@)", re.IGNORECASE),
    # Authorization: Bearer ..., and "Bearer ..." where it looks like a token.
    re.compile(
        rf"(\bauthorization[\"']?\s*[:=]\s*[\"']?{_SCHEME}\s+)[^\s\"'{{}}]+()", re.IGNORECASE
    ),
    re.compile(r"(\bbearer\s+)(?=[\w+/.~-]*\d)[\w+/.~-]{8,}=*()", re.IGNORECASE),
    re.compile(r"(\bBasic\s+)(?=\w*\d|[a-z]\w*[A-Z]|\w+=)[A-Za-z0-9+/]{12,}={0,2}()(?![\w.-])"),
    # token = "...", "api_key": "...", os.environ["API_KEY"] = "...".
    re.compile(
        rf"(\b{_NAME}{_IS})(?!{_SCHEME}\s*[\"'])[^\"'\n]+([\"'])",
        re.IGNORECASE,
    ),
    # setdefault("API_KEY", "..."), and other pairs if the second one looks like a token.
    re.compile(
        rf"(\b(?:setdefault|setenv|putenv)\(\s*[\"']{_NAME}[\"']\s*,\s*[\"'])[^\"'\n]+([\"'])",
        re.IGNORECASE,
    ),
    re.compile(
        rf"([\"']{_NAME}[\"']\s*,\s*[\"'])(?=[^\"'\n]*\d)[^\"'\s]{{8,}}([\"'])", re.IGNORECASE
    ),
    # auth=("user", "...").
    re.compile(r"(\bauth\s*=\s*\(\s*[\"'][^\"'\n]*[\"']\s*,\s*[\"'])[^\"'\n]+([\"'])"),
    # key="..." and wandb_key="...", if the value is as long as a key and no words.
    re.compile(rf"(\b{_PREFIX}key{_IS})(?!{_WORD})[\w+/=-]{{20,}}([\"'])", re.IGNORECASE),
    re.compile(r"(\blogin\(\s*[\"'])[\w-]{20,}([\"']\s*\))"),
    # TOKEN=..., and --token ..., without quotes: only what is no expression of a program.
    re.compile(rf"(\b{_NAME}(?:=|:\s+|\s+))(?=[\w+/-]*\d)[\w+/-]{{8,}}=*(\s|$)", re.IGNORECASE),
    # export TOKEN=..., and lines that are only PASSWORD=... or password: ....
    re.compile(rf"(\bexport\s+{_NAME}=)[^\s\"'$]+()", re.IGNORECASE),
    re.compile(
        rf"(?m)(^[+-]?[ \t]*(?:(?-i:(?=[A-Z0-9_]+=)){_NAME}="
        rf"|(?:-[ \t]+)?{_PREFIX}{_STRONG}:[ \t]+))"
        rf"(?!{_NO_VALUE})[^\s\"'$(){{}}\[\]|,]+([ \t]*(?:#.*)?$)",
        re.IGNORECASE,
    ),
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
        if is_secret and not argument.startswith("--"):
            found.append(HIDDEN)
        else:
            found.append(scrub(_SETTING.sub(rf"\g<1>{HIDDEN}", argument)))
        is_secret = _OPTION.fullmatch(argument) is not None
    return found
