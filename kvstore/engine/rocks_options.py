"""How a store's RocksDB database and its families are stored."""

from __future__ import annotations

from pathlib import Path

import rocksdict as rocks

from kvstore.limits import BLOCK_BYTES, INFO_LOG_BYTES_MAX, LOG_BYTES_MAX, MANIFEST_BYTES_MAX


def database_options(cache: rocks.Cache, *, requires_logs: bool = True) -> rocks.Options:
    """With `requires_logs`, the MANIFEST lists each log that was closed and synced, and the
    database does not open where one of them is lost or shorter."""
    options = rocks.Options(raw_mode=True)
    if requires_logs:  # rocksdict has no call for this option; loading it from a file takes 90 us
        options, _ = rocks.Options.load_latest(str(_OPTIONS_DIRECTORY))
    _set_family(options, cache)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(INFO_LOG_BYTES_MAX)
    options.set_max_manifest_file_size(MANIFEST_BYTES_MAX)
    options.set_max_total_wal_size(LOG_BYTES_MAX)
    # A crash leaves a torn record at the end of the log. A bad record before the end is damage.
    options.set_wal_recovery_mode(rocks.DBRecoveryMode.tolerate_corrupted_tail_records())
    return options


_OPTIONS_DIRECTORY = Path(__file__).with_name("options")


def family_options(family: str, cache: rocks.Cache) -> rocks.Options:
    """The options of one family. Benchmarks use them for plain rocksdict as well."""
    options = rocks.Options(raw_mode=True)
    _set_family(options, cache)
    return options


def table_options() -> rocks.BlockBasedOptions:
    """The layout of the sorted files of stores and of imports.

    They have no bloom filter. A filter of whole keys is no help for a seek to the versions of a
    key, and building one takes a tenth of the time of writing an SST.
    """
    table = rocks.BlockBasedOptions()
    table.set_format_version(5)
    table.set_block_size(BLOCK_BYTES)
    return table


def _set_family(options: rocks.Options, cache: rocks.Cache) -> None:
    table = table_options()
    table.set_block_cache(cache)
    options.set_block_based_table_factory(table)
    options.set_compression_type(rocks.DBCompressionType.lz4())
