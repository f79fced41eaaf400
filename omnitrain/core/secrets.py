"""Masking of secrets in command lines, settings and texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
# The longest word of a command that is kept, as `python -c` takes entire programs.
_MAX_WORD = 2000
_SECRET_WORDS = {
    "token", "secret", "password", "passwd", "passphrase", "pwd", "pass", "key", "apikey", "credential", "credentials",
    "auth", "bearer", "cookie", "pat",
}  # fmt: skip
_ASSIGNED = re.compile(
    r"(?i)((?:token|secret|passw(?:or)?d|passphrase|pwd|(?:api|access)[_-]?key|credentials?|authorization|bearer)"
    r"[\"']?\s*[:=]\s*[\"']?)"
    r"[^\s\"',;&}\])]+"
)
_IN_ADDRESS = re.compile(
    r"(?<=://)(?:[^/@:\s\"']*:[^@\s\"']+|[^/@\s\"']+)(?=@)"  # a password may have a slash
    r"|(?<![\w/@:.{+-])[\w.+-]+:(?!//)[^@\s\"']+(?=@\w)"  # what errors print of an address without its beginning
)
_TOKEN = re.compile(
    r"\b(?:hf_|sk-|pk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|eyJ)[A-Za-z0-9_.-]{8,}"
    r"|(?=[A-Za-z0-9]*[0-9])(?=[A-Za-z0-9]*[A-Za-z])(?<![A-Za-z0-9])[A-Za-z0-9]{24,}"
    # the secret key of AWS has 40 digits of base64
    r"|(?<![A-Za-z0-9/+])(?=\S*[0-9])(?=\S*[a-z])(?=\S*[A-Z])[A-Za-z0-9+][A-Za-z0-9/+]{39}(?![A-Za-z0-9/+])"
)


def is_secret_name(name: str) -> bool:
    """Return whether the name of an option or a variable is that of a secret.

    >>> is_secret_name("--hub_token"), is_secret_name("wandbApiKey"), is_secret_name("--tokenizer")
    (True, True, False)
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower().translate(_SEPARATORS).split()
    return not _SECRET_WORDS.isdisjoint(words)


_SEPARATORS = {ord(character): " " for character in "-_.+:/@~"}


def mask_text(text: str) -> str:
    """Return a text with everything masked that looks like a token or a password.

    >>> mask_text("https://me:pw@host/x?api_key=abc&n=1"), mask_text("lr=0.1")
    ('https://***@host/x?api_key=***&n=1', 'lr=0.1')
    """
    for pattern, instead in ((_IN_ADDRESS, MASK), (_ASSIGNED, rf"\1{MASK}"), (_TOKEN, MASK)):
        text = pattern.sub(instead, text)
    return text


def mask_command(words: Sequence[str]) -> list[str]:
    """Return a command line with values masked that are secret by their option's name or look like secrets.

    >>> mask_command(["python", "a.py", "--token=abc", "--password", "b", "--max-tokens", "5"])
    ['python', 'a.py', '--token=***', '--password', '***', '--max-tokens', '5']
    """
    safe, is_next = list[str](), False
    for word in words:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-") or bool(equals)
        if is_next and not word.startswith("--"):
            safe.append(MASK)
        elif equals and re.fullmatch(r"[-+~@\w./]+", name) and is_secret_name(name):
            safe.append(f"{name}={MASK}")
        else:
            safe.append(mask_text(word if len(word) <= _MAX_WORD else f"{word[:_MAX_WORD]}..."))
        is_next = is_option and not equals and is_secret_name(word)
    return safe


def mask_secrets(value: Any) -> Any:
    """Return JSON types with strings masked that look like secrets, or whose key is that of one."""
    if isinstance(value, Mapping):
        return {
            key: MASK if isinstance(entry, str) and is_secret_name(key) else mask_secrets(entry)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [mask_secrets(entry) for entry in value]
    return mask_text(value) if isinstance(value, str) else value
