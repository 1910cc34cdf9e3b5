"""No secret reaches a manifest, and what is none stays readable."""

from __future__ import annotations

import time

import pytest

from helios.ledger.scrubbing import HIDDEN, scrub, scrub_arguments

SECRET = "q7Zp3kVw9Xt2Lm5R"


@pytest.mark.shows("P23")
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
        "secret_key = '{}'",
        "CLIENT_SECRET_KEY = '{}'",
        "wandb_key = '{0}{0}'",
        "'account_key': '{0}{0}'",
        "pwd='{}'",
        "auth = '{}'",
        "auth=('me', '{}')",
        "'Authorization': '{}'",
        "bearer = '{}'",
        "api_key: str | None = '{}'",
        "password = b'{}'",
        "os.environ['WANDB_API_KEY'] = '{}'",
        'os.environ["WANDB_API_KEY"]="{}"',
        "os.environ.setdefault('HF_TOKEN', '{}')",
        "curl -H 'Authorization: Bearer {}'",
        "Bearer {}",
        "Basic {}==",
        "https://me:a@b/{}@example.com/a.git",
        "https://me:{}/@@example.com/a.git",
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
    ("text", "expected"),
    [
        ("export HF_TOKEN=horse\n", "export HF_TOKEN=***\n"),
        ("+DB_PASSWORD=horse\n+x", "+DB_PASSWORD=***\n+x"),
        ("a: 1\n  password: horse # b\n", "a: 1\n  password: *** # b\n"),
        ("os.environ.setdefault('HF_TOKEN', 'horse')", "os.environ.setdefault('HF_TOKEN', '***')"),
        ("wandb.login('0123456789abcdef0123456789abcdef01234567')", "wandb.login('***')"),
        ("authorization: bearer horse", "authorization: bearer ***"),
        ("https://me:p@ss@example.com/a", "https://***@example.com/a"),
    ],
)
def test_a_secret_of_letters_is_hidden_where_its_name_says_so(text: str, expected: str) -> None:
    assert scrub(text) == expected


def test_long_lines_of_data_take_little_time() -> None:
    begin = time.process_time()
    for text in ("a-" * 25_000, "a" * 50_000, "token-" * 8_000, "a://" * 12_000):
        scrub(text)
        scrub_arguments([text])
    assert time.process_time() - begin < 5


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
        "commit 0123456789abcdef0123456789abcdef01234567",
        "checkout('0123456789abcdef0123456789abcdef01234567')",
        "num_heads_key = cfg.key",
        "key=lambda x: x",
        'sort_key="name"',
        "sort_key='validation_accuracy_mean'",
        "    password: str\n    token: torch.Tensor\n    secret: Optional[str]\n",
        "    if not password: return\n",
        "author = 'Ada'",
        "('token', 'mask')",
        "'Authorization': f'Bearer {token}'",
        "'Authorization': 'Bearer ' + token",
        "Basic training of a CIFAR-10 network",
        "# Basic DataLoaderParams",
        "https://medium.com/@ada/post",
        "http://localhost:8080/@ada",
        "export HF_TOKEN=$TOKEN",
        "os.environ['HF_TOKEN']",
        "getenv('HF_TOKEN', '')",
        "token_type_ids = tokens['token']",
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
        "--auth",
        "-abc",
        "-x",
    ]
    assert scrub_arguments(given) == [
        *("--token", HIDDEN, f"--api_key={HIDDEN}", "--max-tokens", "512", "--token", "--lr"),
        *(f"PASSWORD={HIDDEN}", "--auth", HIDDEN, "-x"),
    ]


@pytest.mark.shows("P23")
@pytest.mark.parametrize(
    "words",
    [
        ["--wandb-key", "horse"],
        ["--wandb-key=horse"],
        ["+wandb.key=horse"],
        ["--api-token", "horse"],
        ["-e", "STORE_KEY=horse"],
        ["-e", "KEY=horse"],
        ["--env", "HF_TOKEN", "horse"],
        ["--key", "horse5f167f44f4964e6c998"],
        ["--key=horse5f167f44f4964e6c998"],
        ["--header", "Authorization: horse"],
        ['--config={"a": [{"wandb_key": "\\"horse", "rate": 0.1}]}'],
        ['{"a": "{\\"token\\": \\"horse\\"}"}'],
        ['{\\"token\\": \\"horse\\"}'],
        ["{'a': {'token': 'horse'}}"],
        ["{token: horse}"],
    ],
    ids=" ".join,
)
def test_a_secret_word_of_a_command_is_hidden(words: list[str]) -> None:
    found = scrub_arguments([*words, "--rate", "0.1"])
    assert HIDDEN in " ".join(found)
    assert "horse" not in " ".join(found)
    assert found[len(words) :] == ["--rate", "0.1"]


def test_numbers_in_json_are_hidden_too() -> None:
    given = ['--x={"password": 1234, "rate": 0.5}', '{"rate":0.5}']
    assert scrub_arguments(given) == ['--x={"password": "***", "rate": 0.5}', '{"rate":0.5}']


@pytest.mark.shows("P23")
def test_words_of_a_command_that_are_no_secrets_stay() -> None:
    """A strict start sees a change of what is not hidden only."""
    given = [
        "--sort-key",
        "validation_accuracy_mean",
        "--key",
        "loss",
        "--key-dim",
        "64",
        "--monkey",
    ]
    given += ["3", "--pad-token", "<pad>", "eos_token=</s>", "--fields", "token:int", "{bad json}"]
    given += ["--tokenizer", "bpe", "--tokens", "3", "--level", "token", "--betas", "[0.9,0.99]"]
    assert scrub_arguments(given) == given
