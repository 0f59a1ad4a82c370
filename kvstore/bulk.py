"""Bulk loads under a name that no other distribution has: `from kvstore import bulk`.

The same objects as `import bulk`. Raises `ForeignPackageError` where another `bulk` hides ours.
"""

from kvstore.neighbours import require_own

require_own("bulk")

from bulk import Import, Manifest, Part, PartWriter, ingest, read_manifest, seed  # noqa: E402

__all__ = ["Import", "Manifest", "Part", "PartWriter", "ingest", "read_manifest", "seed"]
