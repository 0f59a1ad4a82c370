"""Live readers: `kvstore.follow`."""
