"""No secret reaches a manifest, and what is none stays readable."""

from __future__ import annotations

import pytest

from helios.ledger.manifest.scrubbing import HIDDEN, scrub, scrub_arguments

SECRET = "q7Zp3kVw9Xt2Lm5R"


@pytest.mark.parametrize(
    "text",
    [
        "https://me:{}@example.com/a.git",
        "https://{}@example.com/a.git",
        "+hf_token = '{}'",
        '+    "api_key": "{}",',
        "-AWS_SECRET_ACCESS_KEY={}",
        "export WANDB_API_KEY={}\n",
        "--token {}",
        "password: '{}'",
        "wandb.login(key='{0}{0}')",
        "run.sh ghp_{}{}",
        "+x = 'hf_{0}{0}'",
        "AKIAABCDEFGH12345678",
        "eyJhbGciOiJI.eyJzdWIiOiIx.{}",
        "-----BEGIN RSA PRIVATE KEY-----\n+{0}\n+{0}\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\n+{0}",
    ],
)
def test_a_secret_is_hidden(text: str) -> None:
    found = scrub(text.format(SECRET, SECRET))
    assert HIDDEN in found
    assert SECRET not in found
    assert "AKIAABCDEFGH12345678" not in found


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=512",
        "--max-tokens 512",
        "tokenizer = 'bert-base-uncased'",
        "token = tokens[0]",
        "for token in batch_tokens_2:",
        "git@github.com:user/project.git",
        "https://github.com/user/project.git",
        "key = 'weights'",
        "+def password_is_set(config):",
        "index 83db48f84..f735c2d9e 100644",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert scrub(text) == text


def test_the_values_of_secret_options_are_hidden() -> None:
    given = [
        "--token",
        "abc",
        "--api_key=foo",
        "--max-tokens",
        "512",
        "--token",
        "--lr",
        "PASSWORD=x",
    ]
    assert scrub_arguments(given) == [
        *("--token", HIDDEN, f"--api_key={HIDDEN}", "--max-tokens", "512", "--token", "--lr"),
        f"PASSWORD={HIDDEN}",
    ]
