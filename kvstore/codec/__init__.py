"""Bytes of keys: order-preserving escapes and versioned keys.

Floors, from the top:

    keys tuples           versioned keys; several values as one key
    json ordered varint decimals
"""
