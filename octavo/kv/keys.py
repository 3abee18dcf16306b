"""Block keys: what identifies the contents of a full KV block, byte by byte.

A block's key is `H(parent key, token ids, extra keys)`. The parent of a sequence's first block is
the *root*, a 32-byte digest of everything that makes KV values (weights, dtype, KV format, RoPE,
block size); the server tells it at `/version`, so another program can compute the same keys.

Extra keys of a block, in this order, each present only if it applies to the block:

1. `lora`: digest of the adapter's content;
2. `mm`: for each multimodal item that overlaps the block, the item's hash and its start relative
   to the block's first token (negative if it began earlier), in order of start;
3. `salt`: the request's cache salt, first block only (the chain carries it further);
4. `embeds`: hash of the prompt embeddings.

Two encodings of the hashed message:

* plain (`sha256`, `xxhash`): `parent ‖ u32 n ‖ n × u32 token id ‖ extras`, little-endian; an extra
  is `u8 tag ‖ u32 length ‖ payload`, tags 1 to 4 in the order above; the payload of `mm` is
  `i32 start ‖ hash`, of `salt` its UTF-8, of the others the digest.
* CBOR (`sha256_cbor`, `xxhash_cbor`): canonical CBOR (RFC 8949 section 4.2.1) of the array
  `[parent (byte string), [token ids], extras]`; `extras` is null if there are none, else an array
  of `["lora", bytes]`, `["mm", bytes, start]`, `["salt", text]`, `["embeds", bytes]`.

`H` is SHA-256 (32 bytes) or XXH3-128 (16 bytes, big-endian as xxhash's `digest`). XXH3 is fast
but can be forged on purpose; it must not be used where tenants that distrust each other share
a cache.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Extra = tuple[str, bytes] | tuple[str, str] | tuple[str, bytes, int]
_TAGS = {"lora": 1, "mm": 2, "salt": 3, "embeds": 4}


@dataclass(frozen=True)
class ExtraKeys:
    """Everything besides token ids that a request's KV depends on.

    Hashing takes this object whole, so no caller can forget a part; a new dependency is added
    here and reaches every key. `mm_spans` are (start, length, hash) in tokens of the prompt.
    """

    lora_digest: bytes | None
    mm_spans: tuple[tuple[int, int, bytes], ...]
    cache_salt: str | None
    prompt_embeds_hash: bytes | None

    def of_block(self, start: int, end: int) -> list[Extra]:
        """Extras of the block that holds tokens `start .. end - 1`, in the documented order."""
        extras: list[Extra] = []
        if self.lora_digest is not None:
            extras.append(("lora", self.lora_digest))
        for item_start, length, digest in sorted(self.mm_spans):
            if item_start < end and item_start + length > start:
                extras.append(("mm", digest, item_start - start))
        if self.cache_salt is not None and start == 0:
            extras.append(("salt", self.cache_salt))
        if self.prompt_embeds_hash is not None:
            extras.append(("embeds", self.prompt_embeds_hash))
        return extras


_WORDS = (np.dtype("<i4"), np.dtype("<u4"))  # whose bytes are those of the plain message

NO_EXTRAS = ExtraKeys(None, (), None, None)


def encode_plain(parent: bytes, token_ids: np.ndarray, extras: Sequence[Extra]) -> bytes:
    """The plain message (see the module): `token_ids` are integers of any dtype."""
    parts = [
        parent,
        struct.pack("<I", len(token_ids)),
        np.ascontiguousarray(token_ids, dtype="<u4").tobytes(),
    ]
    for extra in extras:
        payload = extra[1].encode() if isinstance(extra[1], str) else extra[1]
        if len(extra) == 3:
            payload = struct.pack("<i", extra[2]) + payload
        parts.append(struct.pack("<BI", _TAGS[extra[0]], len(payload)) + payload)
    return b"".join(parts)


def encode_cbor(parent: bytes, token_ids: np.ndarray, extras: Sequence[Extra]) -> bytes:
    """The CBOR message (see the module)."""
    import cbor2

    return cbor2.dumps([parent, token_ids.tolist(), [list(e) for e in extras] or None], canonical=True)


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


def _xxh3(message: bytes) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(message)


_ALGORITHMS: dict[str, tuple[Callable[..., bytes], Callable[[bytes], bytes]]] = {
    "sha256": (encode_plain, _sha256),
    "sha256_cbor": (encode_cbor, _sha256),
    "xxhash": (encode_plain, _xxh3),
    "xxhash_cbor": (encode_cbor, _xxh3),
}


@dataclass
class BlockHasher:
    """Computes keys of full blocks for one engine: algorithm, root and block size are fixed."""

    algorithm: str
    root: bytes
    block_size: int
    _encode: Callable[..., bytes] = field(init=False, repr=False)
    _hash: Callable[[bytes], bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._encode, self._hash = _ALGORITHMS[self.algorithm]

    def extend(self, keys: list[bytes], token_ids: np.ndarray, num_blocks: int, extras: ExtraKeys) -> None:
        """Append keys to a request's chain until it covers `num_blocks` full blocks.

        Args:
            keys: the chain so far, one key per full block; extended in place.
            token_ids: the request's tokens, at least `num_blocks * block_size` of them.
            num_blocks: how many blocks the chain shall cover.
            extras: the request's other key parts.
        """
        size = self.block_size
        parent = keys[-1] if keys else self.root
        if self._encode is encode_plain and extras is NO_EXTRAS and token_ids.dtype in _WORDS:
            head = struct.pack("<I", size)  # the common case, made short: `encode_plain` without extras
            for start in range(len(keys) * size, num_blocks * size, size):
                parent = self._hash(parent + head + token_ids[start : start + size].tobytes())
                keys.append(parent)
            return
        for block in range(len(keys), num_blocks):
            start = block * size
            extra = extras.of_block(start, start + size) if extras is not NO_EXTRAS else ()
            parent = self._hash(self._encode(parent, token_ids[start : start + size], extra))
            keys.append(parent)


def root_key(weights: bytes, dtype: str, kv_format: str, rope: str, block_size: int) -> bytes:
    """The root of all chains: SHA-256 over canonical CBOR of what makes KV values.

    Args:
        weights: the model's fingerprint (32 bytes).
        dtype: of the computation.
        kv_format: `KVFormat.describe()` of every KV group, joined by `;`.
        rope: text of all rotary settings, scaling fixed by `max_model_len` included.
        block_size: tokens in a block.
    """
    import cbor2

    return _sha256(cbor2.dumps(["octavo-kv-1", weights, dtype, kv_format, rope, block_size], canonical=True))
