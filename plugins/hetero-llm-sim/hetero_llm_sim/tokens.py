"""Text to tokens and back without a model, and a greedy "model" that is a hash.

Both directions are exact: ``decode(encode(text)) == text`` for every text, and ``encode(decode(ids)) == ids`` for what
the engine generates. So a client can tell from text alone whether a token was lost, doubled or changed.

Token ids:
    0 to 255            one byte of UTF-8, for what nothing else covers
    256 to 5880         a generated word: a blank and two syllables, `` bade``
    2**24 to 2**31 - 1  one to four ASCII characters, one a byte from the top, of which only the first may be a blank
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghjklmnprstv" for vowel in "aeiou")
WORDS = tuple(f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES)
"""Text of the tokens an engine generates; all are five bytes long."""

WORD_BYTES = tuple(word.encode() for word in WORDS)
FIRST_WORD = 256
_ID_OF_WORD = {word: FIRST_WORD + number for number, word in enumerate(WORDS)}
_SYLLABLE = "[bdfghjklmnprstv][aeiou]"
_PIECES = re.compile(rf" {_SYLLABLE}{_SYLLABLE}(?![A-Za-z])|[\x01-\x7f][\x01-\x1f\x21-\x7f]{{0,3}}|[^\x01-\x7f]+")
_PIECES_KEPT = 1 << 16
_PRIME = (1 << 61) - 1
_FACTOR = 6364136223846793005 % _PRIME
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class _IdsOfPieces(dict[str, int]):
    """Ids of words and ASCII pieces; most texts use few different ones, so they are kept."""

    def __missing__(self, piece: str) -> int:
        if len(self) >= _PIECES_KEPT:
            self.clear()
        word = _ID_OF_WORD.get(piece)
        self[piece] = found = int.from_bytes(piece.ljust(4, "\0").encode()) if word is None else word
        return found


_IDS = _IdsOfPieces()


def encode(text: str) -> list[int]:
    """Return the tokens of `text`. Left to right, so that texts with a common beginning share tokens."""
    ids: list[int] = []
    for piece in _PIECES.findall(text):
        if "\0" < piece[0] <= "\x7f":
            ids.append(_IDS[piece])
        else:
            ids.extend(piece.encode("utf-8", "surrogatepass"))
    return ids


def decode(ids: Iterable[int]) -> str:
    """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

    Raises:
        ValueError: an id is not one of ours.
    """
    return b"".join(token_bytes(token) for token in ids).decode("utf-8", "replace")


def token_bytes(token: int) -> bytes:
    """Return the UTF-8 bytes of one token.

    Raises:
        ValueError: the id is not one of ours.
    """
    if 0 <= token < FIRST_WORD:
        return bytes((token,))
    if FIRST_WORD <= token < FIRST_WORD + len(WORDS):
        return WORD_BYTES[token - FIRST_WORD]
    if 1 << 24 <= token < 1 << 31:
        piece = token.to_bytes(4).rstrip(b"\0")
        if piece.isascii() and 0 not in piece:
            return piece
    raise ValueError(f"{token} is not a token of this engine")


class Greedy:
    """The tokens that follow a prompt: a pure function of all tokens before and of the seed.

    So replicas agree, a sampled token can be told from a wrong one, and a prompt continued with its own first answer
    tokens goes on as the answer did.
    """

    __slots__ = ("_salt", "_state", "wrong_from")

    def __init__(self, prompt: Sequence[int], seed: int = 0) -> None:
        state = 1
        for token in prompt:
            state = (state * _FACTOR + token + 1) % _PRIME
        self._state = state
        self._salt = (seed + 1) * _MIX & _MASK
        self.wrong_from: int | None = None
        """Tokens after which the generator goes wrong, counted down; None is never. For faults."""

    def next(self) -> int:
        """Return the next token and take it as read."""
        mixed = (self._state ^ self._salt) * _MIX & _MASK
        word = (mixed >> 32 ^ mixed >> 17) % len(WORDS)
        if self.wrong_from is not None:
            word = (word + 1) % len(WORDS) if self.wrong_from <= 0 else word
            self.wrong_from -= 1
        token = FIRST_WORD + word
        self._state = (self._state * _FACTOR + token + 1) % _PRIME
        return token


def continuation(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """Return the first `count` tokens every engine with this seed answers to `prompt`."""
    greedy = Greedy(prompt, seed)
    return [greedy.next() for _ in range(count)]
