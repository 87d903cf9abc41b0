"""Limits on the structure of a JSON text, checked before it is parsed."""

import re

MAX_TOKENS = 32_768  # strings, numbers, brackets, commas, colons: a valid request has 18,000
MAX_DEPTH = 8  # a box in a list in a request is at depth 3
MAX_SCALAR = 64  # characters of a number or a literal

# One match per token. Possessive quantifiers: an unterminated string fails in one pass.
_TOKEN = re.compile(
    rb"""\s*+(?:(?P<string>"[^"\\]*+(?:\\.[^"\\]*+)*+")|(?P<sign>["\[\]{}:,])|"""
    rb"""(?P<scalar>[^"\[\]{}:,\s]++))""",
    re.DOTALL,
)


def check_json(text: bytes | bytearray) -> str | None:
    """Return which limit a JSON text exceeds, as a sentence, or None.

    Parsing and validation take time per key: ten megabytes of keys block a server for half a
    minute. This check reads at most `MAX_TOKENS` tokens. A malformed text may pass; parsing rejects
    it.

    Example:
        >>> check_json(b'{"model": "soft"}') is None
        True
        >>> check_json(b"[" * 100)
        'JSON is nested more than 8 deep: send one request as an object.'
    """
    depth = end = 0
    for _ in range(MAX_TOKENS):
        token = _TOKEN.match(text, end)
        if token is None:  # the end, or only white space is left
            return None
        end = token.end()
        # Converting a long number to an integer takes quadratic time.
        if token.lastgroup == "scalar" and end - token.start("scalar") > MAX_SCALAR:
            return f"JSON has a number of more than {MAX_SCALAR} characters: send a shorter one."
        if token.lastgroup == "sign":
            sign = token["sign"]
            # A quote that does not begin a complete string.
            if sign == b'"':
                return "JSON has an unterminated string: send the complete request."
            depth += (sign in b"[{") - (sign in b"]}")
        if depth > MAX_DEPTH:
            return f"JSON is nested more than {MAX_DEPTH} deep: send one request as an object."
    if _TOKEN.match(text, end) is None:
        return None
    return f"JSON has more than {MAX_TOKENS:,} tokens: send one request with fewer boxes."
