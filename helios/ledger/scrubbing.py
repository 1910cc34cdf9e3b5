"""Removes secrets from texts that are written into a manifest."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

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
# What names a secret in the arguments of a command: also keys of services, and variables such as
# STORE_KEY, but no --pad-token, whose change must be seen.
_SERVICES = (
    "(?:wandb|openai|anthropic|hf|hugging[_-]?face|comet|neptune|clearml|kaggle|aws|azure|gcp)"
)
_BEGIN = r"(?<![\w.-])[-+]{0,2}(?![-+])"
_SPECIAL = rf"{_PREFIX}(?:pad|eos|bos|unk|mask|cls|sep|num|max|min|start|stop|end)[_-]token"
_VARIABLE = "(?-i:(?:[A-Z0-9_]{0,40}_)?(?:KEY|TOKEN|SECRET|PASSWORD))"
_ARGUMENT = rf"{_BEGIN}(?!{_SPECIAL})(?:{_NAME}|{_PREFIX}{_SERVICES}[_.-]key|{_VARIABLE})"
_KEY = r"(?=[^\s=]*\d)(?=[^\s=]*[A-Za-z])[\w+/-]{16,}={0,2}"
_IS_NAME = re.compile(_ARGUMENT, re.IGNORECASE)
_IS_OPTION = re.compile(rf"(?=-){_ARGUMENT}|{_VARIABLE}", re.IGNORECASE)
_IS_KEY_OPTION = re.compile(rf"(?=-){_BEGIN}{_PREFIX}key", re.IGNORECASE)
_IS_KEY = re.compile(_KEY)
_SETTINGS = (
    re.compile(rf"({_ARGUMENT}=).+()", re.IGNORECASE | re.DOTALL),
    re.compile(rf"({_BEGIN}{_PREFIX}key=){_KEY}()", re.IGNORECASE),
)
# Within an argument, also with quotation marks that a shell has escaped.
_PAIR = re.compile(
    rf"({_ARGUMENT}\\*[\"']?\s*[:=]\s*\\*[\"']?)"
    rf"(?!{_SCHEME}\s|{_NO_VALUE}|\*)[^\s\"'\\,}}]+()",
    re.IGNORECASE,
)


def scrub(text: str) -> str:
    """Return a text in which passwords, tokens and keys are replaced by ``***``.

    Found are credentials in URLs, literal values of names such as ``api_key``, private keys, and
    tokens in the formats of well-known services.
    """
    return _hide(text, _PATTERNS)


def _hide(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub(rf"\g<1>{HIDDEN}\g<2>", text)
    return text


def scrub_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without secrets.

    Hidden are the values of options such as ``--api-token VALUE`` and ``--wandb-key=VALUE``, of
    variables such as ``HF_TOKEN=VALUE``, and of entries of JSON.
    """
    found, before = [], ""
    for argument in arguments:
        is_value = _IS_OPTION.fullmatch(before) and not argument.startswith("--")
        is_key = _IS_KEY_OPTION.fullmatch(before) and _IS_KEY.fullmatch(argument)
        found.append(HIDDEN if is_value or is_key else _scrub_argument(argument))
        before = argument
    return found


def scrub_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat table without secrets: by the parts of a name, and in each text.

    Numbers are hidden only by the last part: ``token.dropout`` is none, ``password.salt`` may be.
    """
    return {name: _scrub_named(name.split("."), value) for name, value in table.items()}


def _scrub_named(parts: Sequence[str], value: Any) -> Any:
    is_number = isinstance(value, bool | int | float)
    if value and any(map(_IS_NAME.fullmatch, parts[-1:] if is_number else parts)):
        return HIDDEN
    return _scrub_entries(value)


def _scrub_argument(argument: str) -> str:
    head, mark, rest = argument.partition("{")
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(mark + rest)
        hidden = _scrub_entries(value)
        if hidden != value:
            return scrub(head) + json.dumps(hidden, ensure_ascii=False)
    return _hide(argument, (*_SETTINGS, *_PATTERNS, _PAIR))


def _scrub_entries(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: HIDDEN if each and _IS_NAME.fullmatch(name) else _scrub_entries(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_scrub_entries(each) for each in value]
    return _scrub_argument(value) if isinstance(value, str) else value
