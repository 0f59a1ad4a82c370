"""How a key, a value, a column becomes bytes: order-preserving keys, tuples, JSON records."""

from kvstore.codec.tuples import Element, decode_tuple, encode_tuple

__all__ = ["Element", "decode_tuple", "encode_tuple"]
