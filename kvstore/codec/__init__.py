"""Bytes of keys: several values as one key, order-preserving escapes, versioned keys.

Floors, from the top:

    keys tuples           versioned keys; several values as one key
    json ordered varint decimals
"""

from kvstore.codec.tuples import Element, decode_tuple, encode_tuple

__all__ = ["Element", "decode_tuple", "encode_tuple"]
