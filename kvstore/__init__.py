"""An embedded, RocksDB-backed, multi-version key-value store."""
