"""Bytes of keys: order-preserving escapes and versioned keys."""
