"""Block keys against an independent computation from the documentation alone."""

from __future__ import annotations

import hashlib
import struct

import cbor2
import numpy as np
import pytest
import xxhash

from octavo.kv.keys import NO_EXTRAS, BlockHasher, ExtraKeys, root_key

ROOT = bytes(range(32))
TOKENS = np.array([11, 12, 13, 70000, 15, 16, 17, 18, 19, 20, 21, 22], np.int32)
FULL = ExtraKeys(b"adapter", ((2, 5, b"cat"), (6, 4, b"dog")), "tenant-ä", b"embeds")


def chain(algorithm: str, extras: ExtraKeys = NO_EXTRAS, blocks: int = 3) -> list[bytes]:
    keys: list[bytes] = []
    BlockHasher(algorithm, ROOT, 4).extend(keys, TOKENS, blocks, extras)
    return keys


@pytest.mark.parametrize("algorithm, digest", [
    ("sha256_cbor", lambda m: hashlib.sha256(m).digest()),
    ("xxhash_cbor", lambda m: xxhash.xxh3_128(m).digest()),
])  # fmt: skip
def test_cbor_keys_follow_the_documentation(algorithm, digest):
    extras = [
        [["lora", b"adapter"], ["mm", b"cat", 2], ["salt", "tenant-ä"], ["embeds", b"embeds"]],
        [["lora", b"adapter"], ["mm", b"cat", -2], ["mm", b"dog", 2], ["embeds", b"embeds"]],
        [["lora", b"adapter"], ["mm", b"dog", -2], ["embeds", b"embeds"]],
    ]
    parent, expected = ROOT, []
    for i, extra in enumerate(extras):
        parent = digest(cbor2.dumps([parent, TOKENS[4 * i : 4 * i + 4].tolist(), extra], canonical=True))
        expected.append(parent)
    assert chain(algorithm, FULL) == expected
    plain = digest(cbor2.dumps([ROOT, [11, 12, 13, 70000], None], canonical=True))
    assert chain(algorithm)[0] == plain


def test_worked_example_of_the_documentation():
    """The first block of the example in docs/prefix-cache.md, down to the bytes."""
    message = bytes.fromhex("83" + "5820" + ROOT.hex() + "84" + "0b" + "0c" + "0d" + "1a00011170" + "f6")
    assert cbor2.dumps([ROOT, [11, 12, 13, 70000], None], canonical=True) == message
    assert chain("sha256_cbor")[0] == hashlib.sha256(message).digest()
    assert chain("sha256_cbor")[0].hex() == "df890c223775d20579c60ee89699f97cfd8d6792408bf9f054da39c82d4a2c56"


@pytest.mark.parametrize("algorithm, digest", [
    ("sha256", lambda m: hashlib.sha256(m).digest()),
    ("xxhash", lambda m: xxhash.xxh3_128(m).digest()),
])  # fmt: skip
def test_plain_keys_follow_the_documentation(algorithm, digest):
    def part(tag: int, payload: bytes) -> bytes:
        return struct.pack("<BI", tag, len(payload)) + payload

    first = ROOT + struct.pack("<5I", 4, 11, 12, 13, 70000)
    first += part(1, b"adapter") + part(2, struct.pack("<i", 2) + b"cat")
    first += part(3, "tenant-ä".encode()) + part(4, b"embeds")
    key = digest(first)
    second = key + struct.pack("<5I", 4, 15, 16, 17, 18) + part(1, b"adapter")
    second += (
        part(2, struct.pack("<i", -2) + b"cat") + part(2, struct.pack("<i", 2) + b"dog") + part(4, b"embeds")
    )
    assert chain(algorithm, FULL, 2) == [key, digest(second)]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_plain_keys_without_extras_follow_the_documentation(dtype):
    """Also by the short way that there is for them."""
    keys: list[bytes] = []
    hasher = BlockHasher("sha256", ROOT, 4)
    hasher.extend(keys, TOKENS.astype(dtype), 1, NO_EXTRAS)
    hasher.extend(keys, TOKENS.astype(dtype), 3, NO_EXTRAS)
    parent, expected = ROOT, []
    for i in range(3):
        parent = hashlib.sha256(parent + struct.pack("<5I", 4, *TOKENS[4 * i : 4 * i + 4].tolist())).digest()
        expected.append(parent)
    assert keys == expected


def test_every_part_changes_every_key():
    variants = [
        NO_EXTRAS,
        ExtraKeys(b"a", (), None, None),
        ExtraKeys(b"b", (), None, None),
        ExtraKeys(None, ((0, 4, b"x"),), None, None),
        ExtraKeys(None, ((1, 4, b"x"),), None, None),
        ExtraKeys(None, ((0, 4, b"y"),), None, None),
        ExtraKeys(None, (), "a", None),
        ExtraKeys(None, (), "b", None),
        ExtraKeys(None, (), None, b"a"),
    ]
    for algorithm in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
        keys = [key for extras in variants for key in chain(algorithm, extras)]
        assert len(set(keys)) == len(keys)
    other_root: list[bytes] = []
    BlockHasher("sha256", b"\0" * 32, 4).extend(other_root, TOKENS, 3, NO_EXTRAS)
    assert not set(other_root) & set(chain("sha256"))


def test_root_depends_on_all_that_makes_kv():
    base = dict(weights=b"w" * 32, dtype="bfloat16", kv_format="f", rope="r", block_size=16)
    roots = {root_key(**base)}
    for name, value in dict(
        weights=b"v" * 32, dtype="float32", kv_format="g", rope="s", block_size=32
    ).items():
        roots.add(root_key(**(base | {name: value})))
    assert len(roots) == 6
    assert root_key(**base) == root_key(**base)
    message = ["octavo-kv-1", b"w" * 32, "bfloat16", "f", "r", 16]
    assert root_key(**base) == hashlib.sha256(cbor2.dumps(message, canonical=True)).digest()
